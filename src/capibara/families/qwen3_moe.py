"""Qwen 3 with experts (Yang et al., 2025): the first layers may have none."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import qwen3
from capibara.families.family import Family, experts
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import read_pattern

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    keys.whole("num_key_value_heads")  # what a missing key means is another number than that of heads
    keys.only("decoder_sparse_step", 1)
    dense = keys.take("mlp_only_layers", None) or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise keys.wrong("mlp_only_layers", "the first layers, as [0, 1]")
    # Newer files have the other name.
    count = keys.whole("num_experts" if "num_experts" in keys.values else "num_local_experts")
    bias = keys.flag("attention_bias", False)
    mixture = {
        "count": count,
        "per_token": keys.whole("num_experts_per_tok"),
        "dim": keys.whole("moe_intermediate_size"),
        "normalise": keys.flag("norm_topk_prob", False),
        "first_dense": len(dense),
    }
    return (
        read_sizes(keys, length=32_768)
        | read_rope(keys)
        | _read_windows(keys)
        | {"qk_norm": "head", "attention_bias": bias, "attention_output_bias": bias, "experts": mixture}
    )


def _read_windows(keys: Keys) -> dict[str, Any]:
    """All layers have the window, if ``use_sliding_window`` asks for it."""
    keys.take("max_window_layers", None)
    if keys.flag("use_sliding_window", False):
        return read_pattern(keys)
    keys.take("sliding_window", None)
    return {"pattern": ["attention"]}


def _write(model: ModelSection) -> dict[str, Any]:
    mixture, count = model.experts, max(model.experts.count, 1)
    return (
        write_sizes(model)
        | write_rope(model)
        | {
            "attention_bias": model.attention_bias,
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(mixture.first_dense)),
            "num_experts": count,
            "num_experts_per_tok": min(mixture.per_token, count),
            "moe_intermediate_size": model.resolved_expert_dim,
            "norm_topk_prob": mixture.normalise,
        }
    )


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    outside=qwen3.FAMILY.outside,
    inside=(*qwen3.FAMILY.inside, *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
)
