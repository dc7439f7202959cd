"""Arrays in the host's memory that a device reads by itself.

JAX calls the kinds of memory that a device reaches ``device``, ``pinned_host`` and ``unpinned_host``
(``jax.Device.addressable_memories``). On TPUs and GPUs, ``pinned_host`` is the host's memory: an array moved there no
longer takes device memory, and a compiled program copies it in and out while it computes. The CPU's runtime has the
same kinds (JAX 0.10 to 0.12) so that programs can be tried there, but all of them are one memory: nothing is freed, and
XLA drops the annotations of what is offloaded within a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from capibara.memory.errors import OffloadError

__all__ = ["HOST_MEMORY", "OffloadSupport", "host_memory_kind", "offload_support", "to_device", "to_host"]

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host that a device reads by itself."""

_HOST_KINDS = (HOST_MEMORY, "unpinned_host")


@dataclass(frozen=True)
class OffloadSupport:
    """Whether a device's arrays can be moved to the host's memory.

    Attributes:
      kind: the kind of memory to move them to; None if the device reaches none.
      frees_memory: whether that frees memory of the device.
      reason: why, in a sentence.
    """

    kind: str | None
    frees_memory: bool
    reason: str


def offload_support(device: Any = None) -> OffloadSupport:
    """What a device can do.

    Args:
      device: a ``jax.Device``, real or described; the first local one by default.
    """
    asked = jax.local_devices()[0] if device is None else device
    there = {memory.kind for memory in asked.addressable_memories()}
    kind = next((kind for kind in _HOST_KINDS if kind in there), None)
    if kind is None:
        listed = ", ".join(sorted(there)) or "none"
        return OffloadSupport(
            None, False, f"{asked.device_kind} reaches no memory of the host, only: {listed}"
        )
    if asked.platform == "cpu":
        return OffloadSupport(
            kind, False, f"on a CPU {kind} and the device's memory are one: nothing is freed by moving arrays"
        )
    return OffloadSupport(kind, True, f"{asked.device_kind} reads {kind} by itself")


def host_memory_kind(device: Any = None) -> str:
    """The kind of memory of the host that a device reaches.

    Raises:
      OffloadError: there is none.
    """
    support = offload_support(device)
    if support.kind is None:
        raise OffloadError(f"{support.reason}. Keep the arrays on the device.")
    return support.kind


def to_host(tree: Any) -> Any:
    """Copies of arrays in the host's memory, with the same sharding: ``device_put`` with ``with_memory_kind``.

    ``jax.ShapeDtypeStruct``s with shardings are described anew. Inside ``jit`` arrays have no sharding to read: see
    :func:`capibara.memory.offloaded_steps.offload_state`.

    Raises:
      OffloadError: a device reaches no memory of the host.
    """
    return jax.tree.map(lambda leaf: _moved(leaf, host=True), tree)


def to_device(tree: Any) -> Any:
    """The reverse of :func:`to_host`."""
    return jax.tree.map(lambda leaf: _moved(leaf, host=False), tree)


def _moved(leaf: Any, *, host: bool) -> Any:
    device = next(iter(leaf.sharding.device_set))
    kind = host_memory_kind(device) if host else device.default_memory().kind
    sharding = leaf.sharding.with_memory_kind(kind)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)
