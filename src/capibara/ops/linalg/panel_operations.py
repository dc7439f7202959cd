"""What traced functions do with matrices in panels (:mod:`capibara.ops.linalg.panels`): unpack them, look rows up.

They are primitives, so that :func:`capibara.ops.linalg.joined.joined` finds them and passes the panels themselves to
kernels; where none takes them, they are lowered to XLA's own operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from capibara.native.placing import PANEL
from capibara.ops.one_device import compile_calls

__all__ = ["columns_of", "matrix_of_panels", "plain", "rows_of_table", "table_rows"]

matrix_of_panels = Primitive("capibara_matrix_of_panels")
rows_of_table = Primitive("capibara_rows_of_table")
compile_calls(matrix_of_panels)
compile_calls(rows_of_table)


def columns_of(matrix: Any, *, transposed: bool = False) -> int:
    """The number of columns of a matrix. ``transposed`` applies to unpacked matrices only."""
    if len(matrix.shape) == 3:
        return matrix.shape[0] * PANEL
    return matrix.shape[0 if transposed else 1]


def plain(panels: jax.Array, *, transposed: bool = False) -> jax.Array:
    """The unpacked matrix ``[inner, columns]``, or its transpose."""
    count, inner, _ = panels.shape
    if transposed:
        return jnp.swapaxes(panels, 1, 2).reshape(count * PANEL, inner)
    return jnp.swapaxes(panels, 0, 1).reshape(inner, count * PANEL)


def table_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """``jnp.take(table, indices, axis=0, mode="clip")`` without a derivative; the table may be packed."""
    return rows_of_table.bind(indices, table, dtype=table.dtype)


@matrix_of_panels.def_abstract_eval
def _shape(panels: Any, *, transposed: bool) -> Any:
    sides = panels.shape[1], panels.shape[0] * PANEL
    return panels.update(shape=sides[::-1] if transposed else sides)


@rows_of_table.def_abstract_eval
def _rows_shape(indices: Any, table: Any, *, dtype: Any) -> Any:
    inner = table.shape[1]
    return indices.update(shape=(*indices.shape, inner), dtype=dtype)


def _look_up(indices: jax.Array, table: jax.Array, *, dtype: Any) -> jax.Array:
    if table.ndim == 2:
        return jnp.take(table, indices, axis=0, mode="clip").astype(dtype)
    wide = (
        indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    )  # the last row may be past the narrow
    places = jnp.clip(wide, 0, table.shape[0] * PANEL - 1)
    rows = table.at[places // PANEL, :, places % PANEL]
    return rows.get(mode="promise_in_bounds").astype(dtype)


def _mapped(function: Callable[..., jax.Array], arrays: Any, axes: Any, **params: Any) -> Any:
    return jax.vmap(partial(function, **params), tuple(axes))(*arrays), 0


for _primitive, _function in ((matrix_of_panels, plain), (rows_of_table, _look_up)):
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=False))
    batching.primitive_batchers[_primitive] = partial(_mapped, _function)
