"""Products of many rows with one or several matrices, and their gradients, by compiled kernels.

Of a sum over many rows, which the gradient of a matrix is, XLA:CPU computes small blocks of the result, each of which
copies its operands anew; the kernel gives each thread one wide block. The gradient of rows that several matrices
multiply, as those of queries, keys and values do, is one sum.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.measure.flops import register_foreign_call
from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call_one_by_one, on_one_device

__all__ = ["product_transposed", "products", "takes_products"]

_LEAST_ROWS = 128  # with fewer, XLA's products are as fast

register_foreign_call(
    "capibara_products", lambda ins, outs, _: sum(2 * math.prod(ins[0]) * out[1] for out in outs)
)
register_foreign_call(
    "capibara_products_of_rows",
    lambda ins, outs, _: sum(2 * math.prod(slope) * outs[0][1] for slope in ins[: len(ins) // 2]),
)
register_foreign_call(
    "capibara_products_of_matrices",
    lambda ins, outs, _: sum(2 * ins[0][0] * math.prod(out) for out in outs),
)


def takes_products(x: jax.Array, matrices: tuple[jax.Array, ...], accumulate: str) -> bool:
    """Whether :func:`products` computes ``x [rows, inner] @ matrix [inner, columns]`` of each here.

    Or :func:`product_transposed`, of one matrix.
    """
    return accumulate == "float32" and wanted(x, *matrices) and x.shape[0] >= _LEAST_ROWS


@jax.custom_vjp
def products(x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
    """``x @ matrix`` for each, and for gradients ``sum(slope @ matrix.T)`` and ``x.T @ slope``.

    Args:
      x: float32 ``[rows, inner]``. matrices: float32 ``[inner, columns]``.

    Returns:
      float32 ``[rows, columns]`` of each.
    """

    return _each(x, *matrices)


@jax.custom_vjp
def product_transposed(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """``x @ matrix.T``, with float32 ``x [rows, inner]`` and ``matrix [columns, inner]``."""
    return _of_rows((x,), (matrix,))


def _each(x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
    def by_kernel(x: jax.Array, *matrices: jax.Array) -> Any:
        out = [_floats(x.shape[0], matrix.shape[1]) for matrix in matrices]
        return tuple(native_call_one_by_one("capibara_products", out, x, *matrices))

    def by_xla(x: jax.Array, *matrices: jax.Array) -> Any:
        return tuple(x @ matrix for matrix in matrices)

    return on_one_device(by_kernel, by_xla, x, *matrices)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _forward(x: jax.Array, *matrices: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
    return products(x, *matrices), (x, matrices)


def _backward(kept: Any, slopes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    x, matrices = kept
    # Two calls, so that XLA leaves out the gradients that nobody asks for.
    return _of_rows(slopes, matrices), *_of_matrices(x, slopes)


def _of_rows(slopes: tuple[jax.Array, ...], matrices: tuple[jax.Array, ...]) -> jax.Array:
    def by_kernel(*arrays: jax.Array) -> jax.Array:
        out = _floats(arrays[0].shape[0], arrays[-1].shape[0])
        return native_call_one_by_one("capibara_products_of_rows", [out], *arrays)[0]

    def by_xla(*arrays: jax.Array) -> jax.Array:
        half = len(arrays) // 2
        first, *others = (s @ w.T for s, w in zip(arrays[:half], arrays[half:], strict=True))
        return sum(others, start=first)

    return on_one_device(by_kernel, by_xla, *slopes, *matrices)


def _of_matrices(x: jax.Array, slopes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    def by_kernel(x: jax.Array, *slopes: jax.Array) -> Any:
        out = [_floats(x.shape[1], slope.shape[1]) for slope in slopes]
        return tuple(native_call_one_by_one("capibara_products_of_matrices", out, x, *slopes))

    def by_xla(x: jax.Array, *slopes: jax.Array) -> Any:
        return tuple(x.T @ slope for slope in slopes)

    return on_one_device(by_kernel, by_xla, x, *slopes)


def _forward_transposed(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    return product_transposed(x, matrix), (x, matrix)


def _backward_transposed(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix = kept
    return _each(slope, matrix)[0], _of_matrices(slope, (x,))[0]


products.defvjp(_forward, _backward)
product_transposed.defvjp(_forward_transposed, _backward_transposed)
