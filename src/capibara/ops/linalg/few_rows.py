"""Products of a few rows with a large matrix on CPUs, as decoding a few texts needs them.

What takes the time is reading the matrix. XLA first copies it into the order in which its product of matrices reads;
a compiled kernel (:mod:`capibara.native`) reads it once, where it lies. Where programs are made for such products, the
layers of a model ask here (:func:`few_rows`); elsewhere they are left to XLA.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import native_call, on_one_device

__all__ = ["few_rows", "product", "takes"]

_MOST_ROWS = 16
_LEAST_MATRIX = 1 << 16  # numbers; what the caches hold XLA multiplies as fast
_wanted = contextvars.ContextVar("few_rows", default=False)

register_foreign_call("capibara_thin_product", lambda ins, outs, _: 2 * math.prod(ins[0]) * outs[0][1])


@contextlib.contextmanager
def few_rows() -> Iterator[None]:
    """Functions traced inside may take the kernel for products of few rows. It has no derivative."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def takes(x: jax.Array, weight: jax.Array, accumulate: str) -> bool:
    """Whether :func:`product` computes ``x [rows, inner]`` times this matrix; of one row XLA's own is as fast."""
    return (
        _wanted.get()
        and 2 <= x.shape[0] <= _MOST_ROWS
        and math.prod(weight.shape) >= _LEAST_MATRIX
        and x.dtype == weight.dtype == jnp.dtype(accumulate) == jnp.float32
        and native.problem() is None
    )


def product(x: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """``x @ weight``, or ``x @ weight.T``.

    Args:
      x: float32 ``[rows, inner]``. weight: float32 ``[inner, columns]``; transposed ``[columns, inner]``.

    Returns:
      float32 ``[rows, columns]``. A row's numbers do not depend on how many rows there are, between 2 and 16.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0 if transposed else 1]), jnp.float32)

    def by_kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        return native_call("capibara_thin_product", (out,), x, weight, transposed=int(transposed))[0]

    def by_xla(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, (((1,), (1 if transposed else 0,)), ((), ())))

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        return on_one_device(by_kernel, by_xla, x, weight)

    return lax.platform_dependent(x, weight, cpu=on_cpu, default=by_xla)
