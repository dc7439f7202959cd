"""Weights as the programs of an engine read them fastest."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from capibara.compose.backends.jax_stacked import Layers
from capibara.compress.coded import is_coded

__all__ = ["layers_apart"]


def layers_apart(model: Any, params: Any) -> Any:
    """The parameters with those of repeated blocks as :class:`~capibara.compose.backends.jax_stacked.Layers`.

    They are views: on one CPU device no weight is copied, unless its dtype and shape leave layers unaligned. Elsewhere
    they come back as they are.
    """
    if model.mesh is not None or model.backend.platform != "cpu":
        return params
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


def _cut(array: Any) -> list[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * array.shape[0]
    return [jax.device_put(part, may_alias=True) for part in np.asarray(array)]
