"""Sums and exchanges along each axis of a mesh, with integers that the host knows.

Each device holds numbers of its own. An all-reduce along an axis has to give the sum over each group; a permutation
has to give each device its neighbour's numbers, and a wrong one names the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.observe.health.results import AxisHealth
from capibara.observe.health.work import DeviceWork

__all__ = ["check_axis", "make_mesh", "merged"]


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """The grid of chips, if the devices report their places in one; otherwise one or two axes, as equal as can be."""
    grid = _grid(devices)
    if grid is not None:
        return grid
    from capibara.hardware import build_mesh

    count = len(devices)
    rows = max(size for size in range(1, math.isqrt(count) + 1) if count % size == 0)
    if rows == 1:
        return build_mesh((count,), ("x",), devices)
    return build_mesh((rows, count // rows), ("x", "y"), devices)


def _grid(devices: Sequence[Any]) -> Mesh | None:
    """A mesh whose axes are the axes of the grid of chips, and the cores of a chip, if they are devices."""
    places = {}
    for device in devices:
        coords = getattr(device, "coords", None)
        if coords is None:
            return None
        slice_index = getattr(device, "slice_index", None) or 0
        places[(slice_index, *coords, getattr(device, "core_on_chip", 0))] = device
    values = [sorted({place[axis] for place in places}) for axis in range(len(next(iter(places))))]
    if math.prod(map(len, values)) != len(devices) or len(places) != len(devices):
        return None
    names = ("slice", *"xyzwvu"[: len(values) - 2], "core")
    kept = [axis for axis, found in enumerate(values) if len(found) > 1]
    if not kept:
        return None
    array = np.empty(tuple(len(values[axis]) for axis in kept), object)
    for place, device in places.items():
        array[tuple(values[axis].index(place[axis]) for axis in kept)] = device
    return Mesh(array, tuple(names[axis] for axis in kept))


def check_axis(
    work: DeviceWork, mesh: Mesh, axis: str, words: int, repeats: int, calls: int, peak_link: float | None
) -> AxisHealth:
    """Sum and exchange along one axis.

    Args:
      work: what runs on the devices.
      mesh: of all processes.
      axis: one of its axes, of at least two devices.
      words: int32 numbers of each device.
      repeats: timed repetitions; the best counts.
      calls: how many of each are timed together.
      peak_link: bytes per second of a link, of the catalogue.
    """
    size, dimension = mesh.shape[axis], mesh.axis_names.index(axis)
    own = np.arange(mesh.size).reshape(mesh.devices.shape)
    array = _sharded(mesh, words)

    best, summed = math.inf, None
    for number in range(repeats + 1):  # the first one compiles
        summed, seconds = work.timed(
            None, lambda: [work.all_reduce(array, mesh, axis) for _ in range(calls)][-1]
        )
        best = min(best, seconds) if number else best
    wrong_on = []
    groups = np.moveaxis(own, dimension, -1).reshape(-1, size)
    sums: dict[int, np.ndarray] = {}
    for device, place, found in _rows(mesh, summed):
        group = int(np.nonzero((groups == place).any(axis=1))[0][0])
        if group not in sums:
            sums[group] = np.sum([_numbers(int(each), mesh.size, words) for each in groups[group]], axis=0)
        if count := int(np.count_nonzero(found != sums[group])):
            wrong_on.append(f"{device} ({count:,} of {words:,} elements)")
    all_reduce_time = best

    bad_links: list[tuple[str, str, int]] = []
    best = math.inf
    for shift in (1, -1) if size > 2 else (1,):
        moved = None
        for number in range(repeats + 1):
            moved, seconds = work.timed(
                None,
                lambda shift=shift: [work.permute(array, mesh, axis, shift) for _ in range(calls)][-1],
            )
            best = min(best, seconds) if number else best
        senders = np.roll(own, shift, axis=dimension).reshape(-1)
        for device, place, found in _rows(mesh, moved):
            sender = int(senders[place])
            if count := int(np.count_nonzero(found != _numbers(sender, mesh.size, words))):
                bad_links.append((str(mesh.devices.reshape(-1)[sender]), str(device), count))
    payload = words * 4
    return AxisHealth(
        name=axis,
        size=size,
        payload=payload,
        all_reduce=not wrong_on,
        wrong_on=tuple(wrong_on),
        permute=not bad_links,
        bad_links=tuple(bad_links),
        all_reduce_bandwidth=2 * (size - 1) / size * payload * calls / max(all_reduce_time, 1e-9),
        link_bandwidth=payload * calls / max(best, 1e-9),
        peak_link=peak_link,
    )


def merged(seen: Sequence[AxisHealth]) -> AxisHealth:
    """What all processes saw of one axis."""
    return replace(
        seen[0],
        all_reduce=all(one.all_reduce for one in seen),
        wrong_on=tuple(each for one in seen for each in one.wrong_on),
        permute=all(one.permute for one in seen),
        bad_links=tuple(each for one in seen for each in one.bad_links),
        problem=next((one.problem for one in seen if one.problem), ""),
    )


def _numbers(place: int, devices: int, words: int) -> np.ndarray:
    """The numbers of the device at a place of the mesh; no sum over all devices leaves int32."""
    largest = (2**31 - 1) // devices
    index = np.arange(words, dtype=np.uint32) + np.uint32((place * 0x9E3779B1 + 1) & 0xFFFFFFFF)
    mixed = (index ^ (index >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (mixed.astype(np.int64) % (2 * largest + 1) - largest).astype(np.int32)


def _sharded(mesh: Mesh, words: int) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = [
        jax.device_put(_numbers(place, mesh.size, words)[None], device)
        for place, device in enumerate(mesh.devices.reshape(-1))
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays((mesh.size, words), sharding, rows)


def _rows(mesh: Mesh, array: Any) -> list[tuple[Any, int, np.ndarray]]:
    """What each device of this process holds: the device, its place in the mesh, its row."""
    places = {device: place for place, device in enumerate(mesh.devices.reshape(-1))}
    shards = sorted(array.addressable_shards, key=lambda shard: places[shard.device])
    return [(shard.device, places[shard.device], jax.device_get(shard.data)[0]) for shard in shards]
