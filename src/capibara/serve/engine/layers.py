"""A model and its weights as the programs of an engine compute and read them fastest.

CPUs compute in float32. XLA makes float32 of each matrix of 16 bits in each step, which takes several times as long as
its product with a few rows. So a model of 16 bits computes in float32 there; matrices stay bfloat16, which kernels read
as it is, and lie in panels (:mod:`capibara.ops.linalg.panels`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import native
from capibara.compose.backends.jax_stacked import Layers
from capibara.compose.initializers import Scaled
from capibara.compress.coded import is_coded
from capibara.families.on_host import Packed
from capibara.memory.budget import device_budget
from capibara.memory.errors import MemorySettingError
from capibara.ops.linalg.panels import PANEL, Panels, fit_panels, in_panels
from capibara.ops.linalg.sizes import LEAST_MATRIX, MOST_ROWS
from capibara.ops.registry import for_platform
from capibara.serve.engine.arrays import bytes_of_one_device

__all__ = [
    "as_computed",
    "by_kernels",
    "bytes_held",
    "cache_dtype_of",
    "has_panels",
    "in_float32",
    "layers_apart",
    "of_few_rows",
    "packing_of",
    "products_of_few_rows",
    "room_for_panels",
    "without_panels",
]

_NARROW = ("bfloat16", "float16")
_TABLE = ("embedding", "weight")


def _on_one_cpu(model: Any) -> bool:
    backend = getattr(model, "backend", None)  # which other models than ours may lack
    return backend is not None and backend.platform == "cpu" and model.mesh is None


def as_computed(model: Any) -> Any:
    """The model as an engine computes it: on one CPU device in float32 instead of 16 bits.

    It has no parameters then: they stay those of the model that was given.
    """
    if not _on_one_cpu(model) or model.config.precision.compute_dtype not in _NARROW:
        return model
    return model.computing_in("float32")


def cache_dtype_of(model: Any) -> str | None:
    """The dtype of keys and values where that is not the one of arithmetic: bfloat16 takes half the memory.

    Only kernels write it into pages as it is (:mod:`capibara.ops.rows`).
    """
    own = model.config.precision.compute_dtype
    return own if own == "bfloat16" and _on_one_cpu(model) and native.problem() is None else None


def room_for_panels(model: Any, params: Any, *, donate: bool = False, there: bool = True) -> bool:
    """Whether the panels of all matrices fit into half of the free memory.

    False if kernels would not read them, or if the memory limit is unknown and the matrices are not deleted.

    Args:
      model: as :func:`as_computed` returns it.
      donate: whether each matrix is deleted once it is packed. there: whether the parameters are already in memory.
    """
    if not _has_kernels(model, params):
        return False
    described = _described(params)
    copies = _copies(described, layers_apart(model, described, panels=True))
    try:
        free = device_budget().free() - (0 if there else bytes_of_one_device(params))
    except MemorySettingError:
        return donate
    return 2 * (max(copies, default=0) if donate else sum(copies)) <= free


def layers_apart(model: Any, params: Any, *, panels: bool = False, donate: bool = False) -> Any:
    """The parameters with those of repeated blocks as :class:`~capibara.compose.backends.jax_stacked.Layers`.

    They are views: on one CPU device no weight is copied, unless its dtype and shape leave layers unaligned, or it has
    16 bits and is no matrix of bfloat16 that kernels read. Elsewhere they come back as they are, and so do those that
    are apart already.

    Args:
      panels: copy the matrices that kernels multiply into :class:`~capibara.ops.linalg.panels.Panels`.
      donate: delete the parameters that were packed or cast. Arrays that occur more than once are kept.
    """
    if not _on_one_cpu(model):
        return params
    kernels = _has_kernels(model, params)
    stacked = {path for path, spec in model.compiled.params.items() if _is_stacked(spec)}
    times = Counter(map(id, jax.tree.leaves(params)))

    def one(path: Any, given: Any) -> Any:
        if isinstance(given, Layers | Panels):
            return given
        name = tuple(step.key for step in path)
        leaf = _wide(model, name, given, kernels)
        sides = _sides(model, name, leaf) if panels and kernels else None
        if sides is not None:
            found = _in_panels(leaf, sides, stacked=name in stacked, transposed=name == _TABLE)
            if leaf is not given and isinstance(leaf, jax.Array):
                leaf.delete()
        elif name in stacked:
            found = _layers(leaf)
        else:
            found = leaf
        copied = sides is not None or leaf is not given
        if copied and donate and isinstance(given, jax.Array) and times[id(given)] == 1:
            given.delete()
        return found

    return jax.tree_util.tree_map_with_path(
        one, params, is_leaf=lambda leaf: is_coded(leaf) or isinstance(leaf, Layers | Panels)
    )


def packing_of(model: Any, params: Any) -> dict[tuple[str, ...], Packed]:
    """The matrices that :func:`layers_apart` packs into panels, for what loads them (:mod:`capibara.families.on_host`).

    Args:
      model: as :func:`as_computed` returns it. params: descriptions of what is stored.
    """
    specs = model.compiled.params
    if not _on_one_cpu(model) or not _has_kernels(model, params):
        return {}
    found: dict[tuple[str, ...], Packed] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = tuple(step.key for step in path)
        sides = _sides(model, name, leaf)
        cast = _wide(model, name, leaf, True).dtype != leaf.dtype  # before it is packed, once it is there
        if sides is not None and not cast:
            stacked, transposed = _is_stacked(specs[name]), name == _TABLE
            shape = leaf.shape[1:] if stacked else leaf.shape
            made = functools.partial(_panels, shape=shape, stacked=stacked, transposed=transposed)
            found[name] = Packed(*sides, transposed, made)
    return found


def _is_stacked(spec: Any) -> bool:
    return (spec.axes or ())[:1] == ("layers",)


def _layers(leaf: Any) -> Any:
    if is_coded(leaf):
        if not hasattr(leaf, "layers"):
            return leaf
        described = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(leaf))
        # Without a program for each shape.
        leaf = (
            jax.eval_shape(lambda x: x.layers(), leaf)
            if described
            else jax.tree.map(np.asarray, leaf).layers()
        )
    arrays, tree = jax.tree.flatten(leaf)
    cut = [_cut(array) for array in arrays]
    return Layers([jax.tree.unflatten(tree, each) for each in zip(*cut, strict=True)])


def has_panels(params: Any) -> bool:
    """Whether any parameter is packed into panels."""
    return any(map(_is_panels, jax.tree.leaves(params, is_leaf=_is_panels)))


def without_panels(params: Any) -> Any:
    """The parameters with their matrices unpacked, for use inside a traced function."""
    return jax.tree.map(lambda leaf: leaf.matrix() if _is_panels(leaf) else leaf, params, is_leaf=_is_panels)


def _is_panels(leaf: Any) -> bool:
    return isinstance(leaf, Panels)


def _sides(model: Any, name: tuple[str, ...], leaf: Any) -> tuple[int, int] | None:
    """``(inner, columns)`` of a weight that can be packed; ``None`` for other parameters."""
    if name not in model.compiled.params:
        return None
    spec = model.compiled.params[name]
    axes = spec.axes or ()
    shape = leaf.shape[1 if _is_stacked(spec) else 0 :]
    if name == _TABLE and model.config.model.tie_embeddings:
        columns, inner = shape
    elif isinstance(spec.init, Scaled) and not spec.init.skip and name[-1] == "weight" and "conv" not in axes:
        inner, columns = math.prod(shape[: spec.init.fan_in]), math.prod(shape[spec.init.fan_in :])
    else:
        return None
    large = inner * columns >= LEAST_MATRIX and _is_multiplied(model, name)
    return (inner, columns) if large and fit_panels(inner, columns, leaf.dtype) else None


def _is_multiplied(model: Any, name: tuple[str, ...]) -> bool:
    """Whether rows are multiplied with a weight as it is: of experts, and inside of attention over latents, XLA
    multiplies."""
    return "experts" not in (model.compiled.params[name].axes or ()) and "latent_up" not in name


def _in_panels(leaf: Any, sides: tuple[int, int], *, stacked: bool, transposed: bool) -> Any:
    shape = leaf.shape[1:] if stacked else leaf.shape
    inner, columns = sides
    if isinstance(leaf, jax.ShapeDtypeStruct):
        one = jax.ShapeDtypeStruct((columns // PANEL, inner, PANEL), leaf.dtype)
        made = [Panels(one, shape, transposed)] * (leaf.shape[0] if stacked else 1)
        return Layers(made) if stacked else made[0]
    lying = (columns, inner) if transposed else (inner, columns)
    packed = in_panels(np.asarray(leaf).reshape(-1, *lying), transposed=transposed)
    return _panels(packed, shape=shape, stacked=stacked, transposed=transposed)


def _panels(packed: np.ndarray, *, shape: tuple[int, ...], stacked: bool, transposed: bool) -> Any:
    """The parameter of panels ``[layers, columns / 16, inner, 16]``, or of one matrix of them."""
    made = [Panels(part, shape, transposed) for part in jax.device_put(list(packed), may_alias=True)]
    return Layers(made) if stacked else made[0]


def bytes_held(params: Any, parts: Any, *, donate: bool = False) -> int:
    """Bytes on one device of the given parameters and the result of :func:`layers_apart`.

    Views take no memory. Copies do, and so do their originals unless ``donate`` deleted them.
    """
    return bytes_of_one_device(parts) if donate else bytes_of_one_device(params) + sum(_copies(params, parts))


def _copies(params: Any, parts: Any) -> list[int]:
    """Bytes that :func:`layers_apart` copied, for each parameter."""

    def one(given: Any, made: Any) -> int:
        if is_coded(given):
            return 0
        panels = _is_panels(made) or (isinstance(made, Layers) and _is_panels(made.arrays[0]))
        return bytes_of_one_device(made) if panels or made.dtype != given.dtype else 0

    return jax.tree.leaves(jax.tree.map(one, params, parts, is_leaf=is_coded))


def in_float32(model: Any, params: Any) -> Any:
    """What programs of a model :func:`as_computed` would make float32 of 16 bits in each step, as that."""
    if not _on_one_cpu(model):
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _wide(model, tuple(step.key for step in path), leaf, False),
        params,
        is_leaf=is_coded,
    )


def _wide(model: Any, name: tuple[str, ...], leaf: Any, kernels: bool) -> Any:
    """A parameter as :func:`in_float32`; where there are kernels, matrices that these read as they are stay so."""
    if model.config.precision.compute_dtype != "float32" or is_coded(leaf) or leaf.dtype.name not in _NARROW:
        return leaf
    size = math.prod(leaf.shape[1 if _is_stacked(model.compiled.params[name]) else 0 :])
    if kernels and _is_multiplied(model, name) and leaf.dtype == jnp.bfloat16 and size >= LEAST_MATRIX:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
    if leaf.size < LEAST_MATRIX:  # not worth a program for its shape
        return jax.device_put(np.asarray(leaf).astype(np.float32), leaf.sharding)
    return leaf.astype(jnp.float32)


def _has_kernels(model: Any, params: Any) -> bool:
    """Whether compiled kernels multiply with a model's parameters."""
    precision = model.config.precision
    float32 = precision.compute_dtype == precision.accumulate_dtype == "float32"
    return float32 and _on_one_cpu(model) and not _has_codes(params) and native.problem() is None


def _described(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def _has_codes(params: Any) -> bool:
    return any(map(is_coded, jax.tree.leaves(params, is_leaf=is_coded)))


def _cut(array: Any) -> list[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * array.shape[0]
    return jax.device_put(list(np.asarray(array)), may_alias=True)  # at once, which takes half the time


def of_few_rows(model: Any, params: Any, function: Callable[..., Any], *, tokens: int) -> Callable[..., Any]:
    """A function for :func:`jax.jit` that multiplies a few rows with weights, on one CPU device by kernels.

    Args:
      params: the model's, which the function is given. tokens: which argument it takes the rows from.
    """
    if not _on_one_cpu(model):
        return function
    coded = _has_codes(params)

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        with for_platform("cpu"), products_of_few_rows(coded=coded):
            return by_kernels(function, given[tokens].size)(*given)

    return run


def products_of_few_rows(*, coded: bool, panels: bool = False) -> contextlib.AbstractContextManager[None]:
    """Functions traced inside may take the kernel for products of few rows: :func:`capibara.ops.linalg.few_rows`.

    Args:
      coded: whether weights are codes, whose products are found by what they are in plain JAX.
    """
    if coded:
        return contextlib.nullcontext()
    # What only tracing needs is imported then: a start that finds its programs goes without.
    from capibara.ops.linalg.few_rows import few_rows

    return few_rows(panels=panels)


def by_kernels(function: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """The function with its products of so many rows joined, and of decoding also in chains."""

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        from capibara.ops.linalg.chained import chained
        from capibara.ops.linalg.joined import joined

        return (chained if rows <= MOST_ROWS else joined)(function)(*given)

    return run
