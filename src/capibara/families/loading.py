"""From the bytes of a folder's tensors to a model's parameters, on one device or over a mesh.

Tensors are read one at a time, each byte once, and only what this process's devices hold: each device's part straight
from its bytes in the file, or, where these do not follow one another, from blocks of a few megabytes. A tensor becomes
an array in its own order of dimensions; the device turns it round and puts it into the stack of its blocks, in place.
Where that device is this machine, and within :func:`~capibara.native.rooms.reuse_rooms`, it is read straight to where
it will lie instead (:mod:`capibara.families.on_host`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compose.physical.explicit import automatic_mesh
from capibara.compress.container.file_bytes import FileNumbers
from capibara.compress.models.numbers import numpy_dtype
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.folder import Pretrained
from capibara.families.on_host import OnHost, Packed
from capibara.families.tensors import ModelTensors, Piece, Placed, places
from capibara.native import rooms

if TYPE_CHECKING:
    import jax

    from capibara.config import ModularModelConfig
    from capibara.config.sections import ModelSection
    from capibara.core import ModularCapibaraModel

__all__ = ["further_layers", "load_params", "placed_tensors", "settled"]

Path = tuple[str, ...]
_Region = tuple[tuple[int, int], ...]  # from … to in each dimension
_Room = Callable[[tuple[int, ...], np.dtype], np.ndarray]
_BLOCK = 8 << 20  # bytes that are read at a time, where devices have parts of rows


def placed_tensors(family: Family, model: ModularCapibaraModel) -> list[Placed]:
    """The tensors of a family that a model's parameters are, but for adapters.

    Raises:
      FamilyError: the family has no tensor for a parameter.
    """
    from capibara.core.decoder import block_places

    shapes = {
        path: tuple(spec.sizes({}, "a parameter"))
        for path, spec in model.without_adapters().compiled.params.items()
    }
    placed = places(family.outside, family.inside, block_places(model.config.model), shapes)
    if family.bare(model.config.model):
        return [dataclasses.replace(one, name=one.name.removeprefix(family.prefix)) for one in placed]
    return list(placed)


def _named(files: ModelTensors, family: Family) -> dict[str, str]:
    """The names of a folder's tensors, by what they would be in a new folder, but for the family's prefix."""
    given: dict[str, str] = {}
    for name in files:
        own = name.removeprefix(family.prefix)
        for old, new in family.former:
            own = own.removesuffix(old) + new if own.endswith(old) else own
        if own in given:
            raise FamilyError(f"{files.folder}: {given[own]} and {name} are the same tensor. Remove one")
        given[own] = name
    return given


def settled(
    files: ModelTensors, config: ModularModelConfig, source: Pretrained
) -> tuple[ModularModelConfig, Pretrained]:
    """The settings without what the folder's tensors lack, and notes on tensors that the model has no place for.

    Args:
      files: the folder's. config, source: what its ``config.json`` says.
    """
    from capibara.core import ModularCapibaraModel

    family, notes = source.family, list(source.notes)
    given = _named(files, family)
    for name, settings in family.missing.items():
        changes = {f"model.{key}": value for key, value in settings.items()}
        differ = any(getattr(config.model, key) != value for key, value in settings.items())
        if differ and name.removeprefix(family.prefix) not in given:
            config = config.with_overrides(changes)
            said = ", ".join(f"{key}={value!r}" for key, value in changes.items())
            notes.append(f"the folder has no {name}: {said}")
    if family.unused:
        wanted = {one.name for one in placed_tensors(family, ModularCapibaraModel(config))}
        left = [name for own, name in given.items() if _unused(own, family, wanted)]
        if left:
            notes.append(f"dropped, because the model has no parameter for them: {', '.join(left)}")
    values = dict(source.values)
    if family.further and values.get(family.further):
        # As it is without them.
        values[family.further] = 0
    further = further_layers(source)
    left = [found for own in given if (found := _layer(own)) in further]
    if left:
        notes.append(
            f"left out: {len(left)} tensors of layers that predict tokens further ahead "
            f"(layers {', '.join(map(str, sorted(set(left))))})"
        )
    return config, dataclasses.replace(source, values=values, notes=tuple(notes))


def further_layers(source: Pretrained) -> range:
    """The numbers of the layers that a folder has after those of its model, which predict tokens further ahead.

    Args:
      source: what :func:`~capibara.families.read_config` gave; :func:`settled` says that there are none.
    """
    key = source.family.further
    count = (source.values.get(key) if key else None) or 0
    first = source.values["num_hidden_layers"] if count else 0
    return range(first, first + count)


_LAYER = re.compile(r"model\.layers\.(\d{1,6})\..+")


def _layer(own: str) -> int:
    """The number of a tensor's layer; -1: it is outside of layers."""
    found = _LAYER.fullmatch(own)
    return -1 if found is None else int(found[1])


def _unused(own: str, family: Family, wanted: set[str]) -> bool:
    names = (own, family.prefix + own)
    if not wanted.isdisjoint(names) or own in family.tied:
        return False
    return any(re.fullmatch(one, name) for one in family.unused for name in names) and not any(
        re.fullmatch(one, name) for one in family.idle for name in names
    )


def load_params(
    files: ModelTensors,
    family: Family,
    model: ModularCapibaraModel,
    *,
    left_out: range = range(0),
    progress: Callable[[str, int], None] | None = None,
    packing: Mapping[Path, Packed] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parameters of a model but for adapters, nested as ``model.params``, and the stored dtypes of its tensors.

    Args:
      files: the folder's. family: its. model: says shapes, dtypes and shardings.
      left_out: the numbers of layers that the folder may have besides, as :func:`further_layers` says.
      progress: called with each tensor's name and bytes.
      packing: what may be in panels already, for an engine; where it can be.

    Raises:
      FamilyError: tensors are missing, unknown or of another shape.
    """
    # The whole of it: without the backend's settings float64 becomes float32.
    with model.backend.scope():
        return _loaded(files, family, model.without_adapters(), left_out, progress, packing or {})


def _loaded(
    files: ModelTensors,
    family: Family,
    model: ModularCapibaraModel,
    left_out: range,
    progress: Callable[[str, int], None] | None,
    packing: Mapping[Path, Packed],
) -> tuple[dict[str, Any], dict[str, str]]:
    import jax

    wanted = placed_tensors(family, model)
    names = _checked(files, family, wanted, model.config.model, left_out)
    forms = {name: numpy_dtype(files.tensors[given][1].form) for name, given in names.items()}
    host = OnHost(model, wanted, forms, packing)
    stacks = {path for placed in wanted for _, path, index, _, _ in placed.parts if index}
    final, targets = _empty(model, stacks - host.paths)
    shardings = {path: _automatic(sharding) for path, sharding in final.items()}
    dtypes, scratch, reported = {}, _Scratch(), 0

    def report() -> None:
        nonlocal reported
        if progress is not None:
            for placed in wanted[reported : len(dtypes)]:
                _, stored = files.tensors[names[placed.name]]
                progress(placed.name, stored.end - stored.start)
        reported = len(dtypes)

    for placed in wanted:
        file, stored = files.tensors[names[placed.name]]
        dtypes[placed.name] = files.dtypes.get(names[placed.name], stored.form.name)
        tensor = _Tensor(file.numbers(names[placed.name]), forms[placed.name], stored.shape)
        # Parts that do not lie in a row are copied, and an entry's are a small part of a tensor's.
        several = (
            zip(placed.entries(), tensor.entries(), strict=True) if placed.stacked else ((placed, tensor),)
        )
        for one, entry in several:
            for piece, path, index, shape, start in one.parts:
                held = slice(start, start + piece.stored(shape)[one.axis] * one.step, one.step)
                if path in host:
                    host.put(path, index, piece, shape, entry.held(one.axis, held))
                else:
                    own, dtype = shardings[path], model.compiled.params[path].dtype
                    # What becomes a parameter as it is needs memory of its own.
                    temporary = path in targets or not _stays(entry.dtype, piece.order, dtype)
                    room = scratch.room if temporary else rooms.room
                    raw = entry.on_devices(piece, shape, one.axis, held, own, index, room=room)
                    # One at a time: what has been read but not yet put in its place is memory besides the parameters.
                    target = _put(targets.get(path), raw, piece.order, index, dtype, own)
                    targets[path] = target.block_until_ready()
                    del raw, target
                if path == one.parts[-1][1]:
                    entry.forget()
        if host.is_full:
            host.read()
        if host.is_empty:
            report()
    targets |= host.parameters()
    report()
    # Where axes are explicit, their types change here, and no number moves.
    return _nested(
        {
            path: value if path in host.packed else jax.device_put(value, final[path])
            for path, value in targets.items()
        }
    ), dtypes


def _checked(
    files: ModelTensors, family: Family, wanted: list[Placed], model: ModelSection, left_out: range
) -> dict[str, str]:
    """For each name that is wanted the one in the files."""
    prefix = family.prefix
    plain = _named(files, family)
    expected = {placed.name.removeprefix(prefix): placed.name for placed in wanted}
    missing = [name for plainly, name in expected.items() if plainly not in plain]
    if missing:
        raise FamilyError(
            f"{files.folder}: has no tensor {missing[0]}{_and_others(missing)}. Remedy: all files of the model"
        )
    known = {*expected, *(family.tied if model.tie_embeddings else ())}
    idle = [re.compile(pattern) for pattern in (*family.idle, *family.unused)]
    unknown = [
        name
        for own, name in plain.items()
        if own not in known
        and _layer(own) not in left_out
        and not any(one.fullmatch(n) for one in idle for n in (own, prefix + own))
    ]
    if unknown:
        raise FamilyError(
            f"{files.folder}: {family.name} has no place for the tensor {unknown[0]}{_and_others(unknown)}. Remedy: "
            "the model's own config.json; an adapter has to be merged first"
        )
    given = {name: plain[own] for own, name in expected.items()}
    for placed in wanted:
        _, stored = files.tensors[given[placed.name]]
        if stored.shape != placed.shape:
            raise FamilyError(
                f"{files.folder}: {placed.name} has the shape {stored.shape}, config.json asks for {placed.shape}. "
                "Remedy: the config.json that was published with the weights"
            )
        if not stored.form.is_float or stored.form.bits < 16:
            raise FamilyError(
                f"{files.folder}: {placed.name} is stored as {stored.form.name}, expected BF16, F16, F32 or F64. "
                "Remedy: the model's weights before they were quantized"
            )
    return given


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} others" if names[1:] else ""


class _Tensor:
    """A tensor in a file, of which parts are read."""

    def __init__(self, numbers: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        self._numbers, self.dtype, self._shape = numbers, dtype, shape
        self._all: np.ndarray | None = None

    def entries(self) -> Iterator[_Tensor]:
        """The entries of the first dimension."""
        size = math.prod(self._shape[1:])
        for row in range(self._shape[0]):
            yield _Tensor(self._numbers[row * size : (row + 1) * size], self.dtype, self._shape[1:])

    def on_devices(
        self,
        piece: Piece,
        shape: tuple[int, ...],
        axis: int,
        held: slice,
        sharding: jax.sharding.Sharding,
        index: tuple[int, ...],
        *,
        room: _Room,
    ) -> jax.Array:
        """A parameter's numbers in the tensor's order, dimensions taken apart, where the parameter's parts will lie.

        Args:
          room: gives memory for elements that one device takes in the order in which the file stores them.
        """
        import jax

        apart = piece.apart(shape)
        turned = _turned(sharding, piece.order, index)
        regions = {
            device: tuple(one.indices(size)[:2] for one, size in zip(cut, apart, strict=True))
            for device, cut in turned.addressable_devices_indices_map(apart).items()
        }
        own = self._cut(axis, held)
        if own is not None:
            own = own.reshape(apart)
            parts = {one: own[tuple(slice(*ends) for ends in one)] for one in set(regions.values())}
        else:
            parts = self._parts(self._run(axis, held)[0], apart, list(dict.fromkeys(regions.values())), room)
        placed = [jax.device_put(parts[region], device) for device, region in regions.items()]
        return jax.make_array_from_single_device_arrays(apart, turned, placed)

    def held(self, axis: int, held: slice) -> FileNumbers | np.ndarray:
        """The numbers of a part along an axis, in their order; unread where they follow one another in a file."""
        own = self._cut(axis, held)
        if own is not None:
            return own
        offset, count = self._run(axis, held)
        numbers = self._numbers[offset : offset + count]
        return numbers if isinstance(numbers, FileNumbers) else np.asarray(numbers).view(self.dtype)

    def _taken(self, axis: int, held: slice) -> tuple[int, int, int]:
        return held.indices(self._shape[axis]) if self._shape else (0, 1, 1)

    def _cut(self, axis: int, held: slice) -> np.ndarray | None:
        """A part whose rows have other parameters too, as all of them are: cut out of what is read once."""
        taken = self._taken(axis, held)
        if taken[2] == 1 and (not axis or taken[:2] == (0, self._shape[axis])):
            return None
        if self._all is None:
            self._all = self._read(0, self._shape)
        return self._all[(slice(None),) * axis + (held,)]

    def _run(self, axis: int, held: slice) -> tuple[int, int]:
        """Where numbers that follow one another begin, and how many they are."""
        first, last, _ = self._taken(axis, held)
        if axis:
            return 0, math.prod(self._shape)
        each = math.prod(self._shape[1:])
        return first * each, (last - first) * each

    def _parts(
        self, offset: int, shape: tuple[int, ...], regions: list[_Region], room: _Room
    ) -> dict[_Region, np.ndarray]:
        """Regions of an array that begins at a number of the tensor, each byte read once, into memory of their own."""
        runs = {region: run for region in regions if (run := _run(region, shape)) is not None}
        sizes = {region: tuple(last - first for first, last in region) for region in regions}
        if len(runs) == len(regions):
            # In their order: parts of one entry that is decoded follow one another.
            own = room if len(runs) == 1 else rooms.room
            return {region: self._read(offset + runs[region], sizes[region], own) for region in sorted(runs)}
        parts = {region: rooms.room(size, self.dtype) for region, size in sizes.items()}
        for leading, first, last, at in _blocks(shape, _BLOCK // self.dtype.itemsize):
            depth, block = len(leading), None
            for region, out in parts.items():
                here = all(a <= i < b for i, (a, b) in zip(leading, region, strict=False))
                low, high = max(first, region[depth][0]), min(last, region[depth][1])
                if not here or low >= high:
                    continue
                if block is None:
                    block = self._read(offset + at, (last - first, *shape[depth + 1 :]))
                begin = region[depth][0]
                to = (
                    *(i - a for i, (a, _) in zip(leading, region, strict=False)),
                    slice(low - begin, high - begin),
                )
                out[to] = block[
                    slice(low - first, high - first), *(slice(*ends) for ends in region[depth + 1 :])
                ]
        return parts

    def _read(self, first: int, shape: tuple[int, ...], room: _Room | None = None) -> np.ndarray:
        """Numbers from ``first`` on."""
        count = math.prod(shape)
        numbers = self._numbers[first : first + count]
        if not isinstance(numbers, FileNumbers):  # decoded from what is in the file
            return np.asarray(numbers).view(self.dtype).reshape(shape)
        out = (room or rooms.room)(shape, self.dtype)
        numbers.read_into(out)
        return out

    def forget(self) -> None:
        """Drop what has been read."""
        self._all = None


class _Scratch:
    """Memory that is used again and again: the system gives new memory more slowly than a file in it is read."""

    def __init__(self) -> None:
        self._whole: np.ndarray = np.empty(0, np.uint8)

    def room(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Room for an array; that of the array before."""
        size = math.prod(shape) * dtype.itemsize
        if self._whole.size < size:
            self._whole = rooms.room((size,), np.dtype(np.uint8))
        return self._whole[:size].view(dtype).reshape(shape)


def _run(region: _Region, shape: tuple[int, ...]) -> int | None:
    """The number that a region of an array begins at, if its numbers follow one another; otherwise None."""
    at, entries, single = 0, math.prod(shape), True
    for (first, last), size in zip(region, shape, strict=True):
        if not single and (first, last) != (0, size):
            return None
        entries //= size
        at += first * entries
        single = single and last - first == 1
    return at


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """Cut an array into runs of at most ``most`` numbers (or an entry of its last dimension), in order.

    Yields:
      The first indices, the range of the next one, and the number at which it begins.
    """
    depth, entries = 0, math.prod(shape[1:])
    while depth < len(shape) - 1 and entries > most:
        depth += 1
        entries //= shape[depth]
    step, at = max(1, most // entries), 0
    for leading in np.ndindex(*shape[:depth]):
        for first in range(0, shape[depth], step):
            last = min(first + step, shape[depth])
            yield leading, first, last, at
            at += (last - first) * entries


def _automatic(sharding: Any) -> Any:
    """The same parts on automatic axes: an entry that is put into a stack has no part of the stack's first axes."""
    from jax.sharding import NamedSharding

    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(automatic_mesh(sharding.mesh), sharding.spec)


def _turned(sharding: Any, order: tuple[int, ...], index: tuple[int, ...]) -> Any:
    """The sharding of a parameter, for its dimensions in the tensor's order."""
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(sharding, NamedSharding):
        return sharding
    own = list(sharding.spec)[len(index) :]
    own += [None] * (len(order) - len(own))
    spec = [None] * len(order)
    for mine, theirs in enumerate(order):
        spec[theirs] = own[mine]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _stays(stored: Any, order: tuple[int, ...], dtype: Any) -> bool:
    """Whether a tensor of such a dtype is a parameter as it is."""
    return stored == dtype and order == tuple(range(len(order)))


def _put(
    target: jax.Array | None,
    raw: jax.Array,
    order: tuple[int, ...],
    index: tuple[int, ...],
    dtype: Any,
    sharding: Any,
) -> jax.Array:
    """A parameter, or ``target``, a stack, with it in its place and in the same memory."""
    if target is not None:
        return _putting(order, dtype, sharding)(target, raw, index)
    if _stays(raw.dtype, order, dtype):
        return raw
    return _turning(order, dtype, sharding)(raw)


@functools.lru_cache(maxsize=256)
def _putting(order: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    import jax

    def put(target: jax.Array, raw: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        entry = raw.transpose(order).astype(dtype)
        entry = entry.reshape((1,) * len(index) + entry.shape)
        # Not ``target.at[index].set``: a scatter, which makes a copy of a stack of bfloat16 on a CPU.
        return jax.lax.dynamic_update_slice(target, entry, (*index, *[0] * raw.ndim))

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _turning(order: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    import jax

    return jax.jit(lambda raw: raw.transpose(order).astype(dtype), out_shardings=sharding)


def _empty(
    model: ModularCapibaraModel, stacks: Collection[Path]
) -> tuple[dict[Path, Any], dict[Path, jax.Array]]:
    """The shardings of all parameters, and zeros where stacks will be."""
    import jax
    import jax.numpy as jnp

    specs = model.compiled.params
    if model.mesh is None:
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = dict.fromkeys(specs, place)
    else:
        shardings = _flat(model.compiled.propose_shardings()["params"])

    if not stacks:
        return shardings, {}
    order = sorted(stacks)  # of a set it is another one in each process, and so would be the program

    def make() -> dict[Path, jax.Array]:
        return {path: jnp.zeros(specs[path].sizes({}, "a parameter"), specs[path].dtype) for path in order}

    return shardings, jax.jit(make, out_shardings={path: _automatic(shardings[path]) for path in stacks})()


def _flat(tree: Mapping[str, Any], path: Path = ()) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
    return found


def _nested(flat: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree
