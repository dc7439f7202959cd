"""Output of ``--json``: JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["print_json"]


def print_json(document: Any, *, indent: int = 1) -> None:
    """Print a document on standard output; NaN and infinity, which JSON lacks, become ``null``.

    A measure that is not defined (the relative error of a tensor with NaN, a ratio to nothing) is NaN inside, and
    Python's ``json`` would print it as the word ``NaN``, on which other parsers stop.
    """
    print(json.dumps(_finite(document), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):  # NumPy's float64 is one as well
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
