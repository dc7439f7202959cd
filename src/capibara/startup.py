"""What ``import capibara`` does before anything else is imported.

It says when the installed JAX is not a supported one, and it keeps JAX away from a TPU compiler on a machine without a
TPU: where ``libtpu`` can be imported, JAX tries to start a TPU, and libtpu prints errors about it in every process.
Both look at names of files only: JAX is not imported for them.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping

from capibara.jax_versions import UnsupportedJaxWarning, find_package, installed_version, version_problem

__all__ = ["FLAGS", "PACKAGE", "STARTED", "has_tpu", "keep_to_cpu", "package_folder", "prepare"]


def package_folder() -> tuple[int, int] | None:
    """Which folder Capibara's name leads to, as the system numbers it; ``None`` where it is in no folder."""
    try:
        status = os.stat(os.path.dirname(__file__))
    except OSError:
        return None
    return status.st_dev, status.st_ino


STARTED = time.time()
"""When this process began to import Capibara, as files say when they were changed."""
PACKAGE = package_folder()
"""The folder that it was imported from: a link may lead to another release later."""
FLAGS = os.environ.get("XLA_FLAGS", "")
"""``XLA_FLAGS`` as they were then: XLA reads them once."""

# Variables of libtpu that say nothing about a TPU. JAX sets the first two itself, where it finds none.
_ABOUT_NO_TPU = {
    *("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"),
    *("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL", "TPU_LOG_DIR"),
}


def prepare() -> None:
    """Warn of an unsupported JAX; choose the CPU where there is nothing else that ``libtpu`` could start."""
    if keep_to_cpu(os.environ):
        os.environ["JAX_PLATFORMS"] = "cpu"  # also for processes that this one starts
        if "jax" in sys.modules and (config := sys.modules["jax"].config).jax_platforms is None:
            config.update("jax_platforms", "cpu")
    _, problem = version_problem(installed_version())
    if problem:
        warnings.warn(problem, UnsupportedJaxWarning, stacklevel=3)


def keep_to_cpu(environment: Mapping[str, str], system: str = "/") -> bool:
    """Whether JAX is to be kept to the CPU: ``libtpu`` is there, no accelerator is, and the user has chosen nothing.

    Args:
      environment: variables, such as ``os.environ``.
      system: the root of the file system that is looked at.
    """
    chosen = "JAX_PLATFORMS" in environment or "JAX_FORCE_TPU_INIT" in environment
    if chosen or any(name.startswith("TPU_") and name not in _ABOUT_NO_TPU for name in environment):
        return False
    if find_package("libtpu") is None:
        return False
    return not has_tpu(system) and not any(_others(system))


def has_tpu(system: str = "/") -> bool:
    """Whether there is a device file of a TPU's driver: without one, nothing in this system can use a TPU."""
    return any(name.startswith("accel") for name in _names(system, "dev")) or any(
        name.isdecimal() for name in _names(system, "dev/vfio")
    )


def _names(*folder: str) -> list[str]:
    try:
        return os.listdir(os.path.join(*folder))
    except OSError:  # it is not there, or not for us
        return []


def _others(system: str) -> Iterator[bool]:
    """Other accelerators, and plugins of JAX for them."""
    yield from (
        os.path.exists(os.path.join(system, "dev", name)) for name in ("nvidia0", "nvidiactl", "dxg", "kfd")
    )
    yield find_package("jax_plugins") is not None
    from importlib import metadata

    yield bool(metadata.entry_points(group="jax_plugins"))
