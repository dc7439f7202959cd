"""Attention over pages on each device's key heads, inside ``jax.shard_map``.

XLA cannot split a kernel, and left to it attention over pages runs in its XLA form (:mod:`capibara.ops.one_device`).
But heads have nothing to do with one another: each device has the pages of its own key heads, writes the new keys and
values into them where they stand, and computes its heads with the implementation that it would take on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.jax_stacked import Row
from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["paged_on_parts"]


def paged_on_parts(op: Callable[..., Any], mesh: Mesh, rules: AxisRules, *, pools: int) -> Callable[..., Any]:
    """``paged_attention`` or ``paged_codes_attention`` on each device's heads, where they can be divided.

    Args:
        op: of :mod:`capibara.compose.backends.jax_ops`: queries, keys, values, its pools, three arrays of integers and
            perhaps the sinks. mesh: with automatic axes. rules: which axis goes where. pools: how many it has.
    """
    import jax
    from jax.core import Tracer
    from jax.sharding import PartitionSpec

    @wraps(op)
    def run(*arrays: Any, **options: Any) -> Any:
        query, key, *_ = arrays
        free = free_axes(mesh) if isinstance(query, Tracer) else None
        axes = None if free is None else _axes(free, rules, query.shape, key.shape)
        if free is None or axes is None:
            return op(*arrays, **options)
        of_heads, none = PartitionSpec(None, None, axes, None), PartitionSpec()

        def of_pool(pool: Any) -> Any:
            lead = pool.stack.ndim - len(pool.shape) if isinstance(pool, Row) else 0
            spec = PartitionSpec(*[None] * (lead + 2), axes)
            return Row(spec, none) if isinstance(pool, Row) else spec  # type: ignore[arg-type]

        held = tuple(map(of_pool, arrays[3 : 3 + pools]))
        places = (of_heads, of_heads, of_heads, *held, none, none, none)
        if len(arrays) > len(places):
            places = (*places, PartitionSpec(axes))
        part = jax.shard_map(
            partial(op, **options), **free.options, in_specs=places, out_specs=(of_heads, *held)
        )
        return jax.jit(part, inline=True)(*arrays)

    return run


def _axes(free: Any, rules: AxisRules, query: tuple[int, ...], key: tuple[int, ...]) -> Any:
    """The mesh axes that heads are divided over; None where queries or key heads cannot be, or not alike."""
    names = ("batch", "sequence", "heads", "head_dim")
    batch, sequence, heads, dim = rules.spec(names, free, query, kind="activations")
    kept = rules.spec(("kv_heads",), free, (key[2],))[0]
    if (
        heads is None
        or heads != kept
        or any(entry is not None and _size(free, entry) > 1 for entry in (batch, sequence, dim))
    ):
        return None
    return heads if _size(free, heads) > 1 else None


def _size(free: Any, entry: Any) -> int:
    axes = (entry,) if isinstance(entry, str) else entry
    return math.prod(free.shape[axis] for axis in axes)
