"""Where layers may take kernels that have a first reverse derivative, and no other."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from capibara import native
from capibara.ops.registry import is_portable

__all__ = ["LEAST", "training", "training_kernels", "wanted"]

LEAST = 1 << 16
"""Numbers of the largest array of a call: with fewer, waking a second thread takes as long as is gained."""

_wanted = contextvars.ContextVar("training_kernels", default=False)


@contextlib.contextmanager
def training_kernels() -> Iterator[None]:
    """Functions traced inside may take kernels for training; they can be differentiated once, in reverse mode.

    Functions that were traced before, and are kept by ``jax.jit``, stay as they are.
    """
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def training() -> bool:
    """Whether what is traced now is traced inside of :func:`training_kernels`."""
    return _wanted.get()


def wanted(*arrays: Any) -> bool:
    """Whether a call with these arrays, the largest one first, may take a kernel."""
    return (
        training()
        and arrays[0].size >= LEAST
        and all(isinstance(x, Tracer) and x.dtype == jnp.float32 for x in arrays)
        and not is_portable()
        and native.problem() is None
    )
