"""What the names of a script hold at its end, so that two runs of it can be compared."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["compare_results", "compare_texts", "write_results"]

# What is kept of a script: values of names, elements of each, and bytes of an array that is fetched for it.
_MOST_VALUES, _MOST_ELEMENTS, _MOST_BYTES = 500, 4096, 256 * 2**20
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST_TEXT = 1 << 22
# Numbers below this are compared as if they were this large.
_LITTLE = 1e-3


def write_results(path: Path, names: Mapping[str, Any]) -> None:
    """Keep the arrays and numbers that names hold, also within lists, tuples and dicts; of large ones a sample."""
    kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, value in sorted(names.items()):
        if name.startswith("__"):
            continue
        with contextlib.suppress(Exception):  # code of the script's objects runs here
            for place, leaf in _leaves(value):
                if len(kept) >= _MOST_VALUES:
                    break
                if (sample := _sample(leaf)) is not None:
                    kept[f"{name}{place}"] = sample
    with path.open("wb") as file:
        arrays = {"names": np.array(list(kept), str)}
        for number, (shape, elements) in enumerate(kept.values()):
            arrays |= {f"shape{number}": shape, f"elements{number}": elements}
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] - its stub has a boolean keyword, too


def _leaves(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth < 8 and isinstance(value, dict):
        for key, one in list(value.items())[:_MOST_VALUES]:
            for place, leaf in _leaves(one, depth + 1):
                yield f"[{key!r:.50}]{place}", leaf
    elif depth < 8 and isinstance(value, list | tuple):
        for number, one in enumerate(value[:_MOST_VALUES]):
            for place, leaf in _leaves(one, depth + 1):
                yield f"[{number}]{place}", leaf
    else:
        yield "", value


def _sample(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Its shape and some of its elements in float64 (of complex numbers both parts); None if it is not numeric."""
    if isinstance(value, bool | str | bytes) or not (
        isinstance(value, int | float | complex) or (hasattr(value, "dtype") and hasattr(value, "shape"))
    ):
        return None
    if getattr(value, "nbytes", 0) > _MOST_BYTES:
        return None
    array = np.asarray(value)
    if array.dtype.kind == "V" or array.dtype.kind not in "biufc":
        array = array.astype(np.float32)  # bfloat16 and its like
    flat = array.ravel()[:: max(1, array.size // _MOST_ELEMENTS)]
    if flat.dtype.kind == "c":
        flat = np.concatenate([np.real(flat), np.imag(flat)])
    return np.array(array.shape, np.int64), flat.astype(np.float64)


def compare_results(one: Path, other: Path, tolerance: float) -> tuple[int, str]:
    """How many values two runs both kept, and the first that differs by more than a share of its largest element.

    Returns:
      The values, and the name of the first that differs; empty if none does.
    """
    first, second = _read(one), _read(other)
    if set(first) != set(second):
        return len(first), next(iter(set(first) ^ set(second)))
    for name, (shape, mine) in first.items():
        other_shape, theirs = second[name]
        scale = float(np.max(np.abs(mine), initial=0.0, where=np.isfinite(mine)))
        if not np.array_equal(shape, other_shape) or not np.allclose(
            mine, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        ):
            return len(first), name
    return len(first), ""


def _read(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What :func:`write_results` wrote; nothing if there is no such file, or it is damaged."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {
                str(name): (file[f"shape{number}"], file[f"elements{number}"])
                for number, name in enumerate(file["names"])
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return {}


def compare_texts(one: bytes, other: bytes, tolerance: float) -> str:
    """The first piece in which two outputs differ, as text; numbers may differ by a share of theirs. Empty if none."""
    if one == other:
        return ""
    first, second = (text[:_LONGEST_TEXT].decode(errors="replace") for text in (one, other))
    numbers, others = (_NUMBER.findall(text) for text in (first, second))
    words, their_words = (_NUMBER.split(text) for text in (first, second))
    if words != their_words:
        mine, theirs = next(
            ((a, b) for a, b in zip(words, their_words, strict=False) if a != b), (first[-40:], second[-40:])
        )
        return f"{mine.strip()[:40]!r} and {theirs.strip()[:40]!r}"
    for a, b in zip(numbers, others, strict=True):
        if abs(float(a) - float(b)) > tolerance * max(abs(float(a)), abs(float(b)), _LITTLE):
            return f"{a} and {b}"
    return ""
