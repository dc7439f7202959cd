"""The ATen operations that pick elements by arrays of indices, order them, or put some in others' places.

For :mod:`.from_torch_operations`, whose functions these are. Orders and running sums compare every element with
every other one along the dimension, so that the dimension must be short.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_moves import cut
from capibara.compose.interchange.from_torch_sizes import Refused, same_size

__all__ = ["INDEXING"]

LONGEST = 1024
"""Of a dimension that is ordered or summed up: what is compared is this squared."""


def _join(step: Any, arrays: list[Any], axis: int) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    return step.put(p.Concat(len(arrays), axis), **{f"input_{i}": x for i, x in enumerate(arrays)})


# ---- by indices -----------------------------------------------------------------------------------------------


def _gather(step: Any, x: Any, axis: int, indices: Any, **_: Any) -> Any:
    sizes, picks = step.given(0).shape, step.given(2).shape
    if not sizes:
        raise Refused("of a scalar")
    axis %= len(sizes)
    for i, (have, want) in enumerate(zip(sizes, picks, strict=True)):
        if i != axis and not same_size(have, want):
            x = cut(step, x, i, slice(0, want))
    return step.put(p.TakeAlongAxis(axis), input=x, indices=indices)


def _index(step: Any, x: Any, indices: Any) -> Any:
    rows = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    for axis, _ in rows:
        if str(step.node.args[1][axis].meta["val"].dtype) == "torch.bool":
            raise Refused("a mask, which picks as many elements as are true; use torch.where")
    axes = [axis for axis, _ in rows]
    sizes = step.given(0).shape
    first = axes[0]
    if len(rows) > 1:
        # One index into all of those dimensions as one. Negative ones in the first dimension stay negative, and
        # count from the end of the whole; the others are turned here.
        picks = _as_one(step, rows, sizes)
        first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
        rest = [a for a in range(len(sizes)) if a not in axes]
        order = (*rest[:first], *axes, *rest[first:])
        if order != tuple(range(len(sizes))):
            x = step.put(p.Transpose(order), input=x)
        x = step.put(p.Flatten(first, first + len(axes) - 1), input=x)
    else:
        picks = rows[0][1]
    return step.put(p.Take(first), input=x, indices=picks)


def _as_one(step: Any, rows: list[tuple[int, Any]], sizes: Any) -> Any:
    """Indices into several dimensions as one into all of them as one."""
    picks = rows[0][1]
    for axis, more in rows[1:]:
        size = step.size(sizes[axis])
        picks = step.put(p.Multiply(), left=picks, right=size)
        picks = step.put(p.Add(), left=picks, right=_from_the_start(step, more, size))
    return picks


def _from_the_start(step: Any, indices: Any, size: Any) -> Any:
    if isinstance(indices, np.ndarray) and isinstance(size, int):
        return np.where(indices < 0, indices + size, indices)
    below = step.put(p.Less(), left=indices, right=0)
    return step.put(p.Where(), cond=below, input1=step.put(p.Add(), left=indices, right=size), input2=indices)


def _diagonal(step: Any, x: Any, offset: int = 0, first: int = 0, second: int = 1) -> Any:
    sizes = step.given(0).shape
    first, second = first % len(sizes), second % len(sizes)
    rows, columns = sizes[first], sizes[second]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise Refused("of a size that is left open")
    rest = [a for a in range(len(sizes)) if a not in (first, second)]
    x = step.put(p.Transpose((*rest, first, second)), input=x)
    x = step.put(p.Flatten(len(rest), len(rest) + 1), input=x)
    places = np.array([i * columns + i + offset for i in range(rows) if 0 <= i + offset < columns], "int64")
    return step.put(p.Take(-1), input=x, indices=places)


# ---- in order -------------------------------------------------------------------------------------------------


def _short(step: Any, axis: int) -> int:
    sizes = step.given(0).shape
    size = sizes[axis] if sizes else 1
    if not isinstance(size, int):
        raise Refused("along a size that is left open")
    if size > LONGEST:
        raise Refused(f"along {size:,} elements; up to {LONGEST:,} are known")
    return size


def _last(step: Any, x: Any, axis: int) -> Any:
    rank = len(step.given(0).shape)
    return x if axis % rank == rank - 1 else step.put(p.SwapAxes(axis, -1), input=x)


def _ordered(step: Any, x: Any, count: int, axis: int, falling: bool) -> tuple[Any, Any]:
    """The first elements in order, equal ones in their own, and where they were. NaN has no place in it."""
    if not step.given(0).shape:
        raise Refused("of a scalar")
    size = _short(step, axis)
    x = _last(step, x, axis)
    one, other = step.put(p.ExpandDims(-1), input=x), step.put(p.ExpandDims(-2), input=x)
    ahead = step.put(p.Greater() if falling else p.Less(), left=other, right=one)
    same = step.put(p.Equal(), left=other, right=one)
    same = step.put(p.LogicalAnd(), left=same, right=np.tri(size, k=-1, dtype=bool))
    ahead = step.put(p.LogicalOr(), left=ahead, right=same)
    place = step.put(p.Sum(-1), input=step.put(p.Where(), cond=ahead, input1=1, input2=0))
    wanted = np.arange(count, dtype="int64")[:, None]
    hit = step.put(p.Equal(), left=step.put(p.ExpandDims(-2), input=place), right=wanted)
    indices = step.put(p.ArgMax(-1), input=step.put(p.Where(), cond=hit, input1=1.0, input2=0.0))
    values = step.put(p.TakeAlongAxis(-1), input=x, indices=indices)
    return _last(step, values, axis), _last(step, indices, axis)


def _topk(step: Any, x: Any, k: int, axis: int = -1, largest: bool = True, _sorted: bool = True) -> Any:
    if not isinstance(k, int):
        raise Refused("a number of elements that is left open")
    return _ordered(step, x, k, axis, largest)


def _sort(
    step: Any, x: Any, axis: int = -1, descending: bool = False, *, stable: Any = None, **options: Any
) -> Any:
    axis, descending = options.get("dim", axis), options.get("descending", descending)
    return _ordered(step, x, _short(step, axis), axis, descending)


def _running_sum(step: Any, x: Any, axis: int, **_: Any) -> Any:
    if not step.given(0).shape:
        return x
    x = step.cast(0, x)
    size = _short(step, axis)
    rows = step.put(p.ExpandDims(-2), input=_last(step, x, axis))
    seen = step.put(
        p.Where(),
        cond=np.tri(size, dtype=bool),
        input1=rows,
        input2=0.0 if step.kind == "float" else 0,
    )
    return _last(step, step.put(p.Sum(-1), input=seen), axis)


def _extreme(value: Any, place: Any) -> Any:
    def run(step: Any, x: Any, axis: int | None = None, keepdim: bool = False) -> Any:
        if axis is None:
            return step.put(value(), input=x)
        if not step.given(0).shape:
            raise Refused("of a scalar, along a dimension")
        return step.put(value(axis, keepdim), input=x), step.put(place(axis, keepdim), input=x)

    return run


# ---- in others' places, again, the other way round ------------------------------------------------------------


def _slice_scatter(
    step: Any, x: Any, source: Any, axis: int = 0, start: Any = None, end: Any = None, every: int = 1
) -> Any:
    size = step.given(0).shape[axis]
    whole = start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize))
    if every != 1 or not (whole or isinstance(size, int)):
        raise Refused("every so many elements, or a part of a size that is left open")
    source = step.cast(1, source)
    if whole:
        return source
    if not all(n is None or isinstance(n, int) for n in (start, end)):
        raise Refused("a bound that is left open")
    first, last, _ = slice(start, end).indices(size)
    parts = [cut(step, x, axis, slice(0, first))] if first else []
    parts.append(source)
    if last < size:
        parts.append(cut(step, x, axis, slice(last, None)))
    return _join(step, parts, axis)


def _select_scatter(step: Any, x: Any, source: Any, axis: int, index: int) -> Any:
    size = step.given(0).shape[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        raise Refused("along a size that is left open")
    index %= size
    source = step.put(p.ExpandDims(axis), input=step.cast(1, source))
    parts = [cut(step, x, axis, slice(0, index))] if index else []
    parts.append(source)
    if index + 1 < size:
        parts.append(cut(step, x, axis, slice(index + 1, None)))
    return _join(step, parts, axis)


def _copy(step: Any, _x: Any, source: Any, *_: Any) -> Any:
    source = step.cast(1, source)
    if tuple(getattr(step.given(1), "shape", ())) == tuple(step.result.shape):
        return source
    return step.broadcast(source, step.result.shape)


def _repeat(step: Any, x: Any, times: Any) -> Any:
    before = [1] * (len(times) - len(step.given(0).shape)) + list(step.given(0).shape)
    for _ in range(len(times) - len(step.given(0).shape)):
        x = step.put(p.ExpandDims(0), input=x)
    for axis, count in enumerate(times):
        if isinstance(count, int):
            if count < 1:
                raise Refused(f"{count} times")
            x = _join(step, [x] * count, axis)
            continue
        # As often as an open size says: along a dimension of its own, which is then joined with the one repeated.
        sizes = [*step.result.shape[:axis], *before[axis:]]
        if same_size(before[axis], 1):
            x = step.broadcast(x, [*sizes[:axis], count, *sizes[axis + 1 :]])
            continue
        x = step.broadcast(step.put(p.ExpandDims(axis), input=x), [*sizes[:axis], count, *sizes[axis:]])
        x = step.put(p.Flatten(axis, axis + 1), input=x)
    return x


# ---- scattered ------------------------------------------------------------------------------------------------


def _scatter(add: bool) -> Any:
    def run(step: Any, x: Any, axis: int, indices: Any, source: Any, *, reduce: Any = None, **_: Any) -> Any:
        sizes, picks = step.given(0).shape, step.given(2).shape
        if reduce is not None and reduce != "add" and reduce != "sum":
            raise Refused(f"reduce={reduce!r}; 'add' is known")
        if not sizes:
            raise Refused("of a scalar")
        axis %= len(sizes)
        for i, (have, want) in enumerate(zip(sizes, picks, strict=True)):
            if i != axis and not same_size(have, want):
                raise Refused("into a part of a dimension; give indices for all of it")
        source = step.turned(source, step.kind_at(3), step.kind)
        given: Any = getattr(step.given(3), "shape", None)
        if given is None:  # a number
            source = step.broadcast(np.asarray(source), picks)
        else:
            for i, want in enumerate(picks):
                if not same_size(given[i], want):
                    source = cut(step, source, i, slice(0, want), rank=len(picks))
        block = p.ScatterAlongAxis(axis, add or reduce is not None)
        return step.put(block, input=step.cast(0, x), indices=indices, updates=source)

    return run


def _scatter_reduce(
    step: Any, x: Any, axis: int, indices: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce != "sum" or not include_self:
        raise Refused(
            f"reduce={reduce!r}, include_self={include_self}; 'sum' with the values that are there is known"
        )
    return _scatter(True)(step, x, axis, indices, source)


def _index_add(step: Any, x: Any, axis: int, indices: Any, source: Any, *, alpha: Any = 1) -> Any:
    source = step.cast(3, source)
    if alpha != 1:
        source = step.put(p.Multiply(), left=source, right=alpha)
    return step.put(p.Scatter(axis, True), input=x, indices=indices, updates=source)


def _index_put(step: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    rows = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    for axis, _ in rows:
        if str(step.node.args[1][axis].meta["val"].dtype) == "torch.bool":
            raise Refused("a mask, which changes as many elements as are true; use torch.where")
    axes, sizes = [axis for axis, _ in rows], list(step.given(0).shape)
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise Refused("along dimensions that are not next to each other")
    shape = _together([step.node.args[1][axis].meta["val"].shape for axis in axes])
    values = step.broadcast(step.cast(2, values), [*sizes[: axes[0]], *shape, *sizes[axes[-1] + 1 :]])
    picks = step.broadcast(_as_one(step, rows, sizes), shape)
    if len(rows) == 1:
        return step.put(p.Scatter(axes[0], accumulate), input=x, indices=picks, updates=values)
    flat = step.put(p.Flatten(axes[0], axes[-1]), input=x)
    flat = step.put(p.Scatter(axes[0], accumulate), input=flat, indices=picks, updates=values)
    row, ports = step.row(sizes)
    return step.put(p.Reshape(row), input=flat, **ports)


def _together(shapes: list[Any]) -> list[Any]:
    """What shapes of traced sizes broadcast to."""
    out: list[Any] = []
    for i in range(1, max(map(len, shapes)) + 1):
        row = [s[-i] for s in shapes if len(s) >= i]
        out.insert(0, next((n for n in row if not same_size(n, 1)), 1))
    return out


def _flip(step: Any, x: Any, axes: Any) -> Any:
    rank = len(step.given(0).shape)
    turned = {a % rank for a in axes}
    index = tuple(slice(None, None, -1) if a in turned else slice(None) for a in range(rank))
    return step.put(p.Indexer(index), input=x) if turned else x


INDEXING: dict[str, Any] = {
    "gather": _gather,
    "index": _index,
    "diagonal": _diagonal,
    "topk": _topk,
    "sort": _sort,
    "cumsum": _running_sum,
    "max": _extreme(p.Max, p.ArgMax),
    "min": _extreme(p.Min, p.ArgMin),
    "argmax": lambda s, x, axis=None, keepdim=False: s.put(p.ArgMax(axis, keepdim), input=x),
    "argmin": lambda s, x, axis=None, keepdim=False: s.put(p.ArgMin(axis, keepdim), input=x),
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "copy": _copy,
    "repeat": _repeat,
    "scatter": _scatter(False),
    "scatter_add": _scatter(True),
    "scatter_reduce": _scatter_reduce,
    "index_add": _index_add,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "flip": _flip,
}
"""By the operation's name without its overload."""
