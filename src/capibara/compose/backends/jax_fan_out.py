"""One array that several products read, on a mesh that divides what they return.

Queries, keys and values are products of the same activations, as are the gate and the other half of a gated layer.
Where a mesh divides their heads or features, each device has the gradient of its own part only, and these gradients are
summed over devices. Left to XLA, each product's gradient is summed by itself: five sums a layer where two are enough
(f of `Shoeybi et al., 2019 <https://arxiv.org/abs/1909.08053>`_).

Here the activations become an array with one copy a device, which costs nothing, as each has them already. The products
read a device's own copy, so that its gradients are added first; the sum over devices is that of the copies, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from capibara.compose.backends.jax_repeat import PRODUCT
from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

__all__ = ["fan_out_on_parts", "product_on_parts"]

Array = jax.Array


@dataclass(frozen=True)
class _Copies:
    """Activations ``[batch, sequence, in]``, and how many copies of them there are to be.

    Attributes:
        x: the activations. parts: the number of copies. where: the sharding of the copies ``[parts, *x.shape]``.
        sums: dtype in which devices exchange gradients; those of the weights, too, if it is that of the activations.
    """

    x: Array
    parts: int
    where: Any
    sums: Any

    @cached_property
    def stacked(self) -> Array:
        # XLA sees that a conversion to a wider dtype and back is none; but what is summed in the backward pass is wide.
        wide = self.x.astype(jnp.promote_types(self.x.dtype, self.sums))
        copies = lax.broadcast_in_dim(wide, (self.parts, *wide.shape), (1, 2, 3))
        return lax.with_sharding_constraint(copies, self.where).astype(self.x.dtype)


def fan_out_on_parts(mesh: Any, rules: AxisRules, sums: str) -> Callable[..., Any]:
    """``fan_out(x, axis)``: activations as products of them read them whose results have the logical axis ``axis``.

    Args:
        mesh: with automatic axes. rules: which axis goes where.
        sums: dtype in which the devices' gradients are summed, if it is wider than that of the activations.
    """

    def fan_out(x: Any, axis: str) -> Any:
        free = free_axes(mesh) if isinstance(x, Tracer) and x.ndim == 3 else None
        if free is None:
            return x
        entry = rules.spec((axis,), free, kind="activations")[0]
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        parts = math.prod(free.shape[name] for name in axes)
        rows = rules.spec(("batch", "sequence", None), free, x.shape, kind="activations")
        if parts == 1 or set(axes) & {name for names in rows if names for name in _names(names)}:
            return x
        spec = PartitionSpec(axes, *rows)
        where = spec if free.mesh is None else NamedSharding(free.mesh, spec)
        return _Copies(x, parts, where, jnp.dtype(sums))

    return fan_out


def product_on_parts(op: Callable[..., Array]) -> Callable[..., Array]:
    """``dense`` or ``project``, which also takes what ``fan_out`` returns.

    Args:
        op: ``op(x, weight, accumulate)``, for all else, and for weights that cannot be divided.
    """

    @wraps(op)
    def run(x: Any, weight: Array, accumulate: str) -> Array:
        if not isinstance(x, _Copies):
            return op(x, weight, accumulate)
        if weight.shape[1] % x.parts:
            return op(x.x, weight, accumulate)
        inner, *outs = weight.shape
        divided = weight.reshape(inner, x.parts, math.prod(outs) // x.parts)
        contracted = (((3,), (0,)), ((0,), (1,)))
        dtype = jnp.result_type(x.x, weight)
        wide = dtype if x.sums == dtype else jnp.dtype(accumulate)
        out = lax.dot_general(x.stacked, divided, contracted, preferred_element_type=wide)
        out = jnp.moveaxis(out.astype(dtype), 0, -2)
        # Rematerialisation knows products with weights by their having no batch, and this one by its name.
        return checkpoint_name(out.reshape(*x.x.shape[:-1], *outs), PRODUCT)

    return run


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)
