"""Reductions over one dimension, several, or all (``axis=None``), and cumulative sums."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.methods.caller import Caller

Axis = int | tuple[int, ...] | None

__all__ = ["Reductions"]


class Reductions(Caller):
    """Sums, extremes, positions, products of matrices."""

    def sum(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Sum; for booleans, the number of true elements."""
        return self._call("total", input, axis, keepdims)

    def prod(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Product."""
        return self._call("prod", input, axis, keepdims)

    def max(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Maximum; equal values share its gradient."""
        return self._call("max", input, axis, keepdims)

    def min(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Minimum; equal values share its gradient."""
        return self._call("min", input, axis, keepdims)

    def all(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Whether all are true."""
        return self._call("all", input, axis, keepdims)

    def any(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Whether any is true."""
        return self._call("any", input, axis, keepdims)

    def mean(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Mean; integers and booleans give the backend's float."""
        return self._call("average", input, axis, keepdims, dtype=self._float(None))

    def var(self, input: Any, axis: Axis = None, correction: int = 0, keepdims: bool = False) -> Any:
        """Mean squared deviation from the mean; ``correction=1`` divides by n - 1."""
        return self._call("variance", input, axis, correction, keepdims)

    def std(self, input: Any, axis: Axis = None, correction: int = 0, keepdims: bool = False) -> Any:
        """Square root of :meth:`var`."""
        return self._call("sqrt", self.var(input, axis, correction, keepdims))

    def argmax(self, input: Any, axis: int | None = None, keepdims: bool = False) -> Any:
        """Index of the (first) maximum, int32; with ``axis=None`` in the flattened array."""
        return self._call("argmax", input, axis, keepdims)

    def argmin(self, input: Any, axis: int | None = None, keepdims: bool = False) -> Any:
        """Index of the (first) minimum, int32."""
        return self._call("argmin", input, axis, keepdims)

    def cumsum(self, input: Any, axis: int = -1) -> Any:
        """Sums of all elements up to each one."""
        return self._call("cumulative_sum", input, axis)

    def norm(self, input: Any, axis: Axis = None, keepdims: bool = False) -> Any:
        """Root of the sum of squares."""
        return self._call("sqrt", self.sum(self._call("square", input), axis, keepdims))

    def matmul(self, left: Any, right: Any) -> Any:
        """Matrix product, with leading dimensions broadcast."""
        return self._call("product", left, right)

    def dot(self, left: Any, right: Any) -> Any:
        """Product of vectors, or of matrices."""
        return self._call("product", left, right)

    def outer(self, left: Any, right: Any) -> Any:
        """``left[i] right[j]`` of two vectors."""
        return self._call("outer", left, right)
