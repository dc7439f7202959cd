"""Ray Train with JAX on any platform: a backend configuration for its ``JaxTrainer``.

``JaxTrainer`` starts a function on several workers, and its own configuration makes them one JAX program on TPUs and
GPUs only; on a CPU each worker would train for itself. :func:`ray_jax_config` gives one that does so everywhere, and
lets a worker emulate several CPU devices::

    trainer = JaxTrainer(function, jax_config=ray_jax_config(devices=2), scaling_config=ScalingConfig(num_workers=4))

In the function ``jax.devices()`` has the devices of all workers, and :func:`capibara.train.train` trains over them.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import jax

from capibara.errors import CapibaraError, ConfigError, MissingExtraError
from capibara.launch import Membership
from capibara.train.processes import join_processes

__all__ = ["ray_jax_config"]

_LONGEST_SHUTDOWN = 15.0  # seconds; a worker that waits for one that is gone does not come back


def ray_jax_config(*, devices: int | None = None, environment: Mapping[str, str] | None = None) -> Any:
    """The ``jax_config`` of a ``ray.train.v2.jax.JaxTrainer`` that makes its workers one JAX program.

    Args:
      devices: emulated CPU devices of each worker; None: the devices that JAX finds there, on any platform.
      environment: further variables of the workers, set before JAX starts.

    Returns:
      a ``ray.train.backend.BackendConfig``.

    Raises:
      MissingExtraError: Ray is not installed, or not its part for training.
      ConfigError: ``devices`` is out of range.
    """
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        raise ConfigError(f"devices={devices!r}: expected an integer from 1, or None")
    variables = dict(environment or {})
    if devices is not None:
        flags = variables.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        variables["JAX_PLATFORMS"] = "cpu"
        variables["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    return _classes()(variables)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("ray", "pandas", "pyarrow", "fsspec", "requests"):  # those that ray[train] brings
            raise MissingExtraError("ray[train]", "ray", "training on Ray") from error
        raise


@functools.cache
def _classes() -> type:
    """The configuration's class, derived from Ray's when that is first needed."""
    ray, backend = _module("ray"), _module("ray.train.backend")

    class CapibaraJaxBackend(backend.Backend):
        """Makes the workers one JAX program, and takes it apart again."""

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            """Called before the training function."""
            address, count = worker_group.execute_single(0, _free_address), len(worker_group)
            ray.get(
                [
                    worker_group.execute_single_async(
                        index, _join, Membership(address, count, index).variables(), backend_config.variables
                    )
                    for index in range(count)
                ]
            )

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            """Called after it, also after a failure."""
            try:
                ray.get(worker_group.execute_async(_leave), timeout=_LONGEST_SHUTDOWN)
            except ray.exceptions.RayError:
                # A worker is gone, or waits for one that is: Ray ends their processes.
                return

    class CapibaraJaxConfig(backend.BackendConfig):
        """See :func:`ray_jax_config`."""

        def __init__(self, variables: dict[str, str]) -> None:
            self.variables = variables

        @property
        def backend_cls(self) -> type:
            """The class that starts and ends the workers' program."""
            return CapibaraJaxBackend

        def to_dict(self) -> dict[str, Any]:
            """What Ray shows of it."""
            return {"variables": sorted(self.variables)}

    return CapibaraJaxConfig


def _free_address() -> str:
    """On worker 0: where the others reach it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{_module('ray').util.get_node_ip_address()}:{probe.getsockname()[1]}"


def _join(place: dict[str, str], variables: dict[str, str]) -> None:
    """On every worker, all at the same time."""
    os.environ.update({**variables, **place})
    if platforms := variables.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", platforms)  # JAX read the environment when it was imported
    try:
        join_processes()
    except CapibaraError as error:  # of a class that Ray can send to the driver
        raise RuntimeError(str(error)) from error


def _leave() -> None:
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
