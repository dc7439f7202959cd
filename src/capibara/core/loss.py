"""The loss of the next token, from hidden states and the head.

:func:`capibara.ops.loss.cross_entropy` needs no array of all logits. XLA cannot split what it does, so on a mesh every
device computes the loss of its own tokens against its own part of the vocabulary, inside ``jax.shard_map``; the table
of logical axes says which these are. Where a device has few logits, they are computed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from capibara.compose.backends.meshes import free_axes
from capibara.compose.physical.explicit import automatic_mesh
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    import jax

__all__ = ["Parts", "losses_of", "mean_of", "next_token_loss", "parts_of", "total_loss"]

_Axes = tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """How tokens and vocabulary are sharded: the mesh axes of batch, sequence and vocabulary, of ``mesh``.

    ``mesh`` is a :class:`~capibara.compose.backends.meshes.Free`; None: they are not.
    """

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
    free = None if mesh is None else free_axes(mesh)
    if mesh is not None and mesh.size > 1 and (free is not None or not around.manual_axes):
        if free is None or not isinstance(tokens, Tracer):
            return None  # left to XLA, which splits the logits
        spec = (rules or AxisRules()).spec(
            ("batch", "sequence", "vocab"), free, (*tokens.shape, m.vocab_size), kind="activations"
        )
        axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        parts = Parts(free, *(tuple(axis for axis in each if free.shape[axis] > 1) for each in axes))
    own = math.prod(tokens.shape) // parts.size(*parts.batch, *parts.sequence)
    vocab = m.vocab_size // parts.size(*parts.vocab)
    reason = reason_for_whole(own, m.embed_dim, vocab, config.precision.compute_dtype)
    return parts if reason is None else None


def mean_of(total: jax.Array, weights: jax.Array) -> jax.Array:
    """``total / sum(weights)``; 0 if no token counts."""
    import jax.numpy as jnp

    count = jnp.sum(weights).astype(total.dtype)
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def losses_of(
    config: ModularModelConfig, params: Mapping[str, Any], hidden: jax.Array, targets: jax.Array, parts: Parts
) -> jax.Array:
    """The cross-entropy of each of ``targets [batch, sequence]``; arguments as of :func:`next_token_loss`."""
    return _computed(config, params, hidden, targets, parts, None, "none").astype(
        config.precision.accumulate_dtype
    )


def _head(
    config: ModularModelConfig, params: Mapping[str, Any], hidden: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    """What scores hidden states, and how the operation takes it."""
    tied = config.model.tie_embeddings
    head = (params["embedding"] if tied else params["head"])["weight"].astype(hidden.dtype)
    return head, {"layout": "vf" if tied else "fv", "softcap": config.model.logit_softcap}


def next_token_loss(
    config: ModularModelConfig,
    params: Mapping[str, Any],
    hidden: jax.Array,
    targets: jax.Array,
    parts: Parts,
    *,
    weights: jax.Array | None = None,
) -> jax.Array:
    """The mean cross-entropy of ``targets [batch, sequence]``, in nats, in the accumulation dtype.

    Args:
        config: the model's.
        params: with the table of the tied embedding, or with the head.
        hidden: ``[batch, sequence, embed]``, what the head is given.
        parts: how both are sharded.
        weights: ``[batch, sequence]``, how much each target counts; None: all alike.
    """
    wide = config.precision.accumulate_dtype
    if not (parts.batch or parts.sequence or parts.vocab):
        from capibara.ops.loss import cross_entropy

        head, options = _head(config, params, hidden)
        return cross_entropy(hidden, head, targets, weights=weights, **options).astype(wide)
    total = total_loss(config, params, hidden, targets, parts, weights=weights)
    if weights is not None:
        return mean_of(total, weights).astype(wide)
    return (total / math.prod(targets.shape)).astype(wide)


def total_loss(
    config: ModularModelConfig,
    params: Mapping[str, Any],
    hidden: jax.Array,
    targets: jax.Array,
    parts: Parts,
    *,
    weights: jax.Array | None = None,
) -> jax.Array:
    """The sum of the cross-entropies, weighted; arguments as of :func:`next_token_loss`."""
    return _computed(config, params, hidden, targets, parts, weights, "sum")


def _computed(
    config: ModularModelConfig,
    params: Mapping[str, Any],
    hidden: jax.Array,
    targets: jax.Array,
    parts: Parts,
    weights: jax.Array | None,
    reduction: Literal["none", "sum"],
) -> jax.Array:
    """The cross-entropies of each device's tokens, or their sum over all devices."""
    import jax
    from jax.sharding import PartitionSpec

    from capibara.ops.loss import cross_entropy

    tied = config.model.tie_embeddings
    head, options = _head(config, params, hidden)
    over = (*parts.batch, *parts.sequence)
    counted = () if weights is None else (weights,)
    if not over and not parts.vocab:
        return cross_entropy(hidden, head, targets, weights=weights, reduction=reduction, **options)

    def part(hidden: Any, head: Any, targets: Any, *weights: Any) -> Any:
        given = {**options, "weights": weights[0] if weights else None}
        own = cross_entropy(
            hidden, head, targets, reduction=reduction, axis_name=parts.vocab or None, **given
        )
        return jax.lax.psum(own, over) if over and reduction == "sum" else own

    tokens, vocab = PartitionSpec(parts.batch or None, parts.sequence or None), parts.vocab or None
    mapped = jax.shard_map(
        part,
        **parts.mesh.options,
        in_specs=(
            tokens,
            PartitionSpec(vocab, None) if tied else PartitionSpec(None, vocab),
            *(tokens for _ in (targets, *counted)),
        ),
        out_specs=PartitionSpec() if reduction == "sum" else tokens,
    )
    # Compiled also where gradients are taken outside of `jax.jit`, and not one primitive at a time.
    return jax.jit(mapped, inline=True)(hidden, head, targets, *counted)
