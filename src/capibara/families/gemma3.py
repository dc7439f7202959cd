"""Gemma 3 (Gemma Team, 2025), its text model: five local layers, then one that sees all, with another base of RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.config.sections import ModelSection
from capibara.families import gemma2
from capibara.families.family import Family
from capibara.families.keys import Keys
from capibara.families.qwen3 import HEAD_NORMS
from capibara.families.rope import settings
from capibara.families.windows import read_pattern

__all__ = ["FAMILY"]

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def _read(keys: Keys) -> dict[str, Any]:
    # The models' own implementation does not read it, others do.
    keys.only("attn_logit_softcapping", None)
    count = keys.layers()
    every = keys.whole("sliding_window_pattern", keys.whole("_sliding_window_pattern", 6))
    kinds = ["attention" if (i + 1) % every == 0 else "local" for i in range(count)]
    keys.values = {"sliding_window": 4096} | dict(keys.values)
    pattern = read_pattern(keys, default=kinds)
    found = gemma2.read_common(keys) | pattern | {"qk_norm": "head"}
    if "max_position_embeddings" not in keys.values:
        found["max_sequence_length"] = 131_072
    return found | _rope(keys, "local" in pattern["pattern"])


def _rope(keys: Keys, has_local: bool) -> dict[str, Any]:
    values = keys.take("rope_parameters", None) or {}
    if not isinstance(values, Mapping):
        raise keys.wrong("rope_parameters", "an object")
    theta, local = keys.number("rope_theta", 1e6), keys.number("rope_local_base_freq", 1e4)
    scaling = keys.take("rope_scaling", None) or {}
    if not isinstance(scaling, Mapping):
        raise keys.wrong("rope_scaling", "an object")
    both = {kind: values.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
    if not all(isinstance(one, Mapping) for one in both.values()) or set(values) - set(both):
        raise keys.wrong("rope_parameters", f"objects named {_GLOBAL} and {_LOCAL}")
    found = settings(keys, _given(keys, both[_GLOBAL], scaling), theta, 1.0)
    if both[_GLOBAL] and settings(keys, _given(keys, both[_GLOBAL], {}), theta, 1.0) != found:
        raise keys.wrong("rope_scaling", f"what rope_parameters says of {_GLOBAL}, or one of the two keys")
    of_local = settings(keys, both[_LOCAL], local, 1.0)
    if "rope" in of_local:
        raise keys.wrong("rope_parameters", f"{_LOCAL} without scaling")
    if has_local:
        found["rope"] = found.get("rope", {}) | {"local_theta": of_local["rope_theta"]}
    return found


def _given(keys: Keys, new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of layers that see all: ``rope_parameters`` with ``rope_scaling`` over them.

    Transformers 5 puts ``rope_scaling`` over a ``rope_type`` of ``default``, so that its older name ``type`` alone does
    not stretch (transformers 4 did). It writes both names when it saves such a model.
    """
    values = {**(new or {"rope_type": "default"}), **old}
    if values.get("rope_type") == "default" and values.get("type", "default") != "default":
        keys.notes.append(
            f"rope_scaling: type={values['type']!r:.80} has no effect without rope_type, as in transformers 5"
        )
        values = {key: value for key, value in values.items() if key not in ("type", "factor")}
    return values


def _write(model: ModelSection) -> dict[str, Any]:
    rope = model.rope
    keys = gemma2.write_common(model) | {"rope_theta": model.rope_theta}
    if rope.scaling == "linear":
        keys["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    if rope.local_theta is not None:
        keys["rope_local_base_freq"] = rope.local_theta
    return keys


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    outside=gemma2.FAMILY.outside,
    inside=(*gemma2.FAMILY.inside, *HEAD_NORMS),
)
