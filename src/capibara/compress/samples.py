"""Samples of a tensor's elements, on which codecs are tried before the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Metric
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.writer import rows_together

__all__ = ["settings_of_sample", "take_sample"]

_SAMPLE = 1 << 16  # numbers


def take_sample(
    bits: np.ndarray, shape: tuple[int, ...], metric: Metric | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows from all over the tensor, as another tensor; columns if inputs run along the rows.

    With a metric, all inputs of some outputs.
    """
    if bits.size <= 2 * _SAMPLE or len(shape) < 2:
        return bits, shape
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


def settings_of_sample(
    moments: Mapping[str, Any] | None, shape: tuple[int, ...], some: tuple[int, ...]
) -> Mapping[str, Any]:
    """The calibration settings of ``uniform`` for a sample, as for the whole tensor: chunk by chunk.

    If inputs run along the rows, a chunk only has its own; the sample, of some columns, is one chunk.
    """
    rows = rows_together(shape, get_codec("uniform"))
    if moments is None or moments["input_axes"][0] != 0 or rows >= shape[0] or some[0] != shape[0]:
        return moments or {}
    second = np.asarray(moments["hessian"], np.float64)
    chunk = np.arange(len(second)) // (len(second) // shape[0] * rows)
    return {**moments, "hessian": np.where(chunk[:, None] == chunk, second, 0.0)}
