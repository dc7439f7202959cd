"""The ATen operations that move elements: another shape, another order, a part, several made one.

For :mod:`.from_torch_operations`, whose functions these are.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_sizes import Refused, is_open, same_size

__all__ = ["MOVES", "cut"]


def _view(step: Any, x: Any, *_: Any, **__: Any) -> Any:
    shape = step.shape
    if shape.count(None) <= 1:
        return step.put(p.Reshape(tuple(-1 if n is None else n for n in shape)), input=x)
    row, ports = step.row(step.result.shape)
    return step.put(p.Reshape(row), input=x, **ports)


def _expand(step: Any, x: Any, *_: Any, **__: Any) -> Any:
    before, after = tuple(step.given(0).shape), tuple(step.result.shape)
    if len(before) == len(after) and all(map(same_size, before, after)):
        return x
    return step.broadcast(x, after)


def _same(step: Any, x: Any, *_: Any, **__: Any) -> Any:
    return step.cast(0, x)


def _squeeze(step: Any, x: Any, axes: Any = None) -> Any:
    if axes is None:
        raise Refused("without dim")
    sizes = step.given(0).shape
    row = tuple(a for a in ([axes] if isinstance(axes, int) else axes) if same_size(sizes[a], 1))
    return step.put(p.Squeeze(row), input=x) if row else x


def _slice(step: Any, x: Any, axis: int = 0, start: Any = None, end: Any = None, every: int = 1) -> Any:
    size = step.given(0).shape[axis]
    if end is not None and ((isinstance(end, int) and end >= sys.maxsize) or same_size(end, size)):
        end = None
    start = None if isinstance(start, int) and start == 0 else start
    return cut(step, x, axis, slice(start, end, None if every == 1 else every))


def cut(step: Any, x: Any, axis: int, entry: Any, rank: int | None = None) -> Any:
    """A part along one dimension; ``rank``: of ``x``, if it is not that of the operation's first argument."""
    if not isinstance(entry, slice):
        if not isinstance(entry, int):
            return step.put(p.Take(axis), input=x, indices=step.size(entry))
        return _indexed(step, x, axis, entry, rank, {})
    bounds = {"start": entry.start, "stop": entry.stop}
    ports = {k: step.size(n) for k, n in bounds.items() if n is not None and not isinstance(n, int)}
    row: list[Any] = [k if k in ports else n for k, n in bounds.items()]
    if row == [None, None] and entry.step is None:
        return x
    return _indexed(step, x, axis, slice(row[0], row[1], entry.step), rank, ports)


def _indexed(step: Any, x: Any, axis: int, entry: Any, rank: int | None, ports: dict[str, Any]) -> Any:
    rank = len(step.given(0).shape) if rank is None else rank
    return step.put(p.Indexer((*[slice(None)] * (axis % rank), entry)), input=x, **ports)


def _split(step: Any, x: Any, size: Any, axis: int = 0) -> Any:
    whole = step.given(0).shape[axis]
    if not isinstance(whole, int):
        raise Refused("along a size that is left open")
    sizes = [size] * (whole // size) + [whole % size] * bool(whole % size) if isinstance(size, int) else size
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(cut(step, x, axis, slice(a, b)) for a, b in pairwise(ends))


def _cat(step: Any, arrays: Any, axis: int = 0) -> Any:
    return step.put(p.Concat(len(arrays), axis), **{f"input_{i}": x for i, x in enumerate(arrays)})


def _stack(step: Any, arrays: Any, axis: int = 0) -> Any:
    return step.put(p.Stack(len(arrays), axis), **{f"input_{i}": x for i, x in enumerate(arrays)})


def _pad(step: Any, x: Any, widths: Any, value: Any = 0.0) -> Any:
    rank = len(step.shape)
    if any(is_open(n) for n in (*widths, value)):
        return _pad_open(step, x, widths, value)
    pairs = [(int(widths[i]), int(widths[i + 1])) for i in range(0, len(widths), 2)][::-1]
    if any(n < 0 for pair in pairs for n in pair):
        raise Refused("negative widths")
    return step.put(p.Pad((*[(0, 0)] * (rank - len(pairs)), *pairs), value), input=x)


def _pad_open(step: Any, x: Any, widths: Any, value: Any) -> Any:
    """Padding by as much as an open size says: that must not be negative when the model runs."""
    sizes = list(step.given(0).shape)
    if any(not is_open(n) and n < 0 for n in widths):
        raise Refused("negative widths")
    filling = step.turned(value, step.kind_of(value), step.kind)
    for pair in range(0, len(widths), 2):
        axis = len(sizes) - 1 - pair // 2
        around = [
            [step.broadcast(filling, [*sizes[:axis], width, *sizes[axis + 1 :]])]
            if is_open(width) or width
            else []
            for width in widths[pair : pair + 2]
        ]
        x = _cat(step, [*around[0], x, *around[1]], axis) if any(around) else x
        sizes[axis] = step.result.shape[axis]
    return x


def _take(step: Any, x: Any, axis: int, indices: Any) -> Any:
    return step.put(p.Take(axis), input=x, indices=indices)


MOVES: dict[str, Any] = {
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "expand": _expand,
    "permute": lambda step, x, axes: step.put(p.Transpose(tuple(axes)), input=x),
    "transpose": lambda step, x, a, b: step.put(p.SwapAxes(a, b), input=x),
    "t": lambda step, x: step.put(p.SwapAxes(0, 1), input=x),
    "unsqueeze": lambda step, x, axis: step.put(p.ExpandDims(axis), input=x),
    "squeeze": _squeeze,
    "slice": _slice,
    "select": lambda s, x, axis, i: cut(s, x, axis, i),
    "split": _split,
    "split_with_sizes": _split,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "index_select": _take,
    "unbind": lambda s, x, axis=0: s.all(p.Unstack(s.given(0).shape[axis], axis), input=x),
    **dict.fromkeys(
        ["clone", "detach", "alias", "lift_fresh_copy", "contiguous", "_to_copy", "dropout"], _same
    ),
}
"""By the operation's name without its overload."""
