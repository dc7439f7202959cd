"""Checks that the operations of linear algebra share."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import automatic, explicit_sharding

__all__ = ["FLOATS", "WIDE", "check_bool", "check_count", "check_matrix", "on_any_mesh"]

FLOATS = ("float32", "float64", "bfloat16", "float16")
WIDE = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}


def check_matrix(op: str, name: str, array: Any, dtypes: tuple[str, ...] = FLOATS, rank: int = 2) -> str:
    """The dtype JAX gives ``array``, which has one of ``dtypes`` and at least ``rank`` axes; else raise."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
    if str(array.dtype) not in dtypes:
        remedy = f"{name}.astype({dtypes[0]!r})"
        if str(array.dtype).startswith("complex"):  # astype would drop the imaginary part
            remedy = "jax.numpy.matmul or jax.numpy.linalg, which take complex numbers"
        wanted = " or ".join(part for part in (", ".join(dtypes[:-1]), dtypes[-1]) if part)
        raise OpTypeError(f"{op}: {name} must be {wanted}, got {array.dtype}. Remedy: {remedy}.")
    if len(array.shape) < rank:
        axes = "[..., rows, columns]" if rank == 2 else "[..., size]"
        raise OpShapeError(f"{op}: {name} must be {axes}, got shape {tuple(array.shape)}")
    # NumPy's float64 is float32 in JAX, unless 64 bits are enabled.
    return str(jax.dtypes.canonicalize_dtype(array.dtype))


def check_bool(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise OpTypeError(f"{op}: {name} must be True or False, got {value!r}")
    return bool(value)


def check_count(op: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OpTypeError(f"{op}: {name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise OpValueError(f"{op}: {name} must be at least {least}, got {value}")
    return int(value)


def on_any_mesh(function: Callable[..., Any], arrays: tuple[Any, ...], kept: int) -> Any:
    """``function(*arrays)``; on explicit meshes, results are sharded like the first array in ``kept`` axes."""
    if explicit_sharding(*arrays) is None:
        return function(*arrays)
    return automatic(function, arrays, kept)
