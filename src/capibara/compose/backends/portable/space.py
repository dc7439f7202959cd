"""Which array functions serve an array: PyTorch's or NumPy's."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends import numpy_space

__all__ = ["as_arrays", "space"]


def space(*values: Any) -> Any:
    """The array functions for the first of the values that is an array (NumPy's for plain numbers)."""
    for value in values:
        if type(value).__module__.startswith("torch"):
            from capibara.compose.backends import torch_space

            return torch_space
        if hasattr(value, "shape"):
            return numpy_space
    return numpy_space


def as_arrays(*values: Any) -> tuple[Any, ...]:
    """The array functions, and the values with plain numbers as arrays of the others' dtype (floats stay floats)."""
    xp = space(*values)
    like = next((v for v in values if hasattr(v, "shape")), None)
    if like is None:
        return (xp, *(xp.asarray(v) for v in values))
    out = []
    for value in values:
        if hasattr(value, "shape"):
            out.append(value)
        elif isinstance(value, float) or (xp.is_float(like) and not isinstance(value, bool)):
            out.append(xp.constant(value, like) if xp.is_float(like) else xp.asarray(value))
        else:
            out.append(xp.asarray(value) if isinstance(value, bool) else xp.constant(value, like))
    return (xp, *out)
