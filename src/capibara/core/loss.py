"""The loss of the next token, from hidden states and the head.

:func:`capibara.ops.loss.cross_entropy` needs no array of all logits. XLA cannot split what it does, so on a mesh every
device computes the loss of its own tokens against its own part of the vocabulary, inside ``jax.shard_map``; the table
of logical axes says which these are. Where a device has few logits, they are computed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.meshes import is_free
from capibara.compose.physical.explicit import automatic_mesh
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    import jax

__all__ = ["Parts", "next_token_loss", "parts_of"]

_Axes = tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """How tokens and vocabulary are sharded: the mesh axes of batch, sequence and vocabulary, of ``mesh``."""

    mesh: Any
    batch: _Axes = ()
    sequence: _Axes = ()
    vocab: _Axes = ()

    def size(self, *axes: str) -> int:
        """The number of devices along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if axes else 1


def parts_of(
    config: ModularModelConfig, tokens: jax.Array, mesh: Any, rules: AxisRules | None
) -> Parts | None:
    """How the loss of ``tokens [batch, sequence]`` is sharded; None if its logits are better computed as a whole.

    Args:
        config: the model's.
        mesh, rules: the backend's.
    """
    import jax
    from jax.core import Tracer

    from capibara.ops.loss.api import reason_for_whole

    m, parts = config.model, Parts(None)
    mesh = automatic_mesh(mesh)
    around = jax.sharding.get_abstract_mesh()
    if mesh is not None and mesh.size > 1 and not around.manual_axes:
        if not (isinstance(tokens, Tracer) and is_free(mesh)):
            return None  # left to XLA, which splits the logits
        spec = (rules or AxisRules()).spec(
            ("batch", "sequence", "vocab"), mesh, (*tokens.shape, m.vocab_size), kind="activations"
        )
        axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        parts = Parts(mesh, *(tuple(axis for axis in each if mesh.shape[axis] > 1) for each in axes))
    own = math.prod(tokens.shape) // parts.size(*parts.batch, *parts.sequence)
    vocab = m.vocab_size // parts.size(*parts.vocab)
    reason = reason_for_whole(own, m.embed_dim, vocab, config.precision.compute_dtype)
    return parts if reason is None else None


def next_token_loss(
    config: ModularModelConfig, params: Mapping[str, Any], hidden: jax.Array, targets: jax.Array, parts: Parts
) -> jax.Array:
    """The mean cross-entropy of ``targets [batch, sequence]``, in nats, in the accumulation dtype.

    Args:
        config: the model's.
        params: with the table of the tied embedding, or with the head.
        hidden: ``[batch, sequence, embed]``, what the head is given.
        parts: how both are sharded.
    """
    import jax
    from jax.sharding import PartitionSpec

    from capibara.ops.loss import cross_entropy

    tied = config.model.tie_embeddings
    head = (params["embedding"] if tied else params["head"])["weight"].astype(hidden.dtype)
    options: dict[str, Any] = {"layout": "vf" if tied else "fv", "softcap": config.model.logit_softcap}
    over = (*parts.batch, *parts.sequence)
    if not over and not parts.vocab:
        return cross_entropy(hidden, head, targets, **options).astype(config.precision.accumulate_dtype)

    def part(hidden: Any, head: Any, targets: Any) -> Any:
        own = cross_entropy(hidden, head, targets, reduction="sum", axis_name=parts.vocab or None, **options)
        return jax.lax.psum(own, over) if over else own

    tokens, vocab = PartitionSpec(parts.batch or None, parts.sequence or None), parts.vocab or None
    mapped = jax.shard_map(
        part,
        mesh=parts.mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(tokens, PartitionSpec(vocab, None) if tied else PartitionSpec(None, vocab), tokens),
        out_specs=PartitionSpec(),
    )
    # Compiled also where gradients are taken outside of `jax.jit`, and not one primitive at a time.
    total = jax.jit(mapped, inline=True)(hidden, head, targets)
    return (total / math.prod(targets.shape)).astype(config.precision.accumulate_dtype)
