"""A copy of arrays that a step is about to donate, made while the devices go on.

The copy is a program like any other: it is queued behind the step whose results it reads, and the next step, which is
queued behind it, may then overwrite them. Nobody waits for it but the thread that writes it to disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from capibara.hardware.telemetry import available_memory, device_memory
from capibara.memory.offload import HOST_MEMORY

__all__ = ["Copier", "Place"]

Place = Literal["device", "host", "none"]

# Of what a copy needs, what has to be there: memory is not used to the last byte.
_MARGIN = 1.1


class Copier:
    """Copies trees of arrays, each to the devices that it is on, or to the memory of their hosts."""

    def __init__(self) -> None:
        self._program: Any = None
        self._shardings: list[Any] = []
        self._fitting: Counter[Any] | None = None

    def place_for(self, tree: Any) -> Place:
        """Where there is room for a copy: on the devices, else in the host's memory, else nowhere."""
        needed = _bytes_by_device(tree)
        devices = list(needed)
        figures = device_memory(devices)
        if all(found.limit is None for found in figures):  # as on a CPU, whose memory is the host's
            available = available_memory()
            return "device" if available is None or available > _MARGIN * sum(needed.values()) else "none"
        if needed == self._fitting:  # the peak is with the copy before by now, which is gone
            return "device"
        room = [
            found.limit is not None and found.limit - (found.peak or 0) > _MARGIN * needed[device]
            for device, found in zip(devices, figures, strict=True)
        ]
        if all(room):
            self._fitting = needed
            return "device"
        kinds = [{memory.kind for memory in device.addressable_memories()} for device in devices]
        available = available_memory()
        fits = available is None or available > _MARGIN * sum(needed.values())
        return "host" if fits and all(HOST_MEMORY in one for one in kinds) else "none"

    def copy(self, tree: Any, place: Place) -> Any:
        """The same arrays in other memory, with the same sharding; ``place`` is not ``"none"``.

        Equivalent JAX: ``jax.tree.map(jnp.copy, tree)``, as one program.
        """
        leaves, structure = jax.tree.flatten(tree)
        # What lies in the host's memory already is copied there; programs are for what is on the devices.
        moved = [
            place == "host" or leaf.sharding.memory_kind not in (None, _usual_kind(leaf)) for leaf in leaves
        ]
        inside = [leaf for leaf, other in zip(leaves, moved, strict=True) if not other]
        copied = iter(self._copies(inside) if inside else ())
        return structure.unflatten(
            [
                jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY), may_alias=False)
                if other
                else next(copied)
                for leaf, other in zip(leaves, moved, strict=True)
            ]
        )

    def _copies(self, leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        shardings = [leaf.sharding for leaf in leaves]
        if self._program is None or shardings != self._shardings:
            self._program = jax.jit(lambda arrays: [jnp.copy(one) for one in arrays], out_shardings=shardings)
            self._shardings = shardings
        return self._program(list(leaves))


def _usual_kind(leaf: jax.Array) -> str | None:
    device = next(iter(leaf.sharding.addressable_devices))
    return device.default_memory().kind


def _bytes_by_device(tree: Any) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for device, size in _parts(tree):
        total[device] += size
    return total


def _parts(tree: Any) -> Iterator[tuple[Any, int]]:
    for leaf in jax.tree.leaves(tree):
        size = leaf.dtype.itemsize
        for length in leaf.sharding.shard_shape(leaf.shape):
            size *= length
        for device in leaf.sharding.addressable_devices:
            yield device, size
