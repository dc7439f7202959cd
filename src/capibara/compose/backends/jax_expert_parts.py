"""Mixtures of experts over a mesh: every device multiplies with the experts, and the part of each, that it holds.

The table of logical axes says where things are: tokens over the axes of "batch", experts over those of "experts", the
inner features of each over those of "mlp". A device sorts its tokens by the experts that it has, and the sum over
devices is a token's result. Where experts are over an axis of the batch, its tokens are gathered before, and the sum is
scattered back to where they were. Nothing is dropped, however uneven the choice is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["experts_on_parts"]

_Names = tuple[str, ...]


def experts_on_parts(op: Callable[..., Any], mesh: Mesh, rules: AxisRules) -> Callable[..., Any]:
    """``expert_mlp`` with each device's part of its arrays. What cannot be divided is left to XLA.

    Args:
        op: of :mod:`capibara.compose.backends.jax_ops`. mesh: with automatic axes. rules: which axis goes where.
    """
    import jax
    from jax.core import Tracer
    from jax.sharding import PartitionSpec

    @wraps(op)
    def run(*arrays: Any, **options: Any) -> Any:
        free = free_axes(mesh) if any(isinstance(x, Tracer) for x in arrays) else None
        if free is None:
            return op(*arrays, **options)
        x, gate = arrays[0], arrays[3]
        tokens = _axes(rules.spec(("batch",), free, x.shape[:1], "activations"), 0)
        matrix = rules.spec(("experts", "embed", "mlp"), free, gate.shape)
        experts, inner = _axes(matrix, 0), _axes(matrix, 2)
        if not experts and not inner and not tokens:
            return op(*arrays, **options)
        inner = tuple(axis for axis in inner if axis not in tokens)
        rows = PartitionSpec(tokens or None)
        there, back = (
            PartitionSpec(experts or None, *pair) for pair in ((None, inner or None), (inner or None, None))
        )
        of_inner = PartitionSpec(experts or None, inner or None)
        # The rank of an adapter, and what an expert takes and gives, are whole on each device.
        rank = PartitionSpec(experts or None, None, None)
        low = [
            spec
            for part in options.get("adapters", ())
            for spec in ((back, rank) if part == "down" else (rank, there))
        ]
        biases = (of_inner, of_inner, PartitionSpec(experts or None, None))[: len(arrays) - 6 - len(low)]
        part = jax.shard_map(
            partial(_part, op, tokens, experts, inner, options),
            **free.options,
            in_specs=(rows, rows, rows, there, there, back, *biases, *low),
            out_specs=rows,
        )
        # Compiled also where gradients are taken outside of `jax.jit`, and not one primitive at a time.
        return jax.jit(part, inline=True)(*arrays)

    return run


def _axes(spec: Any, place: int) -> _Names:
    """The mesh axes of one dimension."""
    found = spec[place] if place < len(spec) else None
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def _part(
    op: Callable[..., Any],
    tokens: _Names,
    experts: _Names,
    inner: _Names,
    options: dict[str, Any],
    *arrays: Any,
) -> Any:
    """The mixture on a device's part, inside of ``jax.shard_map``."""
    import jax.numpy as jnp
    from jax import lax

    from capibara.ops.one_device import alike

    rows, matrices = arrays[:3], arrays[3:]
    shared = tuple(axis for axis in tokens if axis in experts)
    if shared:
        rows = [lax.all_gather(x, shared, axis=0, tiled=True) for x in rows]
    # Devices differ in what they compute of the same tokens; the gradient of those is the sum over them.
    rows = alike(tuple(rows), arrays)
    if len(matrices) - 2 * len(options.get("adapters", ())) == 6 and inner:
        # What is summed over the parts of the inner features has this bias once.
        here = lax.axis_index(inner) == 0
        once = jnp.where(here, matrices[5], jnp.zeros((), matrices[5].dtype))
        matrices = (*matrices[:5], once, *matrices[6:])
    # Without parts of the experts all of them are here.
    first = lax.axis_index(experts) * matrices[0].shape[0] if experts else None
    out = op(*rows, *matrices, **options, first=first)
    if others := tuple(axis for axis in (*experts, *inner) if axis not in shared):
        out = lax.psum(out, others)
    return lax.psum_scatter(out, shared, scatter_dimension=0, tiled=True) if shared else out
