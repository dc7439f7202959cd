"""Qwen 3 (Yang et al., 2025): queries and keys of each head are normalised."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import llama
from capibara.families.family import Family, norms
from capibara.families.keys import Keys
from capibara.families.qwen2 import read_windows, write_windows
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes

__all__ = ["FAMILY", "HEAD_NORMS"]

HEAD_NORMS = norms(**{"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"})


def _read(keys: Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return (
        read_sizes(keys, length=32_768, head_dim=128)
        | read_rope(keys)
        | read_windows(keys)
        | {"qk_norm": "head", "attention_bias": bias, "attention_output_bias": bias}
    )


def _write(model: ModelSection) -> dict[str, Any]:
    return (
        write_sizes(model)
        | write_rope(model)
        | write_windows(model)
        | {"attention_bias": model.attention_bias}
    )


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
    outside=llama.FAMILY.outside,
    inside=(*llama.FAMILY.inside, *HEAD_NORMS),
)
