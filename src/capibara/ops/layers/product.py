"""A product of many rows with a matrix, and its two gradients, by the kernels for grouped products.

Of a sum over many rows, which the gradient of the matrix is, XLA:CPU computes small blocks of the result, each of which
copies its operands anew. The kernel gives each thread one wide block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call_one_by_one, on_one_device

__all__ = ["product", "takes_product"]

_LEAST_ROWS = 128  # with fewer, XLA's products are as fast


def takes_product(x: jax.Array, matrix: jax.Array, accumulate: str) -> bool:
    """Whether :func:`product` computes ``x [rows, inner] @ matrix [inner, columns]`` here."""
    return accumulate == "float32" and wanted(x, matrix) and x.shape[0] >= _LEAST_ROWS and matrix.size > 0


@jax.custom_vjp
def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """``x @ matrix``, and for gradients ``slope @ matrix.T`` and ``x.T @ slope``.

    Args:
      x: float32 ``[rows, inner]``. matrix: float32 ``[inner, columns]``.

    Returns:
      float32 ``[rows, columns]``.
    """
    return _rows(x, matrix, transposed=False)


def _rows(x: jax.Array, matrix: jax.Array, *, transposed: bool) -> jax.Array:
    columns = matrix.shape[0 if transposed else 1]

    def by_kernel(x: jax.Array, matrix: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
        rows = jnp.full(1, x.shape[0], jnp.int32)
        arrays = x, matrix[None], rows
        return native_call_one_by_one("capibara_grouped_product", [out], *arrays, transposed=int(transposed))[0]

    def by_xla(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return x @ (matrix.T if transposed else matrix)

    return on_one_device(by_kernel, by_xla, x, matrix)


def _columns(left: jax.Array, right: jax.Array) -> jax.Array:
    def by_kernel(left: jax.Array, right: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((1, left.shape[1], right.shape[1]), jnp.float32)
        rows = jnp.full(1, left.shape[0], jnp.int32)
        return native_call_one_by_one("capibara_grouped_outer", [out], left, right, rows)[0][0]

    return on_one_device(by_kernel, lambda left, right: left.T @ right, left, right)


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    return product(x, matrix), (x, matrix)


def _backward(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix = kept
    return _rows(slope, matrix, transposed=True), _columns(x, slope)


product.defvjp(_forward, _backward)
