"""Rows of a table that is sharded over a mesh, inside the stages of a pipeline.

XLA splits a gather by itself, but not over a part of a mesh with two axes more (JAX 0.10 to 0.12 end the process). So
there every device looks up what its own rows have, zeros for the others, and the sum over devices is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["lookup_on_parts"]


def lookup_on_parts(op: Callable[..., Any], mesh: Mesh, rules: AxisRules) -> Callable[..., Any]:
    """``lookup`` on each device's rows of the table, inside a pipeline; elsewhere ``op`` itself.

    Args:
        op: ``lookup(table, indices)`` of :mod:`capibara.compose.backends.jax_ops`.
        mesh: with automatic axes. rules: which axis goes where.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec

    @wraps(op)
    def run(table: Any, indices: Any) -> Any:
        free = free_axes(mesh)
        if free is None or not free.inside or indices.ndim != 2:
            return op(table, indices)
        axis = rules.spec(("vocab",), free, table.shape[:1])[0]
        if axis is None:
            return op(table, indices)
        names = ("batch", "sequence")
        where = rules.spec(names, free, indices.shape, kind="activations")

        def part(table: Any, indices: Any) -> Any:
            size = table.shape[0]
            own = jnp.clip(indices, 0, size * lax.axis_size(axis) - 1) - lax.axis_index(axis) * size
            rows = jnp.take(table, own, axis=0, mode="clip")
            here = ((own >= 0) & (own < size))[..., None]
            return lax.psum(jnp.where(here, rows, jnp.zeros((), rows.dtype)), axis)

        mapped = jax.shard_map(
            part,
            **free.options,
            in_specs=(PartitionSpec(axis, None), where),
            out_specs=PartitionSpec(*where, None),
        )
        return jax.jit(mapped, inline=True)(table, indices)

    return run
