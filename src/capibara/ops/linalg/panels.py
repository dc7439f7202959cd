"""Matrices in the order in which CPUs' products of a few rows read them.

A product of eight rows is bound by arithmetic as much as by memory: sums have to stay in registers, so few columns are
summed at a time, and of a matrix ``[inner, columns]`` these lie far apart. In panels of 16 columns, ``[columns / 16,
inner, 16]``, they lie side by side, and the matrix is read from its beginning to its end (the packed operand of Goto and
van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). What has to be multiplied many times is put in
panels once.

In a program the matrix is made of its panels (:meth:`Panels.matrix`), and
:func:`capibara.ops.linalg.joined.joined` gives products that can read them the panels themselves.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from capibara.native.loading import open_library
from capibara.ops.one_device import compile_calls

__all__ = ["PANEL", "Panels", "columns_of", "fit_panels", "in_panels", "matrix_of_panels", "plain"]

PANEL = 16
"""Columns of a panel."""
_DTYPES = (jnp.float32, jnp.bfloat16)
_LINE = 64  # bytes: JAX takes arrays on CPUs as they are if they begin a line of the cache

matrix_of_panels = Primitive("capibara_matrix_of_panels")
compile_calls(matrix_of_panels)


@jax.tree_util.register_pytree_node_class
class Panels:
    """A weight whose matrix lies in panels.

    Args:
      panels: ``[columns / 16, inner, 16]``, float32 or bfloat16.
      shape: of the weight, whose first or last axes together are the columns or the inner ones.
    """

    def __init__(self, panels: Any, shape: Sequence[int]) -> None:
        self.panels, self.shape = panels, tuple(shape)

    @property
    def dtype(self) -> Any:
        return self.panels.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def matrix(self) -> jax.Array:
        """The weight itself: ``panels.transpose(1, 0, 2).reshape(shape)``."""
        return matrix_of_panels.bind(self.panels).reshape(self.shape)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, ...]]:
        return (self.panels,), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], children: Sequence[Any]) -> Panels:
        return cls(children[0], shape)


def columns_of(matrix: Any, *, transposed: bool = False) -> int:
    """Of a matrix, which may lie in panels."""
    if len(matrix.shape) == 3:
        return matrix.shape[0] * PANEL
    return matrix.shape[0 if transposed else 1]


def plain(matrix: jax.Array) -> jax.Array:
    """A matrix as ``[inner, columns]``, which may lie in panels."""
    return _by_xla(matrix) if matrix.ndim == 3 else matrix


def fit_panels(inner: int, columns: int, dtype: Any) -> bool:
    """Whether a matrix can lie in panels, where there are compiled kernels, which read them."""
    lines = inner * columns * jnp.dtype(dtype).itemsize % _LINE == 0  # each of several begins one
    return inner > 0 and columns > 0 and columns % PANEL == 0 and dtype in _DTYPES and lines


def in_panels(matrices: np.ndarray) -> np.ndarray:
    """Several matrices in panels, on all processors.

    Args:
      matrices: ``[count, inner, columns]`` that :func:`fit_panels`.

    Returns:
        ``[count, columns / 16, inner, 16]``: ``matrices.reshape(count, inner, -1, 16).swapaxes(1, 2)``, copied. It begins a
        line of the cache.
    """
    count, inner, columns = matrices.shape
    matrices = np.ascontiguousarray(matrices)
    pack, panels = _pack(), columns // PANEL
    memory = np.empty(matrices.nbytes + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    out = memory[begin : begin + matrices.nbytes].view(matrices.dtype).reshape(count, panels, inner, PANEL)
    narrow, size = matrices.dtype.itemsize == 2, matrices[0].nbytes
    workers = os.cpu_count() or 1
    share = -(-panels // max(1, -(-workers // count)))

    def part(place: tuple[int, int]) -> None:
        one, first = place
        pack(
            matrices.ctypes.data + one * size,
            inner,
            columns,
            narrow,
            first,
            min(first + share, panels),
            out.ctypes.data + one * size,
        )

    places = [(one, first) for one in range(count) for first in range(0, panels, share)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, places))
    return out


@cache
def _pack() -> Callable[..., None]:
    library, reason = open_library()
    if library is None:
        raise NotImplementedError(reason)
    pack = library.capibara_to_panels
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    pack.argtypes, pack.restype = (pointer, size, size, ctypes.c_int32, size, size, pointer), None
    return pack


def _by_xla(panels: jax.Array) -> jax.Array:
    count, inner, _ = panels.shape
    return jnp.swapaxes(panels, 0, 1).reshape(inner, count * PANEL)


@matrix_of_panels.def_abstract_eval
def _shape(panels: Any) -> Any:
    return panels.update(shape=(panels.shape[1], panels.shape[0] * PANEL))


def _map(arrays: Any, axes: Any) -> Any:
    return jax.vmap(_by_xla, axes)(*arrays), 0


mlir.register_lowering(matrix_of_panels, mlir.lower_fun(_by_xla, multiple_results=False))
batching.primitive_batchers[matrix_of_panels] = _map
