"""What arrays a model has: paths, shapes and dtypes, read without computing or copying anything."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.compose import CompiledModel
from capibara.compose.physical.specs import nest
from capibara.core import ModularCapibaraModel
from capibara.plan.errors import PlanError

__all__ = ["Leaf", "Tree", "compiled_of", "flatten", "read_tree"]


@dataclass(frozen=True)
class Leaf:
    """One array.

    Attributes:
      path: its keys from the root, as text.
      shape: its sizes.
      dtype: name of its dtype.
      itemsize: bytes of one element.
      axes: logical names of its dimensions, where they are known.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axes: tuple[str | None, ...] | None = None

    @property
    def name(self) -> str:
        """The path with dots: ``blocks.mlp.up.weight``."""
        return ".".join(self.path) or "(the array)"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def words(self) -> tuple[str, ...]:
        """The path with keys such as ``"layers.0.mlp"`` taken apart; never empty."""
        return tuple(word for key in self.path for word in re.split(r"[./]", key) if word) or ("array",)


@dataclass(frozen=True)
class Tree:
    """All arrays of a model, and how they nest."""

    leaves: tuple[Leaf, ...]
    structure: Any


def compiled_of(model: Any) -> CompiledModel | None:
    """The compiled model in ``model``, if it is one or holds one."""
    if isinstance(model, ModularCapibaraModel):
        return model.compiled
    return model if isinstance(model, CompiledModel) else None


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple | list) and bool(x) and all(type(n) is int for n in x)


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple | list) and all(n is None or isinstance(n, str) for n in x)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[tuple[tuple[str, ...], Any]], Any]:
    """``[(path, leaf)]`` and the structure. Equivalent JAX: ``jax.tree_util.tree_flatten_with_path``."""
    import jax

    try:
        found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except (TypeError, ValueError) as error:
        raise PlanError(f"model_params is not a tree that JAX can flatten: {error}") from error
    return [(tuple(map(_key, path)), leaf) for path, leaf in found], structure


def read_tree(model_params: Any, param_axes: Any = None) -> Tree:
    """The arrays of ``model_params``.

    Args:
      model_params: a nested dict (or other pytree) of arrays, of ``jax.ShapeDtypeStruct`` or of shapes (tuples of
        integers, taken as float32); or a ``CompiledModel`` or ``ModularCapibaraModel``.
      param_axes: tuples of logical axis names, nested the same way; read off a compiled model.

    Raises:
      PlanError: there is no array, a leaf is none, or ``param_axes`` does not nest as the arrays do.
    """
    import jax
    import numpy as np

    compiled = compiled_of(model_params)
    if compiled is not None:
        specs = {path: (spec, spec.sizes({}, ".".join(path))) for path, spec in compiled.params.items()}
        model_params = nest(
            {path: jax.ShapeDtypeStruct(shape, spec.dtype) for path, (spec, shape) in specs.items()}
        )
        if param_axes is None:
            param_axes = nest(
                {
                    path: (None,) * len(s) if spec.axes is None else spec.axes
                    for path, (spec, s) in specs.items()
                }
            )
    found, structure = flatten(model_params, _is_shape)
    if not found:
        raise PlanError(
            f"model_params holds no arrays: got {type(model_params).__name__} {str(model_params)[:60]}. Expected a "
            "nested dict of arrays, jax.ShapeDtypeStruct or shapes, or a compiled model"
        )
    axes = _axes_by_path(param_axes)
    leaves = []
    for path, leaf in found:
        if _is_shape(leaf):
            shape, dtype = tuple(leaf), np.dtype("float32")
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            shape, dtype = tuple(leaf.shape), leaf.dtype
        elif isinstance(leaf, bool | int | float | complex):
            shape, dtype = (), np.asarray(leaf).dtype
        else:
            raise PlanError(
                f"model_params, {'.'.join(path)!r}: got {type(leaf).__name__} {str(leaf)[:60]!r}, expected an array, a "
                "jax.ShapeDtypeStruct or a shape such as (512, 768)"
            )
        if any(n < 0 for n in shape):
            raise PlanError(f"model_params, {'.'.join(path)!r}: the shape {shape} has a negative size")
        names = None
        if axes is not None:
            names = axes.pop(path, None)
            if names is None or len(names) != len(shape):
                raise PlanError(
                    f"param_axes, {'.'.join(path)!r}: got {names!r}, expected a tuple of {len(shape)} logical axis "
                    f"names (or None) for the shape {shape}"
                )
        leaves.append(Leaf(path, shape, str(dtype), int(getattr(dtype, "itemsize", 4)), names))
    if axes:
        extra = ".".join(next(iter(axes)))
        raise PlanError(f"param_axes names {extra!r}, which model_params does not have")
    return Tree(tuple(leaves), structure)


def _axes_by_path(param_axes: Any) -> dict[tuple[str, ...], tuple[str | None, ...]] | None:
    if param_axes is None:
        return None
    if not isinstance(param_axes, Mapping | list | tuple) or _is_axes(param_axes):
        found: list[tuple[tuple[str, ...], Any]] = [((), param_axes)]
    else:
        found, _ = flatten(param_axes, _is_axes)
    for path, names in found:
        if not _is_axes(names):
            raise PlanError(
                f"param_axes, {'.'.join(path)!r}: got {names!r}, expected a tuple of names as ('embed', 'mlp')"
            )
    return {path: tuple(names) for path, names in found}
