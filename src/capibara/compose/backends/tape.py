"""Reverse-mode differentiation of NumPy code, one array operation at a time.

A :class:`Traced` is an array that remembers how it was made: for each array it came from a function that takes the
cotangent of the result to the cotangent of that array. :func:`pull` runs through them backwards (Linnainmaa, 1976).
The rules themselves are in :mod:`capibara.compose.backends.numpy_space`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

__all__ = ["Traced", "pull", "record", "trace", "value_of"]

_numbers = count()
Rule = tuple[Any, Callable[[np.ndarray], np.ndarray]]


class Traced:
    """An array and where it came from. Operators and the functions of ``numpy_space`` take it as an array."""

    __array_priority__ = 1000
    __array_ufunc__ = None
    __slots__ = ("number", "sources", "value")

    def __init__(self, value: Any, sources: Sequence[tuple[Traced, Any]] = ()) -> None:
        self.value = value
        self.sources = sources
        self.number = next(_numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def size(self) -> int:
        return self.value.size

    @property
    def T(self) -> Any:
        return _space().transpose(self, None)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> Any:
        return _space().getitem(self, index)

    def __add__(self, other: Any) -> Any:
        return _space().add(self, other)

    def __radd__(self, other: Any) -> Any:
        return _space().add(other, self)

    def __sub__(self, other: Any) -> Any:
        return _space().subtract(self, other)

    def __rsub__(self, other: Any) -> Any:
        return _space().subtract(other, self)

    def __mul__(self, other: Any) -> Any:
        return _space().multiply(self, other)

    def __rmul__(self, other: Any) -> Any:
        return _space().multiply(other, self)

    def __truediv__(self, other: Any) -> Any:
        return _space().divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _space().divide(other, self)

    def __matmul__(self, other: Any) -> Any:
        return _space().matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _space().matmul(other, self)

    def __pow__(self, other: Any) -> Any:
        return _space().power(self, other)

    def __neg__(self) -> Any:
        return _space().negative(self)

    def __eq__(self, other: Any) -> Any:
        return self.value == value_of(other)

    def __ne__(self, other: Any) -> Any:
        return self.value != value_of(other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Any:
        return self.value < value_of(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= value_of(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > value_of(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= value_of(other)

    def __repr__(self) -> str:
        return f"Traced({self.value!r})"


def _space() -> Any:
    from capibara.compose.backends import numpy_space

    return numpy_space


def value_of(x: Any) -> Any:
    """The array itself."""
    return x.value if isinstance(x, Traced) else x


def trace(x: Any) -> Any:
    """A float array to differentiate by; anything else as it is."""
    if isinstance(x, np.ndarray | np.floating) and np.issubdtype(x.dtype, np.floating):
        return Traced(np.asarray(x))
    return x


def record(value: Any, *rules: Rule) -> Any:
    """The result of an operation: traced if something that it was made from is."""
    sources = [(source, rule) for source, rule in rules if isinstance(source, Traced)]
    # asarray: NumPy gives scalars of its own for arrays without dimensions.
    return Traced(np.asarray(value), sources) if sources else np.asarray(value)


def pull(outputs: Sequence[Any], cotangents: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The cotangents of ``inputs``: None for those that no output depends on (or that are not traced)."""
    pending: dict[int, Any] = {}
    nodes: dict[int, Traced] = {}

    def give(node: Traced, cotangent: Any) -> None:
        before = pending.get(node.number)
        pending[node.number] = cotangent if before is None else before + cotangent
        nodes[node.number] = node

    for output, cotangent in zip(outputs, cotangents, strict=True):
        if isinstance(output, Traced) and cotangent is not None:
            give(output, np.asarray(cotangent))
    wanted = {x.number for x in inputs if isinstance(x, Traced)}
    found: dict[int, Any] = {}
    # Numbers rise as arrays are made, so the largest one left has all that depends on it behind it.
    import heapq

    heap = [-n for n in nodes]
    heapq.heapify(heap)
    while heap:
        number = -heapq.heappop(heap)
        if number not in nodes:
            continue
        node, cotangent = nodes.pop(number), pending.pop(number)
        if number in wanted:
            found[number] = cotangent
        for source, rule in node.sources:
            if source.number not in nodes:
                heapq.heappush(heap, -source.number)
            give(source, rule(cotangent))
    return [found.get(x.number) if isinstance(x, Traced) else None for x in inputs]
