"""Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024), and the many models of the same form."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import DECODER, GATED, HEADS, Family, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return (
        read_sizes(keys)
        | read_rope(keys)
        | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": keys.flag("mlp_bias", False),
        }
    )


def _write(model: ModelSection) -> dict[str, Any]:
    return (
        write_sizes(model)
        | write_rope(model)
        | {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}
    )


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(
        *norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"),
        *HEADS,
        *GATED,
    ),
)
