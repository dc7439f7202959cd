"""Mixtral (Jiang et al., 2024): every feed-forward layer is a mixture of experts."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import llama
from capibara.families.family import DECODER, HEADS, Family, experts, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import read_pattern

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    keys.whole("num_key_value_heads")  # what a missing key means has changed
    mixture = {"count": keys.whole("num_local_experts"), "per_token": keys.whole("num_experts_per_tok")}
    sizes = read_sizes(keys, epsilon=1e-5, length=131_072)
    return sizes | read_rope(keys, theta=1e6) | read_pattern(keys) | {"experts": mixture}


def _write(model: ModelSection) -> dict[str, Any]:
    count = max(model.experts.count, 1)
    return (
        write_sizes(model)
        | write_rope(model)
        | {
            "intermediate_size": model.resolved_expert_dim,
            "sliding_window": model.window,
            "num_local_experts": count,
            "num_experts_per_tok": min(model.experts.per_token, count),
        }
    )


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"),
        *HEADS,
        *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    idle=llama.FAMILY.idle,
)
