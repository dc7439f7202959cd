"""The loss of the next token, from hidden states and the head.

:func:`capibara.ops.loss.cross_entropy` needs no array of all logits. XLA cannot split what it does, so on a mesh every
device computes the loss of its own tokens against its own part of the vocabulary, inside ``jax.shard_map``; the table
of logical axes says which these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.meshes import is_free
from capibara.compose.physical.explicit import automatic_mesh
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    import jax

__all__ = ["next_token_loss"]


def next_token_loss(
    config: ModularModelConfig,
    params: Mapping[str, Any],
    hidden: jax.Array,
    targets: jax.Array,
    mesh: Any,
    rules: AxisRules | None,
) -> jax.Array:
    """The mean cross-entropy of ``targets [batch, sequence]``, in nats, in the accumulation dtype.

    Args:
        config: the model's.
        params: with the table of the tied embedding, or with the head.
        hidden: ``[batch, sequence, embed]``, what the head is given.
        mesh, rules: the backend's.
    """
    import jax
    from jax.core import Tracer

    from capibara.ops.loss import cross_entropy

    tied = config.model.tie_embeddings
    head = (params["embedding"] if tied else params["head"])["weight"].astype(hidden.dtype)
    options: dict[str, Any] = {"layout": "vf" if tied else "fv", "softcap": config.model.logit_softcap}
    mesh = automatic_mesh(mesh)
    spec = None
    if mesh is not None and mesh.size > 1 and isinstance(hidden, Tracer) and is_free(mesh):
        spec = _spec((*targets.shape, config.model.vocab_size), mesh, rules or AxisRules())
    if not spec:
        loss = cross_entropy(hidden, head, targets, **options)
        return loss.astype(config.precision.accumulate_dtype)

    *tokens, vocab = spec
    over = tuple(axis for axes in tokens for axis in axes)

    def part(hidden: Any, head: Any, targets: Any) -> Any:
        own = cross_entropy(hidden, head, targets, reduction="sum", axis_name=vocab or None, **options)
        return jax.lax.psum(own, over) if over else own

    laid = jax.sharding.PartitionSpec(*(axes or None for axes in tokens))
    columns = (vocab or None, None) if tied else (None, vocab or None)
    mapped = jax.shard_map(
        part,
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(laid, jax.sharding.PartitionSpec(*columns), laid),
        out_specs=jax.sharding.PartitionSpec(),
    )
    total = jax.jit(mapped, inline=True)(hidden, head, targets)
    return (total / math.prod(targets.shape)).astype(config.precision.accumulate_dtype)


def _spec(shape: tuple[int, ...], mesh: Any, rules: AxisRules) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of batch, sequence and vocabulary; empty if none of them is sharded."""
    found = []
    for entry in rules.spec(("batch", "sequence", "vocab"), mesh, shape, kind="activations"):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        found.append(tuple(axis for axis in axes if mesh.shape[axis] > 1))
    return tuple(found) if any(found) else ()
