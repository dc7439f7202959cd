"""Pooling of arrays with any number of leading dimensions, by functions of arrays with one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from capibara.compose.backends.tape import Traced

__all__ = ["any_batch"]


def any_batch(pool: Callable[..., Any]) -> Callable[..., Any]:
    """``pool(x [n, c, *s], kernel, …)`` for ``x [*n, c, *s]``, without a batch too."""

    @wraps(pool)
    def run(x: Any, kernel: tuple[int, ...], *more: Any, **options: Any) -> Any:
        inner = len(kernel) + 1
        if x.ndim == inner + 1:
            return pool(x, kernel, *more, **options)
        out = pool(_shaped(x, (-1, *x.shape[-inner:])), kernel, *more, **options)
        return _shaped(out, (*x.shape[:-inner], *out.shape[1:]))

    return run


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, Traced):  # of NumPy, on its way to a gradient
        from capibara.compose.backends import numpy_space

        return numpy_space.reshape(x, shape)
    return x.reshape(shape)
