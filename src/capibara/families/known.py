"""The families, by ``model_type``."""

from __future__ import annotations

from capibara.errors import did_you_mean
from capibara.families import (
    bert,
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    mamba2,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from capibara.families.errors import FamilyError
from capibara.families.family import Family

__all__ = ["FAMILIES", "find_family"]

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
        gemma2,
        gemma3,
        phi3,
        olmo2,
        gpt2,
        gpt_oss,
        mamba2,
        bert,
        deepseek_v2,
        deepseek_v3,
    )
}


def find_family(name: object, where: object) -> Family:
    """The family of a ``model_type``.

    Raises:
      FamilyError: there is none of this name.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if isinstance(name, str) else ""
        raise FamilyError(
            f"{where}: model_type: got {name!r:.80}, expected one of {', '.join(FAMILIES)}.{hint} Remedy: "
            "docs/families.md tells how to add a family"
        )
    return FAMILIES[name]
