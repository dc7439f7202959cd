"""A model and its weights as the programs of an engine compute and read them fastest.

CPUs compute in float32. XLA makes float32 of each matrix of 16 bits in each step, which takes several times as long as
its product with a few rows. So a model of 16 bits computes in float32 there; matrices stay bfloat16, which kernels read
as it is.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import native
from capibara.compose.backends.jax_stacked import Layers
from capibara.compress.coded import is_coded
from capibara.ops.linalg.chained import chained
from capibara.ops.linalg.few_rows import LEAST_MATRIX, MOST_ROWS, few_rows
from capibara.ops.linalg.joined import joined
from capibara.ops.registry import for_platform
from capibara.serve.engine.arrays import bytes_of_one_device

__all__ = ["as_computed", "bytes_held", "cache_dtype_of", "in_float32", "layers_apart", "of_few_rows"]

_NARROW = ("bfloat16", "float16")


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


def layers_apart(model: Any, params: Any) -> Any:
    """The parameters with those of repeated blocks as :class:`~capibara.compose.backends.jax_stacked.Layers`.

    They are views: on one CPU device no weight is copied, unless its dtype and shape leave layers unaligned, or it has
    16 bits and is no matrix of bfloat16 that kernels read. Elsewhere they come back as they are.
    """
    if not _on_one_cpu(model):
        return params
    params = in_float32(model, params, narrow=True)
    stacked = {path for path, spec in model.compiled.params.items() if spec.axes and spec.axes[0] == "layers"}

    def one(path: Any, leaf: Any) -> Any:
        if tuple(step.key for step in path) not in stacked:
            return leaf
        if is_coded(leaf):
            if not hasattr(leaf, "layers"):
                return leaf
            leaf = leaf.layers()
        arrays, tree = jax.tree.flatten(leaf)
        cut = [_cut(array) for array in arrays]
        return Layers([jax.tree.unflatten(tree, each) for each in zip(*cut, strict=True)])

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_coded)


def bytes_held(params: Any, parts: Any) -> int:
    """Bytes of a device for parameters that were given and what :func:`layers_apart` made of them.

    Views take none, what became float32 does, while what it was made of may still be held.
    """
    given, made = (jax.tree.leaves(tree) for tree in (params, parts))
    narrow, wide = ([leaf for leaf in tree if leaf.dtype.name in _NARROW] for tree in (given, made))
    widened = sum(leaf.size for leaf in narrow) - sum(leaf.size for leaf in wide)
    return bytes_of_one_device(params) + 4 * widened


def in_float32(model: Any, params: Any, *, narrow: bool = False) -> Any:
    """What programs of a model :func:`as_computed` would make float32 of 16 bits in each step, as that.

    Args:
      narrow: with matrices that kernels read as they are stored left so.
    """
    if not _on_one_cpu(model) or model.config.precision.compute_dtype != "float32":
        return params
    coded = any(map(is_coded, jax.tree.leaves(params, is_leaf=is_coded)))
    narrow = narrow and not coded and native.problem() is None

    def one(path: Any, leaf: Any) -> Any:
        if is_coded(leaf) or leaf.dtype.name not in _NARROW:
            return leaf
        name = tuple(step.key for step in path)
        axes = model.compiled.params[name].axes or ()
        size = math.prod(leaf.shape[1 if axes[:1] == ("layers",) else 0 :])
        # Of experts, and inside of attention over latents, XLA multiplies.
        plain = "experts" not in axes and "latent_up" not in name
        if narrow and plain and leaf.dtype == jnp.bfloat16 and size >= LEAST_MATRIX:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        return leaf.astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_coded)


def _cut(array: Any) -> list[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * array.shape[0]
    return [jax.device_put(part, may_alias=True) for part in np.asarray(array)]


def of_few_rows(model: Any, params: Any, function: Callable[..., Any], *, tokens: int) -> Callable[..., Any]:
    """A function for :func:`jax.jit` that multiplies a few rows with weights, on one CPU device by kernels.

    Args:
      params: the model's, which the function is given. tokens: which argument it takes the rows from.
    """
    if not _on_one_cpu(model):
        return function
    coded = any(map(is_coded, jax.tree.leaves(params, is_leaf=is_coded)))

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        # Products with codes are found by what they are in plain JAX.
        with for_platform("cpu"), contextlib.nullcontext() if coded else few_rows():
            return (chained if given[tokens].size <= MOST_ROWS else joined)(function)(*given)

    return run
