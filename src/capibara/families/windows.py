"""Which layers of a ``config.json`` see a window only."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.errors import FamilyError
from capibara.families.keys import Keys

__all__ = ["layer_types", "read_pattern"]

_KINDS = {"full_attention": "attention", "sliding_attention": "local"}
_NAMES = {ours: theirs for theirs, ours in _KINDS.items()}


def read_pattern(keys: Keys, *, default: list[str] | None = None) -> dict[str, Any]:
    """The settings ``pattern`` and ``window``.

    Args:
      keys: of the file; ``layer_types`` and ``sliding_window`` are read.
      default: the kind of each layer (``"attention"``, ``"local"``) where ``layer_types`` is missing; by default they
        are all local if there is a window.
    """
    count = keys.layers()
    window = keys.whole("sliding_window", None)
    types = keys.take("layer_types", None)
    if types is None:
        kinds = default or ["attention" if window is None else "local"] * count
    else:
        if not isinstance(types, list) or len(types) != count:
            raise keys.wrong("layer_types", f"a list of {count}, one for each of num_hidden_layers")
        if unknown := [kind for kind in types if not isinstance(kind, str) or kind not in _KINDS]:
            raise keys.wrong("layer_types", f"only {' and '.join(_KINDS)}, not {unknown[0]!r:.80}")
        kinds = [_KINDS[kind] for kind in types]
    if "local" not in kinds:
        return {"pattern": ["attention"]}
    if window is None:
        raise keys.wrong("sliding_window", "an integer, because layers are sliding_attention")
    return {"pattern": _period(kinds), "window": window}


def _period(kinds: list[str]) -> list[str]:
    """The shortest beginning that, repeated, gives all of them."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def layer_types(model: ModelSection) -> list[str]:
    """The names of all layers.

    Raises:
      FamilyError: a layer is no attention.
    """
    if other := next((kind for kind in model.block_kinds if kind not in _NAMES), None):
        raise FamilyError(f"model.pattern has {other!r}, which no family with layer_types has")
    return [_NAMES[kind] for kind in model.block_kinds]
