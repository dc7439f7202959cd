"""Rows written into a large array where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import alike, compile_calls, on_one_device

__all__ = ["takes_kernel", "write_rows"]


def write_rows(array: jax.Array, where: Sequence[jax.Array], new: jax.Array) -> jax.Array:
    """``array.at[where].set(new)``; rows whose indices are below 0 or past the end are not written.

    Under ``jit`` with a donated array this is in place, also where there is only one row.

    Args:
      array: ``[d0, d1, …]``.
      where: integer arrays of one shape ``s`` (or scalars), for the first dimensions of ``array``.
      new: ``[*s, …]``, converted to the dtype of ``array``.
    """
    where = jnp.broadcast_arrays(*(jnp.asarray(index, jnp.int32) for index in where))
    lead = where[0].shape
    index = jnp.stack([index.reshape(-1) for index in where], axis=-1)
    rows = jnp.broadcast_to(new, (*lead, *array.shape[len(where) :])).astype(array.dtype)
    return _written.bind(array, index, rows.reshape(len(index), *array.shape[len(where) :]))


def takes_kernel(array: Any) -> bool:
    """Whether rows of an array are written by a kernel on CPUs.

    Of a scatter of floats of 16 bits XLA makes one of float32, and so converts the whole array there and back. But it
    copies an array of another shape than the one that is given for a kernel that writes into it.
    """
    return array.dtype.itemsize == 2 and jnp.issubdtype(array.dtype, jnp.floating)


_written = Primitive("capibara_write_rows")
compile_calls(_written)


def _by_xla(array: jax.Array, where: jax.Array, rows: jax.Array) -> jax.Array:
    if where.shape[0] == 1:
        # XLA makes a scatter of one row, which may lie outside, a choice between the whole array before and after,
        # and copies it twice. One of the same row twice it leaves alone.
        where, rows = jnp.tile(where, (2, 1)), jnp.concatenate([rows, rows])
    # Negative indices would count from the end.
    outside = tuple(jnp.where(where[:, i] < 0, array.shape[i], where[:, i]) for i in range(where.shape[1]))
    return array.at[outside].set(rows, mode="drop")


def _on_cpu(array: jax.Array, where: jax.Array, rows: jax.Array) -> jax.Array:
    def by_kernel(*arrays: jax.Array) -> jax.Array:
        return alike(native.call_in_place("capibara_write_rows", *arrays), *arrays)

    if not takes_kernel(array) or native.problem() is not None:
        return _by_xla(array, where, rows)
    return on_one_device(by_kernel, _by_xla, array, where, rows)


@_written.def_abstract_eval
def _shape(array: Any, _where: Any, _rows: Any) -> Any:
    return array


mlir.register_lowering(_written, mlir.lower_fun(_by_xla, multiple_results=False))
mlir.register_lowering(_written, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")


def _tangent(primals: Any, tangents: Any) -> Any:
    array, where, rows = primals
    change, _, of_rows = (ad.instantiate_zeros(tangent) for tangent in tangents)
    # JAX's own rule knows which of several rows of one place was written, and can be transposed.
    return jax.jvp(lambda array, rows: _by_xla(array, where, rows), (array, rows), (change, of_rows))


def _map(arrays: Any, axes: Any) -> Any:
    return jax.vmap(_by_xla, tuple(axes))(*arrays), 0


ad.primitive_jvps[_written] = _tangent
batching.primitive_batchers[_written] = _map
register_foreign_call("capibara_write_rows", lambda ins, outs, _: 0)
