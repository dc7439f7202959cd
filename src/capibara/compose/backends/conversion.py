"""From whatever a user has (numbers, nested lists, arrays of other libraries) to a NumPy array of a known dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose.dtypes import DTYPES
from capibara.compose.errors import InputError

__all__ = ["as_numbers", "kind_of_dtype", "of_pairs", "place_of"]


def kind_of_dtype(dtype: Any) -> str | None:
    """ "float", "int" or "bool" of a NumPy dtype (ml_dtypes' floats too), else None."""
    kind = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(dtype.kind)
    return "float" if kind is None and dtype.name == "bfloat16" else kind


def as_numbers(values: Any, dtype: str | None, default: str) -> np.ndarray:
    """A new NumPy array: in ``dtype``, or, for None, floats in ``default``, integers in int32, bools as they are.

    Raises:
        InputError: there are no numbers in it, rows differ in length, or integers do not fit int32.
    """
    if type(values).__module__.partition(".")[0] == "torch":
        values = values.detach().cpu()
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    try:
        found = np.asarray(values)
        kind = kind_of_dtype(found.dtype)
    except (ValueError, TypeError) as error:
        raise InputError(f"array: {type(values).__name__} cannot be made an array: {error}") from None
    if kind is None:
        raise InputError(
            f"array: {type(values).__name__} of dtype {found.dtype} has no numeric dtype; pass numbers, nested lists "
            "of numbers, or an array"
        )
    if dtype is None:
        if kind == "int" and found.size:
            low, high = int(found.min()), int(found.max())
            if low < -(2**31) or high >= 2**31:
                raise InputError(
                    f"array: {low if low < 0 else high} does not fit int32; ask for dtype=ml.int64"
                )
        dtype = {"float": default, "int": "int32", "bool": "bool"}[kind]
    return np.array(found, DTYPES[dtype].dtype)


def place_of(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        InputError: there is no such axis.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise InputError(f"axis={axis!r:.80} must be an integer")
    if not -rank <= axis < rank:
        raise InputError(f"axis={axis}: an array of {rank} dimensions has no such axis")
    return axis.__index__() % rank


def of_pairs(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of an input and a target, either broadcast to the other; not to a table of all pairs.

    ``[n, 1]`` and ``[n]`` would make such a table, and are a mistake in a shape.

    Raises:
        InputError: what they broadcast to has neither's shape.
    """

    @functools.wraps(loss)
    def run(x: Any, target: Any, *more: Any, **named: Any) -> Any:
        given, wanted = tuple(getattr(x, "shape", ())), tuple(getattr(target, "shape", ()))
        if given != wanted and given and wanted:
            _check_pair(loss.__name__, given, wanted)
        return loss(x, target, *more, **named)

    return run


def _check_pair(loss: str, given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    rank = max(len(given), len(wanted))
    left, right = ((1,) * (rank - len(s)) + s for s in (given, wanted))
    whole = tuple(m if n == 1 else n for n, m in zip(left, right, strict=True))
    if whole not in (given, wanted):
        raise InputError(
            f"{loss}: the input {list(given)} and the target {list(wanted)} would be compared all with all, as "
            f"{list(whole)}: give the target the shape of the input, as with Reshape or Squeeze"
        )
