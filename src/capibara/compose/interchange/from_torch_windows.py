"""The ATen operations on images and signals: convolutions, pooling, other resolutions.

For :mod:`.from_torch_operations`, whose functions these are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_moves import cut
from capibara.compose.interchange.from_torch_sizes import Refused

__all__ = ["WINDOWS"]


def _each(values: Any, space: int) -> tuple[int, ...]:
    """One number for each dimension of space."""
    return tuple(values) * (space if len(values) == 1 else 1)


# ---- convolutions ---------------------------------------------------------------------------------------------


def _convolution(
    step: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    space = len(step.shape) - 2
    if space not in (1, 2):
        raise Refused(f"{space} dimensions of space; 1 or 2 are known")
    make: Any = p.PrimitiveConvolution1D if space == 1 else p.PrimitiveConvolution2D
    stride, padding, dilation = (_each(n, space) for n in (stride, padding, dilation))
    if transposed:
        x = _spread(step, x, stride)
        kernel = step.given(1).shape[2:]
        extra = _each(output_padding, space)
        pads = [
            (d * (k - 1) - q, d * (k - 1) - q + more)
            for d, k, q, more in zip(dilation, kernel, padding, extra, strict=True)
        ]
        for axis, (before, after) in enumerate(pads, 2):
            x = cut(step, x, axis, slice(max(-before, 0), -max(-after, 0) or None))
        pads = [(max(before, 0), max(after, 0)) for before, after in pads]
        weight = _turned(step, weight, groups)
        out = step.put(make(1, tuple(pads), dilation, groups), input=x, weight=weight)
    else:
        out = step.put(make(stride, padding, dilation, groups), input=x, weight=weight)
    return out if bias is None else step.put(p.ChannelAdd(), input=out, values=bias)


def _spread(step: Any, x: Any, stride: tuple[int, ...]) -> Any:
    """``stride - 1`` zeros between one element and the next: a transposed convolution is one over that."""
    for axis, every in enumerate(stride, 2):
        if every == 1:
            continue
        x = step.put(p.ExpandDims(axis + 1), input=x)
        widths = [(0, 0)] * (len(step.shape) + 1)
        widths[axis + 1] = (0, every - 1)
        x = step.put(p.Pad(tuple(widths), 0.0), input=x)
        x = step.put(p.Flatten(axis, axis + 1), input=x)
        x = cut(step, x, axis, slice(0, 1 - every))
    return x


def _turned(step: Any, weight: Any, groups: int) -> Any:
    """``[in, out / groups, *k]`` as ``[out, in / groups, *k]``, the kernel back to front."""
    channels, *rest = step.given(1).shape
    if groups > 1:
        weight = step.put(p.Reshape((groups, channels // groups, *rest)), input=weight)
        weight = step.put(p.SwapAxes(1, 2), input=weight)
        weight = step.put(p.Flatten(0, 1), input=weight)
    else:
        weight = step.put(p.SwapAxes(0, 1), input=weight)
    back = slice(None, None, -1)
    return step.put(p.Indexer((slice(None), slice(None), *[back] * (len(rest) - 1))), input=weight)


# ---- pooling --------------------------------------------------------------------------------------------------


def _pool(make: Any, average: bool) -> Any:
    def run(
        step: Any, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), *more: Any, **options: Any
    ) -> Any:
        names = (
            ("ceil_mode", "count_include_pad", "divisor_override") if average else ("dilation", "ceil_mode")
        )
        given = dict(zip(names, more, strict=False)) | options
        space = make.space
        alone = len(step.shape) == space + 1
        kernel, stride, pads, gaps = (
            _each(n, space) for n in (kernel, stride or kernel, padding, given.get("dilation", (1,)))
        )
        if alone:
            x = step.put(p.ExpandDims(0), input=x)
        divisor, counted = given.get("divisor_override"), bool(given.get("count_include_pad", True))
        if given.get("ceil_mode") or divisor is not None:
            sizes = _sizes(step, space)
            row = [(n, k, s, q, d) for n, k, s, q, d in zip(sizes, kernel, stride, pads, gaps, strict=True)]
            widths = [
                (q, max(0, (m - 1) * s + (k - 1) * d + 1 - n - q))
                for m, (n, k, s, q, d) in zip(step.shape[-space:], row, strict=True)
            ]
            x = step.put(p.Pad(((0, 0), (0, 0), *widths), 0.0 if average else -math.inf), input=x)
            last = {"count_padding": True} if average else {}
            out = step.put(make(kernel, stride, 0, gaps, **last), input=x)
            for axis, size in enumerate(
                step.shape[-space:], 2
            ):  # windows that begin in the padding have no place
                out = cut(step, out, axis, slice(0, size), rank=space + 2)
            if average:
                share = math.prod(kernel) / _counts(step.shape[-space:], row, counted, divisor)
                out = step.put(p.Multiply(), left=out, right=share)
        else:
            last = {"count_padding": counted} if average else {}
            out = step.put(make(kernel, stride, pads, gaps, **last), input=x)
        if alone:
            out = step.put(p.Squeeze((0,)), input=out)
        return out if average else (out, None)

    return run


def _sizes(step: Any, space: int) -> tuple[int, ...]:
    sizes = tuple(step.given(0).shape)[-space:]
    if not all(isinstance(n, int) for n in sizes):
        raise Refused("of a size that is left open (with ceil_mode, divisor_override or unequal windows)")
    return sizes


def _counts(places: Any, row: Any, counted: bool, divisor: int | None) -> np.ndarray[Any, Any]:
    """By how much the sum of each window is divided: ``[1, 1, *space]``."""
    total = np.ones((1, 1, *[1] * len(row)))
    for axis, (m, (n, k, s, q, _)) in enumerate(zip(places, row, strict=True), 2):
        begin = np.arange(m) * s - q
        end = np.minimum(begin + k, n + q)  # what ceil_mode adds beyond the padding never counts
        one = end - begin if counted else np.minimum(end, n) - np.maximum(begin, 0)
        total = total * one.reshape([-1 if i == axis else 1 for i in range(total.ndim)])
    return total if divisor is None else np.full_like(total, divisor)


def _adaptive(make: Any, reduce: Any, average: bool) -> Any:
    def run(step: Any, x: Any, sizes: Any) -> Any:
        space = len(sizes)
        row = tuple(step.given(0).shape)[-space:]
        known = all(isinstance(n, int) for n in row)
        if known and len(step.shape) == space + 2 and not any(n % m for n, m in zip(row, sizes, strict=True)):
            out = step.put(make(tuple(n // m for n, m in zip(row, sizes, strict=True))), input=x)
        else:
            rank, out = len(step.shape), x
            for axis, (n, m) in enumerate(zip(row, sizes, strict=True), rank - space):
                if m == 1:
                    out = step.put(reduce(axis, True), input=out)
                    continue
                _sizes(step, space)
                ends = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
                parts = [
                    step.put(reduce(axis, True), input=cut(step, out, axis, slice(a, b), rank=rank))
                    for a, b in ends
                ]
                out = step.put(p.Concat(m, axis), **{f"input_{i}": part for i, part in enumerate(parts)})
        return out if average else (out, None)

    return run


# ---- other resolutions ----------------------------------------------------------------------------------------


def _ratios(step: Any, sizes: Any, scales: Any, space: int) -> list[tuple[int, int, float]]:
    """Old size, new size and step of each dimension of space."""
    old, new = _sizes(step, space), step.shape[-space:]
    if None in new:
        raise Refused("to a size that is left open")
    given = [None] * space if scales is None or sizes is not None else scales
    return [(n, m, 1 / f if f else n / m) for n, m, f in zip(old, new, given, strict=True) if m is not None]


def _nearest(space: int) -> Any:
    def run(step: Any, x: Any, sizes: Any, scales: Any = None) -> Any:
        for axis, (n, m, ratio) in enumerate(_ratios(step, sizes, scales, space), 2):
            places = np.minimum(np.floor(np.arange(m) * ratio).astype("int64"), n - 1)
            x = step.put(p.Take(axis), input=x, indices=places)
        return x

    return run


def _linear(space: int) -> Any:
    def run(step: Any, x: Any, sizes: Any, corners: bool, scales: Any = None) -> Any:
        for axis, (n, m, ratio) in enumerate(_ratios(step, sizes, scales, space), 2):
            if corners:
                at = np.arange(m) * ((n - 1) / (m - 1) if m > 1 else 0.0)
            else:
                at = np.maximum((np.arange(m) + 0.5) * ratio - 0.5, 0.0)
            low = np.minimum(np.floor(at).astype("int64"), n - 1)
            share = np.minimum(at - low, 1.0)
            matrix = np.zeros((m, n))
            matrix[np.arange(m), low] += 1 - share
            matrix[np.arange(m), np.minimum(low + 1, n - 1)] += share
            if axis == space + 1:
                x = step.put(p.MatrixMultiply(), left=x, right=matrix.T.copy())
            else:
                x = step.put(p.MatrixMultiply(), left=matrix, right=x)
        return x

    return run


WINDOWS: dict[str, Any] = {
    "convolution": _convolution,
    "max_pool2d_with_indices": _pool(p.PrimitiveMaxPool2D, False),
    "avg_pool1d": _pool(p.PrimitiveAvgPool1D, True),
    "avg_pool2d": _pool(p.PrimitiveAvgPool2D, True),
    "_adaptive_avg_pool2d": _adaptive(p.PrimitiveAvgPool2D, p.Mean, True),
    "adaptive_avg_pool1d": _adaptive(p.PrimitiveAvgPool1D, p.Mean, True),
    "adaptive_max_pool2d": _adaptive(p.PrimitiveMaxPool2D, p.Max, False),
    "upsample_nearest1d": _nearest(1),
    "upsample_nearest2d": _nearest(2),
    "upsample_linear1d": _linear(1),
    "upsample_bilinear2d": _linear(2),
}
"""By the operation's name without its overload."""
