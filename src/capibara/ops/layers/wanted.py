"""Where layers may take kernels that have a first reverse derivative, and no other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from capibara import native
from capibara.ops.registry import is_portable

__all__ = ["LEAST", "training", "training_kernels", "wanted"]

LEAST = 1 << 16
"""Numbers of the largest array of a call: with fewer, waking a second thread takes as long as is gained."""

# JAX traces a function anew where this differs: what it keeps of one traced for training is for training alone.
_wanted: Any = jax.make_user_context(False)


def training_kernels() -> AbstractContextManager[Any]:
    """Functions traced inside may take kernels for training; they can be differentiated once, in reverse mode."""
    return _wanted(True)


def training() -> bool:
    """Whether what is traced now is traced inside of :func:`training_kernels`."""
    return _wanted.value


def wanted(*arrays: Any) -> bool:
    """Whether a call with these arrays, the largest one first, may take a kernel."""
    return (
        training()
        and arrays[0].size >= LEAST
        and all(isinstance(x, Tracer) and x.dtype == jnp.float32 for x in arrays)
        and not is_portable()
        and native.problem() is None
    )
