"""Values of a GGUF file's metadata by key, of the type that the key has; a file may have any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from capibara.errors import printable
from capibara.families.errors import FamilyError

__all__ = ["plain_values", "value_of"]

_T = TypeVar("_T", bool, int, str, list, np.ndarray)
_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    str: "a string",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}
_MOST_ELEMENTS = 4096  # of an array that says how a model computes: one for each layer, at most


def value_of(metadata: Mapping[str, Any], key: str, kind: type[_T], where: object) -> _T | None:
    """The value of a key; ``None``: there is no such key.

    Args:
      metadata: of a :class:`~capibara.families.gguf.file.GgufFile`. key: one of its keys.
      kind: ``bool``, ``int``, ``str``, ``list`` (of strings) or ``np.ndarray``.
      where: the file, for errors.

    Raises:
      FamilyError: the value has another type.
    """
    value = metadata.get(key)
    if value is None or type(value) is kind:
        return value
    raise FamilyError(
        f"{where}: {printable(key, 80)}: got {_shown(value)}, expected {_NAMES[kind]}. Remedy: get the "
        "file again, or convert the model with llama.cpp"
    )


def plain_values(metadata: Mapping[str, Any], prefix: str, where: object) -> dict[str, Any]:
    """The values of the keys that begin with ``prefix``, by the rest of the key, as Python's own types.

    Raises:
      FamilyError: an array is longer than any that models have; as a list it would take many times its bytes.
    """
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, list | np.ndarray) and len(value) > _MOST_ELEMENTS:
            raise FamilyError(
                f"{where}: {printable(key, 80)}: got {_shown(value)}, expected at most {_MOST_ELEMENTS}. "
                "Remedy: get the file again"
            )
        found[key.removeprefix(prefix)] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


def _shown(value: Any) -> str:
    """A value for a message, without writing out all of it."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)} elements"
    return ascii(value[:80] if isinstance(value, str) else value)
