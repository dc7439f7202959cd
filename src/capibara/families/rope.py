"""Rotary positions in a ``config.json``.

Files until 2025 have ``rope_theta`` and ``rope_scaling``; newer ones ``rope_parameters``, in some families one for each
kind of layer. Both are read; the older form is written, which every reader knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.keys import Keys

__all__ = ["read_rope", "write_rope"]

_LINEAR = {"factor": "factor"}
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
_MSCALE = {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
_KINDS = {"linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN}
_WHOLE = {"original_length"}
_PLAIN = ("default", "none", None)


def read_rope(
    keys: Keys, *, theta: float = 10000.0, fraction: float = 1.0, mscale: bool = False
) -> dict[str, Any]:
    """The settings ``rope_theta`` and ``rope``.

    Args:
      keys: of the file. theta, fraction: what a file means that says nothing of them.
      mscale: whether the family knows YaRN's ``mscale`` and ``mscale_all_dim``, which change scores too.
    """
    old = keys.take("rope_scaling", None)
    given = keys.number("rope_theta", theta)
    part = keys.number("partial_rotary_factor", fraction)
    new = keys.take("rope_parameters", None)
    for key, values in (("rope_parameters", new), ("rope_scaling", old)):
        if values is not None and not isinstance(values, Mapping):
            raise keys.wrong(key, "an object")
    found = settings(keys, new or old or {}, given, part, mscale=mscale)
    # Readers differ in which of the two they take.
    if new and old and settings(keys, old, given, part, mscale=mscale) != found:
        raise keys.wrong("rope_scaling", "what rope_parameters says, or one of the two keys")
    return found


def settings(
    keys: Keys, values: Mapping[str, Any], theta: float, fraction: float, *, mscale: bool = False
) -> dict[str, Any]:
    """The settings for one ``rope_parameters`` (or ``rope_scaling``)."""
    inner = Keys(values, f"{keys.where}: rope_parameters")
    kind = inner.take("rope_type", inner.take("type", "default"))
    theta = inner.number("rope_theta", theta)
    fraction = inner.number("partial_rotary_factor", fraction)
    rope: dict[str, Any] = {} if fraction == 1 else {"fraction": fraction}
    if kind not in _PLAIN:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise inner.wrong("rope_type", f"one of default, {', '.join(_KINDS)}")
        rope["scaling"] = kind
        names = _KINDS[kind] | (_MSCALE if mscale and kind == "yarn" else {})
        for theirs, ours in names.items():
            if ours == "truncate":
                value = inner.flag(theirs, True)
            elif ours in _WHOLE:
                value = inner.whole(theirs, None)
                if value is None and ours == "original_length":
                    value = keys.whole("max_position_embeddings", None)
            else:
                value = inner.number(theirs, None)
            if value is not None:
                rope[ours] = value
    inner.finish()
    return {"rope_theta": theta} | ({"rope": rope} if rope else {})


def write_rope(model: ModelSection) -> dict[str, Any]:
    """The keys ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``."""
    rope = model.rope
    keys: dict[str, Any] = {"rope_theta": model.rope_theta}
    if rope.fraction != 1:
        keys["partial_rotary_factor"] = rope.fraction
    if rope.scaling != "none":
        names = _KINDS[rope.scaling] | (_MSCALE if rope.scaling == "yarn" else {})
        values = {theirs: getattr(rope, ours) for theirs, ours in names.items()}
        keys["rope_scaling"] = {"rope_type": rope.scaling} | {
            k: v for k, v in values.items() if v is not None
        }
    return keys
