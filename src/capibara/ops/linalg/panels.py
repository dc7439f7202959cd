"""Weight matrices packed for products of a few rows on CPUs.

A product of eight rows is limited by arithmetic as much as by memory, so its sums must stay in registers. That allows
only a few columns at a time, which are far apart in a matrix ``[inner, columns]``. Packed into panels of 16 columns,
``[columns / 16, inner, 16]``, they are adjacent, and the matrix is read sequentially (Goto and van de Geijn, "Anatomy
of High-Performance Matrix Multiplication", 2008). A weight is packed once and multiplied many times.

A traced function unpacks the matrix (:meth:`Panels.matrix`). :func:`capibara.ops.linalg.joined.joined` then passes the
panels themselves to the operations that can read them: products, and row lookups in a tied embedding table.
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

from capibara.native.loading import open_library
from capibara.native.placing import PANEL
from capibara.native.rooms import room

__all__ = ["PANEL", "Panels", "fit_panels", "in_panels"]

_DTYPES = (jnp.float32, jnp.bfloat16)
_LINE = 64  # bytes: JAX takes arrays on CPUs as they are if they begin a line of the cache


@jax.tree_util.register_pytree_node_class
class Panels:
    """A weight that is packed into panels.

    Args:
      panels: ``[columns / 16, inner, 16]``, float32 or bfloat16.
      shape: of the unpacked weight. Its first axes form ``inner``, its last axes ``columns``.
      transposed: whether the weight is ``[columns, inner]``, as a tied embedding table is.
    """

    def __init__(self, panels: Any, shape: Sequence[int], transposed: bool = False) -> None:
        self.panels, self.shape, self.transposed = panels, tuple(shape), transposed

    @property
    def dtype(self) -> Any:
        return self.panels.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def matrix(self) -> jax.Array:
        """The unpacked weight: ``panels.swapaxes(0, 1).reshape(shape)``, or ``panels.swapaxes(1, 2).reshape(shape)`` if
        transposed."""
        from capibara.ops.linalg.panel_operations import matrix_of_panels

        return matrix_of_panels.bind(self.panels, transposed=self.transposed).reshape(self.shape)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[tuple[int, ...], bool]]:
        return (self.panels,), (self.shape, self.transposed)

    @classmethod
    def tree_unflatten(cls, kept: tuple[tuple[int, ...], bool], children: Sequence[Any]) -> Panels:
        return cls(children[0], *kept)


def fit_panels(inner: int, columns: int, dtype: Any) -> bool:
    """Whether a matrix can be packed: whole panels, float32 or bfloat16, a multiple of 64 bytes."""
    lines = inner * columns * jnp.dtype(dtype).itemsize % _LINE == 0  # so that each of several is aligned
    return inner > 0 and columns > 0 and columns % PANEL == 0 and dtype in _DTYPES and lines


def in_panels(matrices: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    """Pack several matrices into panels, using all processors.

    Args:
      matrices: ``[count, inner, columns]``, or ``[count, columns, inner]`` if transposed, for which
        :func:`fit_panels` is true.

    Returns:
        ``[count, columns / 16, inner, 16]``, a copy aligned to 64 bytes. Equivalent to
        ``matrices.reshape(count, inner, -1, 16).swapaxes(1, 2)``, or
        ``matrices.reshape(count, -1, 16, inner).swapaxes(2, 3)`` if transposed.

    Raises:
      NotImplementedError: the native library is missing; the message gives the reason.
    """
    matrices = np.ascontiguousarray(matrices)
    count, *sides = matrices.shape
    inner, columns = reversed(sides) if transposed else sides
    pack, panels = _packing(transposed), columns // PANEL
    out = room((count, panels, inner, PANEL), matrices.dtype)
    narrow, size = matrices.dtype.itemsize == 2, matrices[0].nbytes
    shape = (inner,) if transposed else (inner, columns)
    workers = os.cpu_count() or 1
    share = -(-panels // max(1, -(-workers // count)))

    def part(place: tuple[int, int]) -> None:
        one, first = place
        given, to = (array.ctypes.data + one * size for array in (matrices, out))
        pack(given, *shape, narrow, first, min(first + share, panels), to)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, ((one, first) for one in range(count) for first in range(0, panels, share))))
    return out


@cache
def _packing(transposed: bool) -> Callable[..., None]:
    library, reason = open_library()
    if library is None:
        raise NotImplementedError(reason)
    pack = library.capibara_turned_to_panels if transposed else library.capibara_to_panels
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    shape = (size,) if transposed else (size, size)
    pack.argtypes, pack.restype = (pointer, *shape, ctypes.c_int32, size, size, pointer), None
    return pack
