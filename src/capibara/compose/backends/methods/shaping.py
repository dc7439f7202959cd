"""Shapes: reshape, join, split, select, sort; and move arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from capibara.compose.backends.conversion import place_of
from capibara.compose.backends.methods.caller import MAX_ELEMENTS, Caller, as_shape, is_whole
from capibara.compose.dtypes import dtype_name
from capibara.compose.errors import InputError

__all__ = ["Shaping"]


class Shaping(Caller):
    """Operations that rearrange elements."""

    def reshape(self, input: Any, shape: int | Sequence[int]) -> Any:
        """The same elements in another shape; one size may be -1."""
        row = (shape,) if is_whole(shape) else shape
        return self._call("reshape", input, _sizes(row, -1))

    def flatten(self, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Merge dimensions ``start_dim`` to ``end_dim``."""
        return self._call("flatten", input, start_dim, end_dim)

    def transpose(self, input: Any, axes: Sequence[int] | None = None) -> Any:
        """Permute dimensions; without ``axes``, reverse them."""
        return self._call("transpose", input, None if axes is None else tuple(axes))

    def swapaxes(self, input: Any, first: int, second: int) -> Any:
        """Exchange two dimensions."""
        return self._call("swap_axes", input, first, second)

    def squeeze(self, input: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Remove dimensions of size 1 (or those in ``axis``)."""
        return self._call("squeeze", input, axis)

    def expand_dims(self, input: Any, axis: int | tuple[int, ...]) -> Any:
        """Add dimensions of size 1 at ``axis``."""
        return self._call("expand_dims", input, axis)

    def broadcast_to(self, input: Any, shape: Sequence[int]) -> Any:
        """Broadcast to ``shape``, along new and size-1 dimensions."""
        return self._call("broadcast_to", input, _sizes(shape, 0))

    def concat(self, inputs: Sequence[Any], axis: int | None = 0) -> Any:
        """Join arrays along one dimension (None: flatten them first)."""
        return self._call("concat", *_row("concat", inputs), axis=axis)

    def concatenate(self, inputs: Sequence[Any], axis: int | None = 0) -> Any:
        """:meth:`concat`."""
        return self.concat(inputs, axis)

    def cat(self, inputs: Sequence[Any], dim: int = 0) -> Any:
        """:meth:`concat`, by its PyTorch name."""
        return self.concat(inputs, dim)

    def stack(self, inputs: Sequence[Any], axis: int = 0) -> Any:
        """Join arrays of the same shape along a new dimension."""
        return self._call("stack", *_row("stack", inputs), axis=axis)

    def split(self, input: Any, split_size: int | Sequence[int], axis: int = 0) -> tuple[Any, ...]:
        """Split into ``split_size`` equal parts, or at the given indices.

        Raises:
            InputError: the size is not divisible into that many parts.
        """
        input = self._ranked("split", input)
        size = input.shape[place_of(axis, len(input.shape))]
        if isinstance(split_size, int):
            as_shape((split_size,), "split_size")
            if split_size < 1 or size % split_size:
                raise InputError(f"split: a size of {size} cannot be split into {split_size} equal parts")
            step = size // split_size
            edges = [i * step for i in range(split_size + 1)]
        else:
            edges = [0, *split_size, size]
        place = place_of(axis, len(input.shape))
        before = (("slice", None, None, None),) * place
        return tuple(
            self._call("indexer", input, (*before, ("slice", a, b, None))) for a, b in pairwise(edges)
        )

    def pad(self, input: Any, pad_width: Any, value: float = 0) -> Any:
        """``pad_width`` is one number for all sides, a pair for all dimensions, or a pair for each of them."""
        input = self._ranked("pad", input)
        rank = len(input.shape)
        if is_whole(pad_width):
            pairs: Any = ((pad_width, pad_width),) * rank
        elif not isinstance(pad_width, list | tuple):
            pairs = ()
        elif len(pad_width) == 2 and all(is_whole(w) for w in pad_width):
            pairs = (tuple(pad_width),) * rank
        else:
            pairs = tuple(tuple(pair) if isinstance(pair, list | tuple) else (-1, -1) for pair in pad_width)
        fits = len(pairs) == rank and all(
            len(pair) == 2 and all(is_whole(w) and 0 <= w <= MAX_ELEMENTS for w in pair) for pair in pairs
        )
        if not fits:
            raise InputError(
                f"pad_width={pad_width!r} must be one number, one pair, or a pair for each of {rank} dimensions"
            )
        return self._call("pad", input, pairs, value)

    def take(self, input: Any, indices: Any, axis: int = 0) -> Any:
        """Elements by index along one dimension; negative ones count from the end, others are clipped."""
        return self._call("take", input, _whole_numbers("take", indices), axis)

    def gather(self, input: Any, indices: Any, axis: int = 0) -> Any:
        """``indices`` has the rank of ``input``: its element i is taken at index i along ``axis``."""
        return self._call("take_along_axis", input, _whole_numbers("gather", indices), axis)

    def sort(self, input: Any, axis: int = -1, descending: bool = False) -> Any:
        """Sort along one dimension, ascending (or descending)."""
        return self._call("sort", input, axis, descending)

    def argsort(self, input: Any, axis: int = -1, descending: bool = False) -> Any:
        """The indices that sort an array, int32; stable."""
        return self._call("argsort", input, axis, descending)

    def topk(self, input: Any, k: int) -> Any:
        """The ``k`` largest along the last dimension, largest first."""
        input = self._ranked("topk", input)
        if not is_whole(k) or not 0 <= k <= (input.shape[-1] if len(input.shape) else 0):
            raise InputError(f"topk: k={k!r} must be from 0 to the last size of shape {tuple(input.shape)}")
        return self._call("top_k", input, k)

    def unique(self, input: Any, return_inverse: bool = False, return_counts: bool = False) -> Any:
        """The distinct values in ascending order; optionally their indices and counts.

        Its shape depends on the values, so it cannot be compiled; models use ``ml.Unique(size=…)``.
        """
        return self._call("unique_values", input, return_inverse, return_counts)

    def flip(self, input: Any, axis: int) -> Any:
        """Reverse along one dimension."""
        input = self._ranked("flip", input)
        return self._call("reverse", input, place_of(axis, len(input.shape)))

    def _ranked(self, name: str, input: Any) -> Any:
        """An argument that has a shape."""
        found = self._given(input)
        if not hasattr(found, "shape"):
            raise InputError(f"{name}: {input!r:.80} ({type(input).__name__}) is not an array: use array(…)")
        return found

    def atleast_1d(self, *inputs: Any) -> Any:
        """Scalars become arrays of one element. Several inputs give a list."""
        rows = [self._call("at_least_1d", x) for x in inputs]
        return rows[0] if len(rows) == 1 else rows

    def atleast_2d(self, *inputs: Any) -> Any:
        """Vectors become one row. Several inputs give a list."""
        rows = [self._call("at_least_1d", x) for x in inputs]
        rows = [x if len(x.shape) > 1 else self._call("expand_dims", x, 0) for x in rows]
        return rows[0] if len(rows) == 1 else rows

    def cast(self, value: Any, dtype: Any = None) -> Any:
        """An array in another dtype (by default the backend's float); of a Python number, rounded to that dtype.

        Tuples and lists are cast element by element; other values are returned unchanged.
        """
        if isinstance(value, tuple | list):
            return type(value)(self.cast(v, dtype) for v in value)
        if isinstance(value, bool) or (isinstance(value, int) and dtype is None):
            return value
        if isinstance(value, int | float):
            return self._make("full", (), value, dtype=self._float(dtype)).item()
        if not hasattr(value, "dtype"):
            return value
        return self._call("cast", value, self._float(None) if dtype is None else dtype_name(dtype))


def _row(name: str, inputs: Any) -> list[Any]:
    """The arrays of a list, or the rows of an array."""
    if isinstance(inputs, str | bytes | dict) or not hasattr(inputs, "__iter__"):
        raise InputError(f"{name}: {inputs!r:.80} is not a list of arrays")
    row = list(inputs)
    if not row:
        raise InputError(f"{name}: there must be at least one array")
    return row


def _sizes(shape: Any, low: int) -> tuple[int, ...]:
    """A shape whose sizes are at least ``low``."""
    row = tuple(shape) if isinstance(shape, list | tuple) or hasattr(shape, "__iter__") else (shape,)
    for size in row:
        if not is_whole(size) or not low <= size.__index__() <= MAX_ELEMENTS:
            raise InputError(f"shape={row!r:.200}: every size must be an integer of at least {low}")
    return tuple(size.__index__() for size in row)


def _whole_numbers(name: str, indices: Any) -> Any:
    dtype = str(getattr(indices, "dtype", ""))
    if "float" in dtype or "bool" in dtype or isinstance(indices, float):
        raise InputError(f"{name}: indices are {dtype or 'float'}, expected integers")
    return indices
