"""Products of a few rows with a large matrix on CPUs, as decoding a few texts and reading a prompt need them.

What takes the time is reading the matrix. XLA first copies it into the order in which its product of matrices reads,
and of one row reads it in short pieces; a compiled kernel (:mod:`capibara.native`) reads it once, where it lies. Where
programs are made for such products, the layers of a model ask here (:func:`few_rows`); elsewhere they are left to XLA.
Of more rows than decoding has (:data:`~capibara.ops.linalg.sizes.MOST_ROWS`), parts of the matrix are copied, and
what comes next is fetched. Packed matrices (:mod:`capibara.ops.linalg.panels`) are not copied.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.linalg.joined import joinable, read_as_stored
from capibara.ops.linalg.panel_operations import columns_of, plain, rows_of_table, table_rows
from capibara.ops.linalg.sizes import LEAST_MATRIX, MOST_ROWS
from capibara.ops.one_device import compile_calls, native_call, on_one_device

__all__ = ["few_rows", "lookup", "product", "takes", "thin_product"]

_MOST_PROMPT = 192  # with more rows, XLA's products are as fast
_most = contextvars.ContextVar("few_rows", default=0)
thin_product = Primitive("capibara_thin_product")
thin_product.multiple_results = True


def _flops(ins: Sequence[Any], outs: Sequence[Any], _: Any) -> int:
    return sum(2 * math.prod(ins[0]) * out[1] for out in outs)


# By this name there are both: the primitive and what it calls.
register_foreign_call("capibara_thin_product", _flops)
compile_calls(thin_product)


@contextlib.contextmanager
def few_rows(*, panels: bool = False) -> Iterator[None]:
    """Functions traced inside may take the kernel for products of few rows. It has no derivative.

    Args:
      panels: take the kernel for any number of rows, as XLA would have to unpack matrices that are in panels.
    """
    token = _most.set(sys.maxsize if panels else _MOST_PROMPT)
    try:
        yield
    finally:
        _most.reset(token)


def takes(x: jax.Array, weight: jax.Array, accumulate: str, *, transposed: bool = False) -> bool:
    """Whether :func:`product` computes ``x [rows, inner]`` times this matrix."""
    return (
        1 <= x.shape[0] <= (min(_most.get(), MOST_ROWS) if transposed and not _panels() else _most.get())
        and math.prod(weight.shape) >= LEAST_MATRIX
        and x.dtype == jnp.dtype(accumulate) == jnp.float32
        and weight.dtype in (jnp.float32, jnp.bfloat16)
        and native.problem() is None
    )


def _panels() -> bool:
    return _most.get() == sys.maxsize


def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """``jnp.take(table, indices, axis=0, mode="clip")``; reads packed tables inside ``few_rows(panels=True)``."""
    return table_rows(table, indices) if _panels() else jnp.take(table, indices, axis=0, mode="clip")


def product(x: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """``x @ weight``, or ``x @ weight.T``.

    Args:
      x: float32 ``[rows, inner]``.
      weight: float32 or bfloat16 ``[inner, columns]``; transposed ``[columns, inner]``; or in panels.

    Returns:
      float32 ``[rows, columns]``. A row's numbers do not depend on the other rows, nor on how many there are between 2
      and 16, with a matrix in panels between 1 and 16, nor on the matrices that
      :func:`capibara.ops.linalg.joined.joined` multiplies with it.
    """
    return thin_product.bind(x, weight, transposed=transposed)[0]


def _by_xla(x: jax.Array, *weights: jax.Array, transposed: bool) -> list[jax.Array]:
    return [_one_by_xla(x, weight, transposed) for weight in weights]


def _one_by_xla(x: jax.Array, weight: jax.Array, transposed: bool) -> jax.Array:
    if weight.ndim == 3:
        weight, transposed = plain(weight), False
    return lax.dot_general(x, weight.astype(x.dtype), (((1,), (1 if transposed else 0,)), ((), ())))


def _on_cpu(x: jax.Array, *weights: jax.Array, transposed: bool) -> list[jax.Array]:
    out = [
        jax.ShapeDtypeStruct((x.shape[0], columns_of(weight, transposed=transposed)), jnp.float32)
        for weight in weights
    ]

    def by_kernel(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        if x.shape[0] <= MOST_ROWS:
            return list(native_call("capibara_thin_product", out, x, *weights, transposed=int(transposed)))
        if not transposed or all(weight.ndim == 3 for weight in weights):
            return list(native_call("capibara_products", out, x, *weights))
        return _by_xla(x, *weights, transposed=True)

    return on_one_device(by_kernel, functools.partial(_by_xla, transposed=transposed), x, *weights)


@thin_product.def_abstract_eval
def _shapes(x: Any, *weights: Any, transposed: bool) -> list[Any]:
    return [x.update(shape=(x.shape[0], columns_of(weight, transposed=transposed))) for weight in weights]


mlir.register_lowering(thin_product, mlir.lower_fun(_by_xla, multiple_results=True))
mlir.register_lowering(thin_product, mlir.lower_fun(_on_cpu, multiple_results=True), platform="cpu")


def _map(arrays: Any, axes: Any, *, transposed: bool) -> Any:
    out = jax.vmap(functools.partial(_by_xla, transposed=transposed), tuple(axes))(*arrays)
    return out, [0] * len(out)


batching.primitive_batchers[thin_product] = _map


read_as_stored(thin_product, lambda params: params["transposed"])
read_as_stored(rows_of_table, lambda _: True)


@joinable(thin_product)
def _together(x: Any, others: list[list[Any]], params: list[dict[str, Any]]) -> list[list[Any]] | None:
    if any(one != params[0] for one in params):
        return None
    return [[out] for out in thin_product.bind(x, *(weight for (weight,) in others), **params[0])]
