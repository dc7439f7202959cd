"""Rotary positions on each device's part of queries and keys: XLA cannot split the kernel that turns them on TPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["rotary_on_parts"]


def rotary_on_parts(op: Callable[..., Any], mesh: Mesh, rules: AxisRules) -> Callable[..., Any]:
    """``rotate`` of each device's rows, positions and heads; of few positions, or outside of a trace, ``op`` itself.

    Args:
        op: ``rotate(x, cos, sin, …)`` of :mod:`capibara.compose.backends.jax_ops`.
        mesh: with automatic axes. rules: which axis goes where.
    """
    import jax
    from jax.core import Tracer
    from jax.sharding import PartitionSpec

    from capibara.ops.rotary.pallas_tpu import FEWEST_ROWS

    @wraps(op)
    def run(x: Any, cos: Any, sin: Any, **options: Any) -> Any:
        many = (
            isinstance(x, Tracer)
            and x.ndim == 4
            and isinstance(x.shape[1], int)
            and x.shape[1] >= FEWEST_ROWS
        )
        free = free_axes(mesh) if many else None
        if free is None:
            return op(x, cos, sin, **options)
        # Features are turned in pairs, whose other half may be on another device.
        names = ("batch", "sequence", "heads", None)
        where = rules.spec(names, free, x.shape, kind="activations")
        tables = PartitionSpec(*where[:2], None) if cos.ndim == 3 else PartitionSpec(where[1], None)
        mapped = jax.shard_map(
            partial(op, **options), **free.options, in_specs=(where, tables, tables), out_specs=where
        )
        return jax.jit(mapped, inline=True)(x, cos, sin)

    return run
