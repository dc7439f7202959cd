"""The devices that JAX uses, and the settings that it needs before initialising them."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from capibara.compress.system.configuration import SystemConfiguration
from capibara.compress.system.engines import warn_fallback
from capibara.hardware.telemetry import device_memory
from capibara.jax_versions import MEMORY_FRACTIONS, memory_fraction

__all__ = ["JaxConfigAdapter", "JaxDeviceManager"]

FRACTION = MEMORY_FRACTIONS[0]


class JaxConfigAdapter:
    """The component ``jax_config_adapter``: passes a system's settings to JAX.

    JAX reads the share of an accelerator's memory that it may use from the environment when it initialises its first
    device. :meth:`apply` sets the variable unless it is already set, since an existing value takes precedence.
    Nothing else changes for the process: 64-bit dtypes are enabled in a scope, around the system's own programs.

    Args:
      config: the settings.
    """

    def __init__(self, config: SystemConfiguration) -> None:
        self.config = config
        self.fraction_from = "not applied"

    def apply(self) -> None:
        """Set the memory fraction for devices that JAX initialises from now on.

        Raises:
          CapibaraError: the environment has both of its variables.
        """
        if (there := memory_fraction()) is None:
            os.environ[FRACTION] = f"{self.config.jax_memory_fraction:g}"
            self.fraction_from = "the configuration"
        elif there[1] != f"{self.config.jax_memory_fraction:g}":
            self.fraction_from = f"the environment ({'='.join(there)})"
        else:
            self.fraction_from = "the configuration, as in the environment"

    def scope(self) -> Any:
        """A context in which JAX uses the system's 64-bit setting."""
        return jax.enable_x64(self.config.jax_enable_x64 or jax.config.read("jax_enable_x64"))

    def describe(self) -> dict[str, Any]:
        """Plain values: the requested fraction, and the limit reported by the devices' runtime."""
        limits = {facts.device: facts.limit for facts in device_memory() if facts.limit is not None}
        return {
            "memory_fraction": self.config.jax_memory_fraction,
            "memory_fraction_from": self.fraction_from,
            "memory_limit_bytes": limits or None,
            "enable_x64": self.config.jax_enable_x64,
        }


class JaxDeviceManager:
    """The component ``jax_device_manager``: the devices that share the work.

    Args:
      config: the settings ``jax_backend`` and ``jax_parallel_devices``.

    Attributes:
      devices: at least one.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    """

    def __init__(self, config: SystemConfiguration) -> None:
        found = self._find(config.jax_backend)
        wanted = config.jax_parallel_devices
        if wanted > len(found):
            warn_fallback(
                f"jax_parallel_devices={wanted}",
                f"jax_parallel_devices: {wanted} wanted, JAX has {len(found)} here ({found[0].platform}): "
                f"{len(found)} share the work.",
            )
        self.devices = tuple(found[:wanted])
        self.platform = self.devices[0].platform

    @staticmethod
    def _find(backend: str) -> list[Any]:
        if backend == "auto":
            return jax.local_devices()
        try:
            return jax.local_devices(backend=backend)
        except RuntimeError as error:
            found = jax.local_devices()
            warn_fallback(
                f"jax_backend={backend}",
                f"jax_backend: no {backend} here ({str(error).splitlines()[0]}); "
                f"JAX runs on {found[0].platform} instead.",
            )
            return found

    @property
    def is_accelerated(self) -> bool:
        """Whether the devices are accelerators."""
        return self.platform != "cpu"

    def put(self, array: Any) -> jax.Array:
        """The array on the first device."""
        return jax.device_put(array, self.devices[0])

    def split(self, array: Any) -> list[jax.Array]:
        """Runs of rows of nearly equal length, in order, one per device; at most one run per row."""
        count = min(len(self.devices), max(len(array), 1))
        parts = np.array_split(np.arange(len(array)), count)
        edges = [(int(p[0]), int(p[-1]) + 1) if len(p) else (0, 0) for p in parts]
        return [jax.device_put(array[a:b], d) for (a, b), d in zip(edges, self.devices, strict=False)]

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"platform": self.platform, "devices": [str(d) for d in self.devices],
                "kinds": sorted({d.device_kind for d in self.devices})}  # fmt: skip
