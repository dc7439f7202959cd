"""What must be the same where a program is compiled and where it runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from capibara.compilation.persistent_cache import machine_name
from capibara.errors import printable

__all__ = ["differences", "environment_of"]

# Flags that change no program.
_WITHOUT_EFFECT = ("--xla_dump_", "--xla_force_host_platform_device_count", "--xla_gpu_cuda_data_dir")
_TITLES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "platform": "platform",
    "compiler": "compiler",
    "topology": "devices",
    "processor": "type of processor",
    "XLA_FLAGS": "XLA_FLAGS",
    "LIBTPU_INIT_ARGS": "LIBTPU_INIT_ARGS",
    "compiler_options": "compiler options",
}


def environment_of(devices: Iterable[Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Everything that a compiled program depends on apart from the function, as text by name.

    Args:
      devices: those that the program runs on, in its order; of this machine, or of a described topology.
      options: the compiler options.
    """
    from importlib import metadata

    import jax

    devices = list(devices)
    first = devices[0]
    found = {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": first.platform,
        # Of a TPU: the build of libtpu.
        "compiler": str(first.client.platform_version),
        "topology": _topology(devices),
        "XLA_FLAGS": _flags("XLA_FLAGS"),
        "LIBTPU_INIT_ARGS": _flags("LIBTPU_INIT_ARGS"),
        "compiler_options": ", ".join(f"{name}={value}" for name, value in sorted(options.items())),
    }
    if first.platform == "cpu":
        found["processor"] = machine_name()
    return found


def differences(packed: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line for each thing that differs."""
    found = []
    for name, title in _TITLES.items():
        then, now = packed.get(name, ""), here.get(name, "")
        if then != now:
            found.append(f"{title}: {printable(_short(then))} in the file, {_short(now)} here")
    return found


def _topology(devices: list[Any]) -> str:
    kinds = sorted({device.device_kind for device in devices})
    places = []
    for device in devices:
        coordinates = getattr(device, "coords", None)
        if coordinates is not None:
            places.append(f"{','.join(map(str, coordinates))}.{getattr(device, 'core_on_chip', 0)}")
    where = f" at {' '.join(places)}" if places else f" numbered {' '.join(str(d.id) for d in devices)}"
    processes = len({device.process_index for device in devices})
    return f"{len(devices)} × {'/'.join(kinds)}{where}, {processes} processes"


def _flags(variable: str) -> str:
    return " ".join(
        sorted(f for f in os.environ.get(variable, "").split() if not f.startswith(_WITHOUT_EFFECT))
    )


def _short(text: str) -> str:
    text = " ".join(text.split()) or "none"
    return text if len(text) <= 120 else f"{text[:117]}…"
