"""Samples of a tensor's elements, on which codecs are tried before the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Metric, stack_of
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.writer import rows_together

__all__ = ["settings_of_sample", "take_sample"]

_SAMPLE = 1 << 16  # numbers
_OUTPUTS = 16  # the fewest of an entry of a stack


def take_sample(
    bits: np.ndarray, shape: tuple[int, ...], metric: Metric | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows from all over the tensor, as another tensor; columns if inputs run along the rows.

    With a metric, all inputs of some outputs; of a stack, of some entries (:func:`settings_of_sample` knows which).
    """
    if bits.size <= 2 * _SAMPLE or len(shape) < 2:
        return bits, shape
    if metric is not None and isinstance(metric.second, tuple):
        return _of_entries(bits, shape, metric.axes)
    if metric is not None and metric.axes[0] == 0:
        if (inner := len(metric.axes)) != metric.axes[-1] + 1:
            return bits, shape
        columns = bits.reshape(math.prod(shape[:inner]), -1)
        some = np.ascontiguousarray(columns[:, :: max(bits.size // _SAMPLE, 1)])
        return some.reshape(-1), (*shape[:inner], some.shape[1])
    if metric is not None and len(shape) > 2:
        some = np.ascontiguousarray(bits.reshape(shape)[:: max(bits.size // _SAMPLE, 1)])
        return some.reshape(-1), some.shape
    length = shape[-1] if shape[-1] >= 32 else bits.size // shape[0]
    rows = bits.reshape(-1, length)
    every = max(len(rows) * length // _SAMPLE, 1)
    some = np.ascontiguousarray(rows[::every])
    return some.reshape(-1), some.shape


def _of_entries(
    bits: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Some outputs of some entries of a stack. Those of one axis are thinned out; the others stay whole."""
    thinned = max((a for a in range(1, len(shape)) if a not in axes), key=lambda a: shape[a], default=0)
    some = bits.reshape(shape)[:: _entry_stride(shape, axes)]
    every = max(some.size // _SAMPLE, 1)
    if thinned and every > 1:
        index: list[Any] = [slice(None)] * len(shape)
        index[thinned] = slice(None, None, min(every, shape[thinned]))
        some = some[tuple(index)]
    return np.ascontiguousarray(some).reshape(-1), some.shape


def _entry_stride(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Of how many entries of a stack one is in a sample: of those that are, there are some outputs."""
    inputs = math.prod(shape[a] for a in axes)
    return -(-shape[0] // max(_SAMPLE // (_OUTPUTS * inputs), 1))


def settings_of_sample(
    moments: Mapping[str, Any] | None, shape: tuple[int, ...], some: tuple[int, ...]
) -> Mapping[str, Any]:
    """The calibration settings of ``uniform`` for a sample, as for the whole tensor: chunk by chunk, and for a stack
    those of the sampled entries.

    If inputs run along the rows, a chunk only has its own; the sample, of some columns, is one chunk.
    """
    if moments is not None and (stack := stack_of(moments["hessian"])) is not None:
        sampled = some != shape
        stride = _entry_stride(shape, tuple(moments["input_axes"])) if sampled else 1
        return {**moments, "hessian": stack[::stride]} if stride > 1 else moments
    rows = rows_together(shape, get_codec("uniform"), {})
    if moments is None or moments["input_axes"][0] != 0 or rows >= shape[0] or some[0] != shape[0]:
        return moments or {}
    second = np.asarray(moments["hessian"], np.float64)
    chunk = np.arange(len(second)) // (len(second) // shape[0] * rows)
    return {**moments, "hessian": np.where(chunk[:, None] == chunk, second, 0.0)}
