"""One repetition's array inside the array of all of them, written to where it stands.

A repeated block keeps its state as one array ``[count, …]``. If every repetition is given its part of it and gives a
new part back, the compiler takes the array apart and puts it together again, and copies all of it for every token
that is decoded. A :class:`Row` is the whole array and the number of a repetition instead: what writes a few numbers
to it (:func:`write`) writes them into the whole array, which the compiler does in place.

:class:`Layers` is the other way round, for what is only read: the arrays of all repetitions, each on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Layers", "Row", "read", "replace", "write", "write_places"]


@jax.tree_util.register_pytree_node_class
class Row:
    """``stack[index]``, which can be written to without taking it out.

    Args:
        stack: ``[count, …]``.
        index: an integer, or ``int32 []``; from 0 on.
    """

    def __init__(self, stack: jax.Array, index: jax.Array | int) -> None:
        self.stack, self.index = stack, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the row."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.stack, self.index), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Row:
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Layers:
    """A parameter of a repeated block as one array for each repetition, in place of ``[count, …]``.

    The repetitions are then unrolled, and nothing is cut out of a stack. On CPU XLA copies what it cuts out, which
    takes longer than the product of a few tokens with it.

    Args:
        arrays: of one shape and dtype; or what stands for them, such as quantized weights.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = tuple(arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stack."""
        return len(self.arrays), *self.arrays[0].shape

    @property
    def dtype(self) -> Any:
        return self.arrays[0].dtype

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Layers:
        return cls(children)


def read(array: jax.Array | Row) -> jax.Array:
    """The array itself: ``stack[index]`` of a row."""
    if not isinstance(array, Row):
        return array
    if isinstance(array.index, int):
        return lax.index_in_dim(array.stack, array.index, keepdims=False)
    return lax.dynamic_index_in_dim(array.stack, array.index, keepdims=False)


def write(array: jax.Array | Row, new: jax.Array, start: Sequence[Any]) -> Any:
    """``lax.dynamic_update_slice(array, new, start)``, in the array's dtype; a row stays one."""
    new = new.astype(array.dtype)
    if not isinstance(array, Row):
        return lax.dynamic_update_slice(array, new, start)
    # As the other indices are: a Python number would be int64 while 64-bit numbers are on.
    index = jnp.asarray(array.index, jnp.int32)
    return Row(lax.dynamic_update_slice(array.stack, new[None], (index, *start)), array.index)


def write_places(array: jax.Array | Row, new: jax.Array, places: jax.Array) -> Any:
    """A cache ``[batch, heads, cache, dim]`` with ``new [batch, heads, n, dim]`` at ``places int [batch, n]``.

    What has a place below 0, or after the last one, is not written. A row stays one.
    """
    new = jnp.swapaxes(new, 1, 2).astype(array.dtype)  # as `at` puts the dimensions that are indexed first
    # Negative indices would count from the end.
    places = jnp.where(places < 0, array.shape[2], places)
    rows = jnp.arange(places.shape[0], dtype=places.dtype)[:, None]
    if not isinstance(array, Row):
        return array.at[rows, :, places].set(new, mode="drop")
    index = jnp.asarray(array.index, places.dtype)
    return Row(array.stack.at[index, rows, :, places].set(new, mode="drop"), array.index)


def replace(row: Row, new: jax.Array) -> jax.Array:
    """The whole array with all of the row replaced: ``stack.at[index].set(new)``."""
    zero = jnp.zeros((), jnp.int32)
    return write(row, new, (zero,) * new.ndim).stack
