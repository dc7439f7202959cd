"""Shapes: regrouping, joining, cutting, picking, sorting; and moving arrays about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from capibara.compose.backends.methods.caller import Caller
from capibara.compose.dtypes import dtype_name
from capibara.compose.errors import InputError

__all__ = ["Shaping"]


class Shaping(Caller):
    """Operations that change where elements stand."""

    def reshape(self, input: Any, shape: int | Sequence[int]) -> Any:
        """The same elements in another shape; one size may be -1."""
        row = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._call("reshape", input, row)

    def flatten(self, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Dimensions ``start_dim`` to ``end_dim`` made one."""
        return self._call("flatten", input, start_dim, end_dim)

    def transpose(self, input: Any, axes: Sequence[int] | None = None) -> Any:
        """Dimensions in another order; without ``axes`` in the opposite one."""
        return self._call("transpose", input, None if axes is None else tuple(axes))

    def swapaxes(self, input: Any, first: int, second: int) -> Any:
        """Two dimensions exchanged."""
        return self._call("swap_axes", input, first, second)

    def squeeze(self, input: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Without its dimensions of size 1 (or without those in ``axis``)."""
        return self._call("squeeze", input, axis)

    def expand_dims(self, input: Any, axis: int | tuple[int, ...]) -> Any:
        """With new dimensions of size 1 at ``axis``."""
        return self._call("expand_dims", input, axis)

    def broadcast_to(self, input: Any, shape: Sequence[int]) -> Any:
        """Repeated along new and size-1 dimensions up to ``shape``."""
        return self._call("broadcast_to", input, tuple(shape))

    def concat(self, inputs: Sequence[Any], axis: int | None = 0) -> Any:
        """Arrays joined along one dimension (None: all flattened)."""
        return self._call("concat", *inputs, axis=axis)

    def concatenate(self, inputs: Sequence[Any], axis: int | None = 0) -> Any:
        """:meth:`concat`."""
        return self.concat(inputs, axis)

    def cat(self, inputs: Sequence[Any], dim: int = 0) -> Any:
        """:meth:`concat`, in PyTorch's words."""
        return self.concat(inputs, dim)

    def stack(self, inputs: Sequence[Any], axis: int = 0) -> Any:
        """Arrays of one shape joined along a new dimension."""
        return self._call("stack", *inputs, axis=axis)

    def split(self, input: Any, split_size: int | Sequence[int], axis: int = 0) -> tuple[Any, ...]:
        """Cut into ``split_size`` equal parts, or at the indices given.

        Raises:
            InputError: the size cannot be cut into that many equal parts.
        """
        size = input.shape[axis]
        if isinstance(split_size, int):
            if split_size < 1 or size % split_size:
                raise InputError(f"split: a size of {size} cannot be cut into {split_size} equal parts")
            step = size // split_size
            edges = [i * step for i in range(split_size + 1)]
        else:
            edges = [0, *split_size, size]
        place = axis % len(input.shape)
        before = (("slice", None, None, None),) * place
        return tuple(
            self._call("indexer", input, (*before, ("slice", a, b, None))) for a, b in pairwise(edges)
        )

    def pad(self, input: Any, pad_width: Any, value: float = 0) -> Any:
        """``pad_width`` is one number for all sides, a pair for all dimensions, or a pair for each of them."""
        rank = len(input.shape)
        if isinstance(pad_width, int):
            pairs: Any = ((pad_width, pad_width),) * rank
        elif len(pad_width) == 2 and all(isinstance(w, int) for w in pad_width):
            pairs = (tuple(pad_width),) * rank
        else:
            pairs = tuple(tuple(pair) if isinstance(pair, list | tuple) else (-1, -1) for pair in pad_width)
        if len(pairs) != rank or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
            raise InputError(
                f"pad_width={pad_width!r} must be one number, one pair, or a pair for each of {rank} dimensions"
            )
        return self._call("pad", input, pairs, value)

    def take(self, input: Any, indices: Any, axis: int = 0) -> Any:
        """Elements by place along one dimension; negative indices count from the end, others outside are clipped."""
        return self._call("take", input, indices, axis)

    def gather(self, input: Any, indices: Any, axis: int = 0) -> Any:
        """``indices`` has the rank of ``input``: its element i is taken at index i along ``axis``."""
        return self._call("take_along_axis", input, indices, axis)

    def sort(self, input: Any, axis: int = -1, descending: bool = False) -> Any:
        """In rising (or falling) order along one dimension."""
        return self._call("sort", input, axis, descending)

    def argsort(self, input: Any, axis: int = -1, descending: bool = False) -> Any:
        """The places in which elements stand when sorted, int32; equal ones keep their order."""
        return self._call("argsort", input, axis, descending)

    def topk(self, input: Any, k: int) -> Any:
        """The ``k`` largest along the last dimension, largest first."""
        if not 0 <= k <= (input.shape[-1] if len(input.shape) else 0):
            raise InputError(f"topk: k={k!r} must be from 0 to the last size of shape {tuple(input.shape)}")
        return self._call("top_k", input, k)

    def unique(self, input: Any, return_inverse: bool = False, return_counts: bool = False) -> Any:
        """The different values in rising order; on request where each came from, and how often it occurs.

        Its shape depends on the values, so it cannot be compiled; models use ``ml.Unique(size=…)``.
        """
        return self._call("unique_values", input, return_inverse, return_counts)

    def flip(self, input: Any, axis: int) -> Any:
        """In opposite order along one dimension."""
        return self._call("reverse", input, axis % len(input.shape))

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

        Tuples and lists are cast element by element; what is neither number nor array comes back as it is.
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
