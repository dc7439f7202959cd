"""Where layers may take kernels that have derivatives in reverse mode only."""

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
"""Numbers of the array that a call passes over: with fewer, waking a second thread takes as long as is gained."""

# JAX traces a function anew where this differs: what it keeps of one traced for training is for training alone.
_wanted: Any = jax.make_user_context(False)


def training_kernels() -> AbstractContextManager[Any]:
    """Functions traced inside may take kernels for training, which have derivatives in reverse mode only.

    Second derivatives are those of plain JAX.
    """
    return _wanted(True)


def training() -> bool:
    """Whether what is traced now is traced inside of :func:`training_kernels`."""
    return _wanted.value


def wanted(*arrays: Any) -> bool:
    """Whether a call that passes over the first of these arrays may take a kernel."""
    return (
        training()
        and arrays[0].size >= LEAST
        and all(isinstance(x, Tracer) and x.dtype == jnp.float32 for x in arrays)
        and not _on_a_mesh(arrays)
        and not is_portable()
        and native.problem() is None
    )


def _on_a_mesh(arrays: tuple[Any, ...]) -> bool:
    """Whether types say where arrays lie, of one device, too: their gradients' types would have to, as well."""
    inside = jax.sharding.get_abstract_mesh().manual_axes  # of shard_map
    return bool(inside) or any(any(jax.typeof(x).sharding.spec) for x in arrays)
