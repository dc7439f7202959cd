"""Load an archive directly onto the devices of a mesh: for each device, only its own part of a tensor is decoded.

Chunks are runs of rows, so a tensor that is sharded along its first axis is decoded chunk by chunk where it is needed:
on several hosts each decodes its own part. Several tensors are decoded at a time, while others are transferred to
their devices. The whole model is never in the host's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.container import Archive, Entry
from capibara.compress.errors import ArchiveError, CompressError
from capibara.compress.folders import find_archives, names_of
from capibara.compress.models.adapters import STRUCTURE, assemble
from capibara.compress.models.numbers import numpy_dtype
from capibara.errors import MissingExtraError, did_you_mean

if TYPE_CHECKING:
    import jax

__all__ = ["load_sharded"]


def load_sharded(
    archive: str | os.PathLike[str] | Archive,
    shardings: Any,
    *,
    progress: Callable[[str, int], None] | None = None,
) -> Any:
    """Load the tensors of an archive as sharded JAX arrays.

    Equivalent, with the whole model in the host's memory:
    ``jax.device_put(CompressedModel.load(archive).model, shardings)``.

    Args:
      archive: a ``.capi`` file, or a folder whose archives together contain the model.
      shardings: one ``jax.sharding.Sharding`` for all tensors; or one for each, by name or nested like the tensors
        (as returned by :meth:`capibara.compose.CompiledModel.propose_shardings`); or a function of name and shape.
      progress: called with each tensor's name and bytes once it is on its devices.

    Returns:
      Arrays nested as recorded in the archive, otherwise by name. Two names of one tensor are one array.

    Raises:
      CompressError: a tensor without a sharding, a sharding without a tensor, one that does not match the tensor's
        shape; 64-bit dtypes while they are disabled in JAX.
      ArchiveError: not an archive, or a damaged one.
      MissingExtraError: JAX is not installed.
    """
    try:
        import jax
    except ImportError:
        raise MissingExtraError("jax", "train", "Loading onto a mesh") from None
    if not isinstance(archive, Archive):
        paths = find_archives(archive)
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(Archive(path)) for path in paths]
            if len(opened) == 1:
                return load_sharded(opened[0], shardings, progress=progress)
            find = _finder(archive, names_of(opened), shardings, jax)
            return {
                name: array for one in opened for name, array in _arrays(one, find, progress, jax).items()
            }
    structure = _structure(archive)
    made = _arrays(archive, _finder(archive.path, archive.entries, shardings, jax), progress, jax)

    def made_of(name: str) -> Any:
        if name not in made:
            raise ArchiveError(f"{archive.path}: its metadata names a missing tensor: {name!r:.200}")
        return made[name]

    return made if structure is None else assemble(structure, made_of)


def _arrays(
    archive: Archive,
    find: Callable[[str, tuple[int, ...]], Any],
    progress: Callable[[str, int], None] | None,
    jax: Any,
) -> dict[str, Any]:
    """The arrays by name."""
    wanted: list[tuple[Entry, jax.sharding.Sharding]] = []
    for entry in archive:
        sharding = find(entry.name, entry.shape)
        _check(entry, sharding, jax)
        if entry.same_as is None:
            wanted.append((entry, sharding))
    made: dict[str, Any] = {}
    for entry, array in _in_order(lambda item: (item[0], _load(archive, *item)), wanted):
        made[entry.name] = array
        if progress is not None:
            progress(entry.name, entry.original_bytes)
    for entry in archive:
        if entry.same_as is not None:
            array, sharding = made[entry.same_as], find(entry.name, entry.shape)
            same = array.sharding.is_equivalent_to(sharding, len(entry.shape))
            made[entry.name] = array if same else jax.device_put(array, sharding)
    return made


def _structure(archive: Archive) -> Any:
    text = archive.metadata.get(STRUCTURE)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        raise ArchiveError(f"{archive.path}: its metadata is not what Capibara writes") from None


def _finder(
    path: object, names: Collection[str], shardings: Any, jax: Any
) -> Callable[[str, tuple[int, ...]], Any]:
    """Gives the sharding of a tensor."""
    if isinstance(shardings, jax.sharding.Sharding):
        return lambda name, shape: shardings
    if callable(shardings):
        return shardings
    if isinstance(shardings, Mapping | list | tuple):
        flat = dict(_flatten(shardings, (), jax))
        if unknown := [n for n in flat if n not in names]:
            raise CompressError(
                f"shardings: {unknown[0]!r} is not a tensor of {path}.{did_you_mean(unknown[0], names)}"
            )
        if missing := [n for n in names if n not in flat]:
            raise CompressError(f"shardings: there is none for {missing[0]!r}, and {len(missing) - 1} others")
        return lambda name, shape: flat[name]
    raise CompressError(
        f"shardings: got {type(shardings).__name__}, expected a jax.sharding.Sharding, one by name, or a function"
    )


def _flatten(value: Any, path: tuple[str, ...], jax: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, jax.sharding.Sharding):
        yield ".".join(path) or "value", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flatten(one, (*path, str(key)), jax)
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _flatten(one, (*path, str(i)), jax)
    elif value is not None:
        raise CompressError(
            f"shardings: {'.'.join(path)} is {type(value).__name__}, expected a jax.sharding.Sharding"
        )


def _check(entry: Entry, sharding: Any, jax: Any) -> None:
    if not isinstance(sharding, jax.sharding.Sharding):
        raise CompressError(
            f"shardings: got {type(sharding).__name__} for {entry.name}, expected a jax.sharding.Sharding"
        )
    dtype = numpy_dtype(entry.format)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CompressError(
            f"{entry.name}: JAX does not enable {dtype} by default. Remedy: with jax.enable_x64(True): …"
        )
    try:
        sharding.shard_shape(entry.shape)
    except ValueError as error:
        raise CompressError(f"shardings: that of {entry.name} does not fit its shape: {error}") from None


def _load(archive: Archive, entry: Entry, sharding: Any) -> Any:
    """One tensor, its parts on their devices."""
    import jax

    dtype, shape = numpy_dtype(entry.format), entry.shape
    places = sharding.addressable_devices_indices_map(shape)
    if not shape:
        whole = archive.read(entry.name).view(dtype).reshape(())
        parts = {(): whole}
        return _put(jax, shape, sharding, dict.fromkeys(places, parts[()]))
    ranges = {index[0].indices(shape[0])[:2] for index in places.values()}
    if len(entry.chunks) == 1 and len(ranges) > 1:
        # They lie in one chunk: it is decoded once.
        first, last = min(r[0] for r in ranges), max(r[1] for r in ranges)
        span = archive.read(entry.name, slice(first, last)).view(dtype)
        rows = {r: span[r[0] - first : r[1] - first] for r in ranges}
    else:
        rows = {r: archive.read(entry.name, slice(*r)).view(dtype) for r in sorted(ranges)}
    found = {
        device: rows[index[0].indices(shape[0])[:2]][(slice(None), *index[1:])]
        for device, index in places.items()
    }
    return _put(jax, shape, sharding, found)


def _put(jax: Any, shape: tuple[int, ...], sharding: Any, found: Mapping[Any, np.ndarray]) -> Any:
    parts = [
        jax.device_put(np.ascontiguousarray(part).reshape(part.shape), device)
        for device, part in found.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _in_order(work: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
    """Results in order, a few at work at a time: that many tensors are in the host's memory."""
    count = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Any] = deque()
        for item in items:
            waiting.append(pool.submit(copy_context().run, work, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
