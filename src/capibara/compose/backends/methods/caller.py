"""How a method reaches its function: what each backend has to supply."""

from __future__ import annotations

import math
from typing import Any

from capibara.compose.errors import InputError

__all__ = ["MAX_ELEMENTS", "Caller", "as_shape", "is_number", "is_whole"]

MAX_ELEMENTS = 1 << 48
"""More than the memory of any machine that these arrays can be made on."""


def as_shape(shape: tuple[Any, ...], name: str = "shape") -> tuple[int, ...]:
    """``(3, 4)`` from the arguments ``3, 4``, or ``(3, 4)``, or ``[3, 4]``.

    Raises:
        InputError: a size is not an integer of at least 0.
    """
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    for size in sizes:
        if not is_whole(size) or size.__index__() < 0:
            raise InputError(f"{name}={tuple(sizes)!r:.200}: every size must be an integer of at least 0")
    row = tuple(s.__index__() for s in sizes)
    # Some libraries end the process where the number of elements overflows.
    if math.prod(n or 1 for n in row) > MAX_ELEMENTS:
        raise InputError(f"{name}={row!r:.200}: an array has at most 2**48 elements")
    return row


def is_whole(value: Any) -> bool:
    """Whether a value is an integer: Python's, NumPy's, or an array of one; no bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        value.__index__()
    except TypeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Whether a value is one real number (a bool is, a string or a complex number is not)."""
    if isinstance(value, int | float):
        return True
    return (
        hasattr(value, "dtype") and getattr(value, "shape", None) == () and "complex" not in str(value.dtype)
    )


class Caller:
    """Supplied by the backend: see :class:`capibara.compose.backends.base.Backend`."""

    def _call(self, function: str, *args: Any, **options: Any) -> Any:
        """Call the backend's function of that name under the backend's settings."""
        raise NotImplementedError

    def _make(self, function: str, *args: Any, **options: Any) -> Any:
        """The same for a function that makes an array; ``device_mesh`` and ``tensor_split`` say where."""
        raise NotImplementedError

    def _float(self, dtype: Any) -> str:
        """The name of a dtype; by default the backend's float."""
        raise NotImplementedError

    def _given(self, value: Any) -> Any:
        """An argument of a method as an array of this backend; what is not an array stays as it is."""
        raise NotImplementedError
