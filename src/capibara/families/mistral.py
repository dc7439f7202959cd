"""Mistral (Jiang et al., 2023): every layer may see a window only."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import llama
from capibara.families.family import Family
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import read_pattern

__all__ = ["FAMILY"]


def _read(keys: Keys) -> dict[str, Any]:
    # A file that says nothing of the window has the first model's; null is none.
    values = keys.values if "sliding_window" in keys.values else {**keys.values, "sliding_window": 4096}
    keys.take("sliding_window", None)
    keys.take("layer_types", None)
    return (
        read_sizes(keys, kv_heads=8, length=131_072)
        | read_rope(keys)
        | read_pattern(Keys(values, keys.where))
    )


def _write(model: ModelSection) -> dict[str, Any]:
    return write_sizes(model) | write_rope(model) | {"sliding_window": model.window}


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=_write,
    outside=llama.FAMILY.outside,
    inside=llama.FAMILY.inside,
)
