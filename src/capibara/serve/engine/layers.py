"""Weights as the programs of an engine read them fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.compose.backends.jax_stacked import Layers
from capibara.compress.coded import is_coded
from capibara.memory.budget import device_budget
from capibara.memory.errors import MemorySettingError
from capibara.serve.engine.arrays import bytes_of_one_device

__all__ = ["layers_apart"]

_GPU_PART = 0.25  # of a GPU's memory that weights may take for a second copy of them


def layers_apart(model: Any, params: Any) -> Any:
    """The parameters with those of repeated blocks as :class:`~capibara.compose.backends.jax_stacked.Layers`.

    On one CPU device they are views: no weight is copied, unless its dtype and shape leave layers unaligned. On one GPU
    they are copies, where there is plenty of room: XLA would copy each layer out of its stack in every step, which
    takes longer than reading it. Elsewhere they come back as they are.
    """
    platform = model.backend.platform
    if model.mesh is not None or platform not in ("cpu", "gpu"):
        return params
    stacked = {path for path, spec in model.compiled.params.items() if spec.axes and spec.axes[0] == "layers"}
    if platform == "gpu" and not _room_for(params):
        return params

    def one(path: Any, leaf: Any) -> Any:
        if tuple(step.key for step in path) not in stacked:
            return leaf
        if is_coded(leaf):
            if not hasattr(leaf, "layers"):
                return leaf
            leaf = leaf.layers()
        arrays, tree = jax.tree.flatten(leaf)
        cut = [_cut(array, views=platform == "cpu") for array in arrays]
        return Layers([jax.tree.unflatten(tree, each) for each in zip(*cut, strict=True)])

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_coded)


def _room_for(params: Any) -> bool:
    # Of what there is, not of what is free now: the same before and after the weights are read.
    try:
        return bytes_of_one_device(params) <= device_budget().limit * _GPU_PART
    except MemorySettingError:  # the device does not say
        return False


def _cut(array: Any, *, views: bool) -> Sequence[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * array.shape[0]
    if not views:
        return jnp.unstack(array)
    return [jax.device_put(part, may_alias=True) for part in np.asarray(array)]
