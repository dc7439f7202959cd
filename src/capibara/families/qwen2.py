"""Qwen 2 and 2.5 (Yang et al., 2024): biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import llama
from capibara.families.family import Family
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import layer_types, read_pattern

__all__ = ["FAMILY", "read_windows", "write_windows"]


def read_windows(keys: Keys) -> dict[str, Any]:
    """The window of layers from ``max_window_layers`` on, if ``use_sliding_window`` asks for it."""
    first = keys.whole("max_window_layers", 28, least=0)
    count = keys.layers()
    if not keys.flag("use_sliding_window", False):
        keys.take("sliding_window", None)
        keys.only("layer_types", None, ["full_attention"] * count)
        return {"pattern": ["attention"]}
    return read_pattern(keys, default=["attention" if i < first else "local" for i in range(count)])


def write_windows(model: ModelSection) -> dict[str, Any]:
    """The keys that :func:`read_windows` reads."""
    local = "local" in model.block_kinds
    return {
        "use_sliding_window": local,
        "sliding_window": model.window,
        "max_window_layers": model.num_layers,
        "layer_types": layer_types(model),
    }


def _read(keys: Keys) -> dict[str, Any]:
    return read_sizes(keys, length=32_768) | read_rope(keys) | read_windows(keys) | {"attention_bias": True}


def _write(model: ModelSection) -> dict[str, Any]:
    keys = write_sizes(model) | write_rope(model) | write_windows(model)
    # Its own classes have no key for the size of a head.
    if model.resolved_head_dim * model.num_heads == model.embed_dim:
        del keys["head_dim"]
    return keys


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    outside=llama.FAMILY.outside,
    inside=llama.FAMILY.inside,
)
