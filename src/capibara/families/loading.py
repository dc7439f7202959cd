"""From the bytes of a folder's tensors to a model's parameters, on one device or over a mesh.

Tensors are read one at a time, each byte once, and only the rows that this process's devices hold. A tensor becomes
an array in its own order of dimensions; the device turns it round and puts it into the stack of its blocks, in place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.safetensors_file import SafetensorsFile, Stored
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.folder import TensorFiles
from capibara.families.tensors import Piece, Placed, places

if TYPE_CHECKING:
    import jax

    from capibara.core import ModularCapibaraModel

__all__ = ["load_params", "placed_tensors"]

Path = tuple[str, ...]


def placed_tensors(family: Family, model: ModularCapibaraModel) -> list[Placed]:
    """The tensors of a family that a model's parameters are, but for adapters.

    Raises:
      FamilyError: the family has no tensor for a parameter.
    """
    from capibara.core.adapters import is_adapter
    from capibara.core.decoder import block_places

    shapes = {
        path: tuple(spec.sizes({}, "a parameter"))
        for path, spec in model.compiled.params.items()
        if not is_adapter(path)
    }
    return list(places(family.outside, family.inside, block_places(model.config.model), shapes))


def load_params(
    files: TensorFiles,
    family: Family,
    model: ModularCapibaraModel,
    *,
    progress: Callable[[str, int], None] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parameters of a model but for adapters, nested as ``model.params``, and the stored dtypes of its tensors.

    Args:
      files: the folder's. family: its. model: says shapes, dtypes and shardings.
      progress: called with each tensor's name and bytes.

    Raises:
      FamilyError: tensors are missing, unknown or of another shape.
    """
    wanted = placed_tensors(family, model)
    names = _checked(files, family, wanted, tied=model.config.model.tie_embeddings)
    stacks = {path for placed in wanted for _, path, index, _, _ in placed.parts if index}
    shardings, targets = _empty(model, stacks)
    dtypes = {}
    for placed in wanted:
        file, stored = files.tensors[names[placed.name]]
        dtypes[placed.name] = stored.form.name
        tensor = _Tensor(file, names[placed.name], stored)
        for piece, path, index, shape, start in placed.parts:
            held = piece.stored(shape)[placed.axis]
            own, dtype = shardings[path], model.compiled.params[path].dtype
            raw = tensor.on_devices(piece, shape, placed.axis, start, start + held, own, index)
            if path == placed.parts[-1][1]:
                tensor.forget()
            # One at a time: what has been read but not yet put in its place is memory besides the parameters.
            targets[path] = _put(targets.get(path), raw, piece.order, index, dtype, own).block_until_ready()
            del raw
        if progress is not None:
            progress(placed.name, stored.end - stored.start)
    return _nested(targets), dtypes


def _checked(files: TensorFiles, family: Family, wanted: list[Placed], *, tied: bool) -> dict[str, str]:
    """For each name that is wanted the one in the files."""
    given: dict[str, str] = {}
    prefix = family.prefix
    for name in files:
        given[name if not prefix or name.startswith((prefix, "lm_head.")) else prefix + name] = name
    missing = [placed.name for placed in wanted if placed.name not in given]
    if missing:
        raise FamilyError(
            f"{files.folder}: has no tensor {missing[0]}{_and_others(missing)}. Remedy: all files of the model"
        )
    expected = {placed.name for placed in wanted} | ({"lm_head.weight"} if tied else set())
    idle = [re.compile(pattern) for pattern in family.idle]
    unknown = [n for n in given if n not in expected and not any(one.fullmatch(n) for one in idle)]
    if unknown:
        raise FamilyError(
            f"{files.folder}: {family.name} has no place for the tensor {unknown[0]}{_and_others(unknown)}. Remedy: "
            "the model's own config.json; an adapter has to be merged first"
        )
    for placed in wanted:
        _, stored = files.tensors[given[placed.name]]
        if stored.shape != placed.shape:
            raise FamilyError(
                f"{files.folder}: {placed.name} has the shape {stored.shape}, config.json asks for {placed.shape}"
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

    def __init__(self, file: SafetensorsFile, name: str, stored: Stored) -> None:
        self._numbers = file.numbers(name)
        self._dtype, self._shape = numpy_dtype(stored.form), stored.shape
        self._all: np.ndarray | None = None
        self._last: tuple[Any, np.ndarray] | None = None

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows ``first … last - 1``: read now, or cut out of what is there."""
        width = int(np.prod(self._shape[1:], dtype=np.int64))
        if self._all is not None:
            return self._all[first:last]
        bits = np.asarray(self._numbers[first * width : last * width])
        found = bits.view(self._dtype).reshape(last - first, *self._shape[1:])
        if last - first == self._shape[0]:
            self._all = found
        return found

    def on_devices(
        self,
        piece: Piece,
        shape: tuple[int, ...],
        axis: int,
        start: int,
        end: int,
        sharding: jax.sharding.Sharding,
        index: tuple[int, ...],
    ) -> jax.Array:
        """A parameter's numbers in the tensor's order, dimensions taken apart, where the parameter's parts will lie."""
        import jax

        self._last = None
        apart = piece.apart(shape)
        row_of = apart[0]  # the first dimension that is taken apart: what shards of rows are counted in
        per = (end - start if axis == 0 else self._shape[0]) // row_of if apart else 1
        offset = start if axis == 0 else 0

        def part(cut: Any) -> np.ndarray:
            key = tuple((one.start, one.stop) for one in cut)
            if self._last is None or self._last[0] != key:
                first, last, _ = cut[0].indices(row_of)
                rows = self.rows(offset + first * per, offset + last * per)
                if axis:
                    rows = rows[(slice(None),) * axis + (slice(start, end),)]
                rest = rows.reshape(last - first, *apart[1:])
                self._last = key, np.ascontiguousarray(rest[(slice(None), *cut[1:])])
            return self._last[1]

        turned = _turned(sharding, piece.order, index)
        cuts = list(turned.addressable_devices_indices_map(apart).values())
        shared = axis or len(set(map(str, cuts))) < len(cuts)
        if shared or any(not _whole(cut[1:], apart[1:]) for cut in cuts):
            # Parts of rows, or rows that several devices or parameters need: all is read once, and cut.
            self.rows(0, self._shape[0])
        return jax.make_array_from_callback(apart, turned, part)

    def forget(self) -> None:
        """Drop what has been read."""
        self._all = self._last = None


def _whole(cut: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(one.indices(size)[:2] == (0, size) for one, size in zip(cut, shape, strict=True))


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
    if raw.dtype == dtype and order == tuple(range(raw.ndim)):
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

    def make() -> dict[Path, jax.Array]:
        return {path: jnp.zeros(specs[path].sizes({}, "a parameter"), specs[path].dtype) for path in stacks}

    with model.backend.scope():
        return shardings, jax.jit(make, out_shardings={path: shardings[path] for path in stacks})()


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
