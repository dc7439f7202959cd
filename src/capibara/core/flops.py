"""FLOPs of a decoder configuration."""

from __future__ import annotations

from capibara.config.sections import ModelSection

__all__ = ["flops_per_token"]


def flops_per_token(
    config: ModelSection, sequence_length: int, training: bool = True, *, adapters: int | None = None
) -> float:
    """Floating-point operations per token of a sequence of this length: 2 per multiply-add, 3× forward in training
    (the search for the nearest code only once).

    With ``adapters``, a number of parameters, only these are trained: products with other weights count 2× forward in
    training.

    Matrix products with parameters, causal attention over visible pairs only (half the square), and the recurrence of
    state-space blocks in its sequential form. Normalisations, activations and the embedding lookup are not counted,
    nor is work repeated by rematerialisation or chunking.
    """
    m = config
    d, t = m.embed_dim, sequence_length
    mlp = (3 if m.mlp == "gated" else 2) * d * m.resolved_mlp_dim
    # Of a mixture the router, and the experts that a token uses.
    e = m.experts
    experts = d * e.count + 3 * d * (e.per_token * m.resolved_expert_dim + (e.shared_dim or 0))
    mlps = m.dense_blocks * mlp + (m.num_layers - m.dense_blocks) * experts
    inner = m.ssm.expand * d

    def attention(window: int) -> float:
        # Query i sees i + 1 positions, or the window's.
        seen = (window * t - window * (window - 1) / 2) / t
        return (
            2 * (d * (m.num_heads + 2 * m.num_kv_heads) * m.resolved_head_dim)
            + 2 * m.num_heads * m.resolved_head_dim * d
            + 4 * m.num_heads * m.resolved_head_dim * seen
        )

    def scored(window: int) -> float:
        return attention(window) - attention(0)

    scores = {"attention": scored(t), "local": scored(min(t, m.window or t))}
    per_kind = {
        "attention": attention(t),
        "local": attention(min(t, m.window or t)),
        "ssm": 2 * d * (2 * inner + 2 * m.ssm.state_dim + inner // m.ssm.head_dim)
        + 2 * inner * d
        + 2 * m.ssm.conv_width * (inner + 2 * m.ssm.state_dim)
        + 6 * inner * m.ssm.state_dim,
        "vq": 2 * d * d + 2 * d * m.vq.codebook_size,
    }
    total = float(sum(per_kind[kind] for kind in m.block_kinds) + 2 * mlps + 2 * d * m.vocab_size)
    if adapters is not None:
        total += 2 * adapters
    if not training:
        return total
    if adapters is not None:
        frozen = sum(per_kind[kind] - scores.get(kind, 0) for kind in m.block_kinds)
        return 3 * total - (frozen + 2 * mlps + 2 * d * m.vocab_size)
    # The search for the nearest code has no derivative.
    return 3 * total - 2 * m.block_kinds.count("vq") * 2 * d * m.vq.codebook_size
