"""Arrays of zeros that take memory where they are written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call

__all__ = ["zeros_on_demand"]

_TARGET = "capibara_zeros"
register_foreign_call(_TARGET, lambda _ins, _outs, _attributes: 0)


def zeros_on_demand(described: Any) -> Any:
    """Zeros of such shapes and dtypes, for programs of one CPU device, which own them and may be given them to donate.

    On Linux the system gives a page of memory to what is written first, so that the arrays of a large cache cost
    neither time nor memory before they are used. Without native kernels: ``jnp.zeros``.

    Args:
      described: nested arrays or ``jax.ShapeDtypeStruct``.
    """
    leaves, tree = jax.tree.flatten(described)
    if not leaves or native.problem() is not None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), described)
    # One call: XLA would make one of several that are alike, and copy what it gives.
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return tree.unflatten(native.call(_TARGET, out))
