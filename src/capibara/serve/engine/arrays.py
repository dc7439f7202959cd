"""A model's arrays before they are there."""

from __future__ import annotations

import math
from typing import Any

import jax

from capibara.compose.physical.sharding import param_shardings
from capibara.compose.physical.specs import nest

__all__ = ["bytes_of_one_device", "describe_arrays"]


def describe_arrays(model: Any) -> tuple[Any, Any]:
    """A model's parameters and state as ``jax.ShapeDtypeStruct``, where they will be; nothing is allocated."""
    if not hasattr(model, "compiled"):  # which other models than ours may lack
        return jax.eval_shape(lambda: model.init(0))
    params, state = (
        # As declared: to trace how they would be drawn takes a tenth of a second.
        nest(
            {
                path: jax.ShapeDtypeStruct(spec.sizes({}, ".".join(path)), spec.dtype)
                for path, spec in specs.items()
            }
        )
        for specs in (model.compiled.params, model.compiled.states)
    )
    if model.mesh is None:
        return params, state

    def placed(tree: Any, axes: Any) -> Any:
        shardings = param_shardings(tree, axes, model.mesh, model.backend.rules)
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
        )

    return placed(params, model.param_axes), placed(state, model.state_axes)


def bytes_of_one_device(tree: Any) -> int:
    """Bytes of the part of arrays that each device has."""

    def one(x: Any) -> int:
        where = getattr(x, "sharding", None)
        return math.prod(x.shape if where is None else where.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))
