"""Phi-3 and Phi-4 (Abdin et al., 2024): projections that are read together are one tensor; heads turned in part."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import llama
from capibara.families.family import DECODER, Family, joined, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import read_pattern

__all__ = ["FAMILY"]

_HEADS = "(heads dim) embed -> embed heads dim"


def _read(keys: Keys) -> dict[str, Any]:
    # Counts where RoPE is stretched only, which rope_scaling says with its own key.
    keys.take("original_max_position_embeddings", None)
    return read_sizes(keys, epsilon=1e-5, length=4096) | read_rope(keys) | read_pattern(keys)


def _write(model: ModelSection) -> dict[str, Any]:
    return write_sizes(model) | write_rope(model) | {"sliding_window": model.window}


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"),
        joined(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            "attention.query.weight",
            "attention.key.weight",
            "attention.value.weight",
            form=_HEADS,
        ),
        *(rule for rule in llama.FAMILY.inside if rule.name.endswith(("o_proj.weight", "down_proj.weight"))),
        joined("model.layers.{layer}.mlp.gate_up_proj.weight", "mlp.gate.weight", "mlp.up.weight"),
    ),
)
