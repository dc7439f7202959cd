"""gpt-oss (OpenAI, arXiv:2508.10925): every feed-forward layer is a mixture of experts, every head has a sink.

Published weights have the experts' matrices in MXFP4 (:mod:`capibara.families.mxfp4`); they are decoded.
"""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import DECODER, HEADS, Family, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.tensors import Rule
from capibara.families.windows import layer_types, read_pattern

__all__ = ["FAMILY"]

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(keys: Keys) -> dict[str, Any]:
    count = keys.whole("num_hidden_layers")
    keys.whole("num_key_value_heads")  # a missing key means another number than that of heads
    # What a file means that does not say it.
    if not keys.values.get("rope_scaling") and keys.values.get("rope_parameters") is None:
        keys.values = {**keys.values, "rope_scaling": _ROPE}
    keys.values = {"sliding_window": 128} | dict(keys.values)
    bias = keys.flag("attention_bias", True)
    mixture = {
        "count": keys.whole("num_local_experts"),
        "per_token": keys.whole("num_experts_per_tok", 4),
        "logit_bias": True,
    }
    rope = read_rope(keys, theta=150_000.0)
    # Two keys say again what others do.
    keys.only("experts_per_token", mixture["per_token"])
    original = rope.get("rope", {}).get("original_length")
    keys.only("initial_context_length", original, None)
    sizes = read_sizes(keys, epsilon=1e-5, head_dim=64, length=131_072)
    keys.only("hidden_act", "silu")
    kinds = ["attention" if i % 2 else "local" for i in range(count)]
    return (
        sizes
        | rope
        | read_pattern(keys, default=kinds)
        | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "attention_sinks": True,
            "mlp_bias": True,
            "activation": "swiglu_clamped",
            "activation_limit": keys.number("swiglu_limit", 7.0),
            "activation_alpha": keys.number("swiglu_alpha", 1.702),
            "experts": mixture,
        }
    )


def _write(model: ModelSection) -> dict[str, Any]:
    count = max(model.experts.count, 1)
    plain = {} if model.rope.scaling != "none" else {"rope_scaling": {"rope_type": "default"}}
    return (
        write_sizes(model)
        | plain
        | write_rope(model)
        | {
            "hidden_act": "silu",
            "intermediate_size": model.resolved_expert_dim,
            "attention_bias": model.attention_bias,
            # Their reader wants a number even where no layer is local.
            "sliding_window": model.window or 128,
            "layer_types": layer_types(model),
            "swiglu_limit": model.activation_limit,
            "swiglu_alpha": model.activation_alpha,
            "num_local_experts": count,
            "num_experts_per_tok": min(model.experts.per_token, count),
        }
    )


_BLOCK = "model.layers.{layer}."
_MATRICES, _VECTORS = "experts in out -> experts in out", "experts d -> experts d"

FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"),
        *HEADS,
        Rule.of(f"{_BLOCK}self_attn.sinks", ("attention.sinks", "heads -> heads")),
        Rule.of(f"{_BLOCK}mlp.router.weight", ("mlp.router", "experts embed -> embed experts")),
        Rule.of(f"{_BLOCK}mlp.router.bias", ("mlp.logit_bias", "experts -> experts")),
        Rule.of(
            f"{_BLOCK}mlp.experts.gate_up_proj",
            ("mlp.gate", _MATRICES),
            ("mlp.up", _MATRICES),
            axis=2,
            interleaved=True,
        ),
        Rule.of(
            f"{_BLOCK}mlp.experts.gate_up_proj_bias",
            ("mlp.gate_bias", _VECTORS),
            ("mlp.up_bias", _VECTORS),
            axis=1,
            interleaved=True,
        ),
        Rule.of(f"{_BLOCK}mlp.experts.down_proj", ("mlp.down", _MATRICES)),
        Rule.of(f"{_BLOCK}mlp.experts.down_proj_bias", ("mlp.down_bias", _VECTORS)),
    ),
)
