"""DeepSeek-V2 (arXiv:2405.04434): latent attention, experts in groups, shared experts, the first layers dense.

``norm_topk_prob`` is refused: its own implementation leaves ``routed_scaling_factor`` out with it, others ignore it.
"""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import DECODER, GATED, HEADS, Family, experts, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.tensors import Rule

__all__ = ["FAMILY", "read_latent", "read_mixture", "write_latent", "write_mixture"]

_METHODS = {"greedy": False, "group_limited_greedy": True}


def read_latent(keys: Keys, *, length: int) -> dict[str, Any]:
    """The settings of sizes and of latent attention; ``length`` is what a missing longest sequence means."""
    heads = keys.whole("num_attention_heads")
    latent = {
        "kv_rank": keys.whole("kv_lora_rank"),
        "query_rank": None if keys.take("q_lora_rank") is None else keys.whole("q_lora_rank"),
        "head_dim": keys.whole("qk_nope_head_dim"),
        "rotary_dim": keys.whole("qk_rope_head_dim"),
        "value_dim": keys.whole("v_head_dim"),
    }
    sizes = read_sizes(keys, length=length)
    sizes.pop("head_dim", None)
    keys.only("num_key_value_heads", heads, None)
    keys.only("head_dim", None, latent["rotary_dim"])
    keys.only("qk_head_dim", None, latent["head_dim"] + latent["rotary_dim"])
    bias = keys.flag("attention_bias", False)
    return sizes | {"latent": latent, "attention_bias": bias, "attention_output_bias": bias}


def read_mixture(keys: Keys, *, first_dense: int) -> dict[str, Any]:
    """The settings of ``experts`` but for the way of choosing."""
    keys.only("moe_layer_freq", 1)
    dim = keys.whole("moe_intermediate_size")
    return {
        "count": keys.whole("n_routed_experts"),
        "per_token": keys.whole("num_experts_per_tok"),
        "dim": dim,
        "shared_dim": keys.whole("n_shared_experts") * dim,
        "first_dense": keys.whole("first_k_dense_replace", first_dense, least=0),
    }


def write_latent(model: ModelSection) -> dict[str, Any]:
    """The keys of sizes and of latent attention."""
    latent = model.latent
    keys = write_sizes(model) | write_rope(model)
    del keys["head_dim"]
    return keys | {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.head_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": model.attention_bias,
    }


def write_mixture(model: ModelSection) -> dict[str, Any]:
    """The keys of experts but for the way of choosing."""
    mixture, count = model.experts, max(model.experts.count, 1)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": min(mixture.per_token, count),
        "moe_intermediate_size": model.resolved_expert_dim,
        "n_shared_experts": (mixture.shared_dim or 0) // model.resolved_expert_dim,
        "first_k_dense_replace": mixture.first_dense,
        "moe_layer_freq": 1,
        "routed_scaling_factor": mixture.scale,
        "norm_topk_prob": mixture.normalise,
        "n_group": mixture.groups,
        "topk_group": mixture.top_groups,
    }


def _read(keys: Keys) -> dict[str, Any]:
    mixture = read_mixture(keys, first_dense=0)
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    keys.only("mlp_bias", False)
    mixture |= {"normalise": False, "scale": keys.number("routed_scaling_factor", 1.0)}
    if "topk_method" in keys.values and keys.choice("topk_method", _METHODS):
        mixture |= {"groups": keys.whole("n_group"), "top_groups": keys.whole("topk_group")}
    else:
        keys.take("n_group", None)
        keys.take("topk_group", None)
    settings = read_latent(keys, length=2048) | {"experts": mixture}
    rope = read_rope(keys, mscale=True)
    return settings | rope | {"rope": rope.get("rope", {}) | {"interleaved": True}}


def _write(model: ModelSection) -> dict[str, Any]:
    method = "greedy" if model.experts.groups == 1 else "group_limited_greedy"
    return write_latent(model) | write_mixture(model) | {"topk_method": method, "scoring_func": "softmax"}


_ATTENTION = "model.layers.{layer}.self_attn."
_MATRIX, _VECTOR = "out in -> in out", "d -> d"

FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(
            **{
                "input_layernorm": "attention_norm",
                "post_attention_layernorm": "mlp_norm",
                "self_attn.q_a_layernorm": "attention.query_norm",
                "self_attn.kv_a_layernorm": "attention.latent_norm",
            }
        ),
        *(rule for rule in HEADS if ".q_proj.weight" in rule.name or ".o_proj." in rule.name),
        *(
            rule
            for theirs, ours in (("q_a_proj", "query_down"), ("kv_a_proj_with_mqa", "latent_down"))
            for rule in (
                Rule.of(f"{_ATTENTION}{theirs}.weight", (f"attention.{ours}.weight", _MATRIX)),
                Rule.of(f"{_ATTENTION}{theirs}.bias", (f"attention.{ours}.bias", _VECTOR)),
            )
        ),
        *(
            Rule.of(
                f"{_ATTENTION}{theirs}.weight",
                (f"attention.{ours}.weight", "(heads dim) latent -> latent heads dim"),
            )
            for theirs, ours in (("q_b_proj", "query_up"), ("kv_b_proj", "latent_up"))
        ),
        *GATED,
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *(
            Rule.of(
                f"model.layers.{{layer}}.mlp.shared_experts.{part}_proj.weight",
                (f"mlp.shared.{part}.weight", _MATRIX),
            )
            for part in ("gate", "up", "down")
        ),
    ),
)
