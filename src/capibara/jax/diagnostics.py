"""``check_installation()``: does ``capibara.jax`` work here, and if not, why.

The checks of :mod:`capibara.measure.installation` (JAX imports, a backend starts, a compiled gradient is
right) and one more: that the overlay really hands out JAX's own objects in this process.
"""

from __future__ import annotations

import importlib
import sys

from capibara.measure.installation import (
    Check,
    InstallationReport,
    describe_devices,
    device_memory_allocated,
    device_memory_peak,
    package_versions,
)
from capibara.measure.installation import check_installation as _check_installation

__all__ = [
    "Check",
    "InstallationReport",
    "check_installation",
    "describe_devices",
    "device_memory_allocated",
    "device_memory_peak",
    "package_versions",
]


def check_installation() -> InstallationReport:
    """Try JAX and the overlay step by step.

    Returns:
      An :class:`~capibara.measure.installation.InstallationReport`: ``jax_native_available``,
      ``error_message`` (empty when all is well), ``checks``, ``versions``, ``devices``, ``backend``. It
      prints well, and ``to_dict()`` is JSON-ready. It does not raise for a broken installation.
    """
    return _check_installation((_overlay_check(),))


def _overlay_check() -> Check:
    from ._overlay import BASE, ELSEWHERE, PREFIX, AliasFinder, Overlay

    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        remedy = "Something removed it; importlib.reload(capibara.jax) puts it back"
        return Check("overlay", False, "the finder of capibara.jax is not on sys.meta_path", remedy)
    for name in ("nn", "numpy.linalg", "scipy.linalg"):
        importlib.import_module(PREFIX + name)
    aliases, copies = 0, []
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None) or ""
        # Capibara's own modules live in Capibara's folder; everything else has to be JAX's very module.
        if not name.startswith(PREFIX) or isinstance(module, Overlay) or file.startswith(_own_folder()):
            continue
        aliases += 1
        if module is not sys.modules.get(ELSEWHERE.get(name, BASE + name[len(PREFIX) :])):
            copies.append(name)
    if copies:
        remedy = "Another import hook loaded it; start a fresh Python without that hook"
        return Check(
            "overlay", False, f"a second copy of JAX's module was loaded: {', '.join(copies)}", remedy
        )
    return Check("overlay", True, f"{aliases} imported modules below capibara.jax are JAX's own objects")


def _own_folder() -> str:
    from ._overlay import OWN_FOLDER

    return OWN_FOLDER
