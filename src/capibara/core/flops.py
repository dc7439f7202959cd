"""FLOPs of a language model's configuration."""

from __future__ import annotations

from capibara.config.sections import ModelSection

__all__ = ["attention_scores", "decoding_flops", "flops_per_token"]


def flops_per_token(
    config: ModelSection, sequence_length: int, training: bool = True, *, adapters: float | None = None
) -> float:
    """Floating-point operations per token of a sequence of this length: 2 per multiply-add, 3× forward in training
    (the search for the nearest code only once).

    With ``adapters``, as many parameters as the products of a token take, only adapters are trained: products with
    other weights count 2× forward in training.

    Matrix products with parameters, attention over visible pairs only (if causal, half the square), and the recurrence
    of state-space blocks in its sequential form. Latent attention counts in its form for whole sequences: keys and
    values are computed from latents once. Normalisations, activations and the embedding lookup are not counted,
    nor is work repeated by rematerialisation or chunking.
    """
    m = config
    d, t = m.embed_dim, sequence_length
    mlp = {"gated": 3, "plain": 2, "none": 0}[m.mlp] * d * m.resolved_mlp_dim
    # Of a mixture the router, and the experts that a token uses.
    e = m.experts
    experts = d * e.count + 3 * d * (e.per_token * m.resolved_expert_dim + (e.shared_dim or 0))
    mlps = m.dense_blocks * mlp + (m.num_layers - m.dense_blocks) * experts
    inner, vectors = m.ssm.expand * d, m.ssm.groups * m.ssm.state_dim

    def attention(window: int) -> float:
        return 2 * _attention_products(m) + _scored(m, t, window)

    scores = _scored_by_kind(m, t)
    per_kind = {
        "attention": attention(t),
        "local": attention(min(t, m.window or t)),
        "ssm": 2 * d * (2 * inner + 2 * vectors + inner // m.ssm.head_dim)
        + 2 * inner * d
        + 2 * m.ssm.conv_width * (inner + 2 * vectors)
        + 6 * inner * m.ssm.state_dim,
        "vq": 2 * d * d + 2 * d * m.vq.codebook_size,
    }
    head = {"none": 0, "linear": d * m.vocab_size, "transform": d * (m.vocab_size + d)}[m.head]
    head += d * d / t if m.pooler else 0  # of one token in each sequence
    total = float(sum(per_kind[kind] for kind in m.block_kinds) + 2 * mlps + 2 * head)
    if adapters is not None:
        total += 2 * adapters
    if not training:
        return total
    if adapters is not None:
        frozen = sum(per_kind[kind] - scores.get(kind, 0) for kind in m.block_kinds)
        return 3 * total - (frozen + 2 * mlps + 2 * head)
    # The search for the nearest code has no derivative.
    return 3 * total - 2 * m.block_kinds.count("vq") * 2 * d * m.vq.codebook_size


def decoding_flops(config: ModelSection, cached: int) -> float:
    """Floating-point operations of one token that looks back over ``cached`` positions, itself among them.

    Latent attention compares queries with the cache itself, which takes fewer operations than computing keys and
    values, and more for each position than :func:`flops_per_token` counts.
    """
    m, latent = config, config.latent
    # A sequence's positions see half of it on average.
    total = flops_per_token(m, 2 * cached - 1, training=False)
    if latent.kv_rank is None:
        return total
    wider = 2 * latent.kv_rank + latent.rotary_dim - m.resolved_head_dim - latent.value_dim
    seen = {"attention": cached, "local": min(cached, m.window or cached)}
    return total + 2 * m.num_heads * wider * sum(seen.get(kind, 0) for kind in m.block_kinds)


def attention_scores(config: ModelSection, sequence_length: int) -> float:
    """Forward floating-point operations per token, in all layers, of queries with keys and of weights with values."""
    scores = _scored_by_kind(config, sequence_length)
    return sum(scores.get(kind, 0.0) for kind in config.block_kinds)


def _scored_by_kind(m: ModelSection, t: int) -> dict[str, float]:
    return {"attention": _scored(m, t, t), "local": _scored(m, t, min(t, m.window or t))}


def _scored(m: ModelSection, t: int, window: int) -> float:
    # Query i sees i + 1 positions, or the window's; in an encoder as many after it.
    seen = (window * t - window * (window - 1) / 2) / t
    if not m.causal:
        seen = max(0.0, 2 * seen - 1)
    head = m.resolved_head_dim
    values = head if m.latent.kv_rank is None else m.latent.value_dim
    return 2 * m.num_heads * (head + values) * seen


def _attention_products(m: ModelSection) -> int:
    """Elements of attention's weights, each of which a token is multiplied with once."""
    d, heads, head, latent = m.embed_dim, m.num_heads, m.resolved_head_dim, m.latent
    if latent.kv_rank is None:
        return d * (2 * heads + 2 * m.num_kv_heads) * head
    queries = d * heads * head
    if latent.query_rank is not None:
        queries = latent.query_rank * (d + heads * head)
    down = d * (latent.kv_rank + latent.rotary_dim)
    up = latent.kv_rank * heads * (latent.head_dim + latent.value_dim)
    return queries + down + up + heads * latent.value_dim * d
