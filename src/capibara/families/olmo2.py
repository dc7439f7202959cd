"""OLMo 2 (OLMo et al., 2024): norms after each layer instead of before, queries and keys normalised over all heads."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import DECODER, GATED, HEADS, Family, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.tensors import Rule

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return (
        read_sizes(keys, epsilon=1e-5)
        | read_rope(keys)
        | {
            "qk_norm": "all",
            "norm_placement": "after",
            "attention_bias": bias,
            "attention_output_bias": bias,
        }
    )


def _write(model: ModelSection) -> dict[str, Any]:
    keys = write_sizes(model) | write_rope(model) | {"attention_bias": model.attention_bias}
    if model.resolved_head_dim * model.num_heads == model.embed_dim:
        del keys["head_dim"]
    return keys


_SCALES = "(heads dim) -> heads dim"

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(post_attention_layernorm="attention_post_norm", post_feedforward_layernorm="mlp_post_norm"),
        *HEADS,
        Rule.of("model.layers.{layer}.self_attn.q_norm.weight", ("attention.query_norm.scale", _SCALES)),
        Rule.of("model.layers.{layer}.self_attn.k_norm.weight", ("attention.key_norm.scale", _SCALES)),
        *GATED,
    ),
)
