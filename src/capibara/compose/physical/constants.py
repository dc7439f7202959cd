"""Constants of a model as text in generated source, and back.

Small arrays are written as lists, which can be read; larger ones as base64 of their bytes (little-endian, row by
row), which is exact for every dtype.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from capibara.compose.errors import CompileError

__all__ = ["READABLE", "Code", "argument", "array", "as_source", "frozen", "tensor"]

READABLE = 64
"""Elements up to which an array is written as a list of numbers."""


class Code(str):
    """Source that stands in an argument as it is."""

    __slots__ = ()


def frozen(value: Any) -> Any:
    """A constant as the compiled model keeps it: a NumPy array is copied, in this machine's byte order, so that
    nothing that happens to the caller's array, or to an output, changes the model. Anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    own = np.array(value, value.dtype.newbyteorder("="))
    own.setflags(write=False)
    return own


def argument(value: Any, place: str) -> str:
    """An expression for an argument of an operation: numbers, strings, slices and rows of such, in plain Python.

    NumPy's numbers (a ``float64`` is a Python float, too) are written as the numbers that they are.

    Args:
        value: the argument. place: what an error calls it.

    Raises:
        CompileError: the value is not one of these.
    """
    if value is None or value is Ellipsis or isinstance(value, bool):
        return repr(value)
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return repr(str(value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return argument(value.item(), place)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f"float({str(float(value))!r})"
    if isinstance(value, slice):
        return f"slice({', '.join(argument(v, place) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, tuple | list):
        row = ", ".join(argument(v, place) for v in value)
        if isinstance(value, list):
            return f"[{row}]"
        return f"({row},)" if len(value) == 1 else f"({row})"
    raise CompileError(
        f"{place}={value!r:.200} ({type(value).__name__}) cannot be saved: use numbers, strings, None, or "
        "tuples of such"
    )


def as_source(value: Any) -> str:
    """An expression for a constant, in which ``array`` is this module's function.

    Args:
        value: a Python number, or anything that :func:`numpy.asarray` makes an array of.
    """
    if isinstance(value, float | int) and not isinstance(value, np.generic):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    data = frozen(np.asarray(value))
    if 0 < data.size <= READABLE and data.dtype.kind in "fiub":
        numbers = data.tolist()
        if data.dtype.kind != "f" or bool(np.isfinite(data).all()):
            return f"array({numbers!r}, {data.dtype.name!r})"
    text = base64.b64encode(np.ascontiguousarray(data).tobytes()).decode("ascii")
    return f"array({text!r}, {data.dtype.name!r}, {data.shape!r})"


def _dtype(name: str) -> np.dtype[Any]:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def array(values: Any, dtype: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A NumPy array from what :func:`as_source` wrote.

    Args:
        values: nested lists of numbers, or base64 text of the bytes, which then needs the ``shape``.
        dtype: its name. shape: of the array.
    """
    if isinstance(values, str):
        assert shape is not None
        return np.frombuffer(base64.b64decode(values), _dtype(dtype)).reshape(shape)
    return np.array(values, _dtype(dtype))


def tensor(values: Any, dtype: str, shape: tuple[int, ...] | None = None) -> Any:
    """:func:`array` as a PyTorch tensor (bfloat16 by way of float32, which holds it exactly)."""
    import torch

    data = array(values, dtype, shape)
    if dtype == "bfloat16":
        return torch.from_numpy(data.astype("float32")).to(torch.bfloat16)
    return torch.from_numpy(data.copy())
