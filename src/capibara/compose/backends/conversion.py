"""From whatever a user has (numbers, nested lists, arrays of other libraries) to a NumPy array of a known dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.compose.dtypes import DTYPES
from capibara.compose.errors import InputError

__all__ = ["as_numbers", "kind_of_dtype"]


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
            f"array: {type(values).__name__} of dtype {found.dtype} holds no numbers; give numbers, nested lists of "
            "numbers, or an array"
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
