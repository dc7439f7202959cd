"""How much memory there is, and how much of it is in use: a device's own figures, or the best there are without them.

TPU and GPU runtimes report a limit, the bytes in use and their peak (``Device.memory_stats()``). The CPU's runtime
reports nothing: there the limit is that of the process (the control group's, or the machine's memory), shared by all
CPU devices, and what is in use are the live JAX arrays; temporaries inside a running program are not seen. Each figure
says where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capibara.measure.installation import MemoryBytes, device_memory_allocated, memory_limit_bytes
from capibara.measure.sizes import size_text
from capibara.memory.arguments import bytes_of
from capibara.memory.errors import MemorySettingError

__all__ = ["MemoryBudget", "device_budget"]


@dataclass(frozen=True)
class MemoryBudget:
    """What may be used on a device.

    Attributes:
      device: a ``jax.Device``.
      limit: bytes; ``limit.source`` says who set it.
    """

    device: Any
    limit: MemoryBytes

    def in_use(self) -> MemoryBytes:
        """Bytes in use now on the device, by any code; ``.source`` says how they are known."""
        return device_memory_allocated(self.device, exact=False)  # beside other threads, too

    def free(self) -> int:
        """Bytes left; negative if more than the limit is in use."""
        return self.limit - self.in_use()

    def __str__(self) -> str:
        used = self.in_use()
        return (
            f"{self.device}: {size_text(used)} of {size_text(self.limit)} in use "
            f"({used.source}; limit: {self.limit.source})"
        )


def device_budget(device: Any = None, memory_limit_gb: float | None = None) -> MemoryBudget:
    """The budget of a device.

    Args:
      device: a ``jax.Device``; the first local one by default.
      memory_limit_gb: GiB (2**30 bytes) that may be used; by default all that the device has. A larger limit than what
        the device has is reduced to that, and ``limit.source`` says so.

    Raises:
      MemorySettingError: the limit is not a number above 0, or none is given and the platform reports none.
    """
    import jax

    asked = jax.local_devices()[0] if device is None else device
    wanted = None if memory_limit_gb is None else bytes_of("memory_limit_gb", memory_limit_gb)
    there = memory_limit_bytes(asked)
    shared = _share(asked)
    if there is not None and shared > 1:
        there = MemoryBytes(there // shared, f"{there.source}, shared by {shared} devices")
    if wanted is None:
        if there is None:
            raise MemorySettingError(
                f"memory_limit_gb: got None, and {asked} does not report its memory. Pass the limit in GiB."
            )
        return MemoryBudget(asked, there)
    if there is not None and wanted > there:
        source = f"{there.source}, less than memory_limit_gb={memory_limit_gb:g}"
        return MemoryBudget(asked, MemoryBytes(there, source))
    return MemoryBudget(asked, MemoryBytes(wanted, f"memory_limit_gb={memory_limit_gb:g}"))


def _share(device: Any) -> int:
    """How many devices of this process share the memory: CPU devices are all of one host."""
    import jax

    return sum(each.platform == "cpu" for each in jax.local_devices()) if device.platform == "cpu" else 1
