"""How a method reaches its function: what each backend has to supply."""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import InputError

__all__ = ["Caller", "as_shape"]


def as_shape(shape: tuple[Any, ...], name: str = "shape") -> tuple[int, ...]:
    """``(3, 4)`` from the arguments ``3, 4``, or ``(3, 4)``, or ``[3, 4]``.

    Raises:
        InputError: a size is no whole number of at least 0.
    """
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size.__index__() < 0:
            raise InputError(f"{name}={tuple(sizes)!r}: every size must be a whole number of at least 0")
    return tuple(s.__index__() for s in sizes)


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
