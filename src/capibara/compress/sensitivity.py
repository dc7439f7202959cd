"""The weight of each tensor's squared error.

With validation data it is measured: one tensor at a time is rounded, the model is run, and the squared error of its
outputs is divided by that of the tensor. Small errors of several tensors add up nearly as if they were independent.

Without data, only the tensors are available. The relative error of a matrix's outputs is its own relative error,
regardless of its size, which suggests a weight of 1 / Σw². The error over all elements suggests equal weights. A
power in between, (Σw²)^-¼, has most of the advantages of both: the few large tensors, above all embedding tables,
give bits to the many small ones, where a bit costs less and helps as much. At equal bytes, a sentence encoder's
outputs are a fifth closer to the original's than with equal weights, and its weights a twentieth farther (``python -m
benchmarks compression_coded``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from capibara.compress.allocation import Survey
from capibara.compress.calibration.activations import Metric
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.curves import squared_error
from capibara.compress.formats import to_float
from capibara.compress.models.adapters import Adapter
from capibara.compress.validation import Validation

__all__ = ["by_outputs", "by_scale"]

_POWER = -0.25


def by_scale(found: Survey) -> dict[str, float]:
    """Weights from the tensors alone: (Σw²)^-¼ of each."""
    return {name: curve.square**_POWER for name, curve in found.curves.items()}


def by_outputs(
    adapter: Adapter,
    validation: Validation,
    found: Survey,
    moments: Mapping[str, Mapping[str, Any]],
    *,
    bits: float = 4.0,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, float]:
    """Weights measured on validation data.

    Args:
      adapter: of the model.
      validation: the data.
      found: the tensors that may be lossy.
      moments: those that ``found`` was measured with.
      bits: bits per element of the tensor that is rounded to measure it: the rate for which the weights are meant.
      progress: called after each tensor.
    """
    uniform = get_codec("uniform")
    weights = {}
    for name in found.curves:
        form, shape = adapter.tensors.forms[name]
        original = adapter.tensors.read(name)
        # The entropy of a Gaussian in steps is log2(4.13 · deviation / step).
        with np.errstate(invalid="ignore"):  # quiets NaNs
            values = to_float(original, form).astype(np.float64)
        finite = np.isfinite(values)
        step = (
            4.13
            * math.sqrt(float(np.square(values, where=finite, out=np.zeros_like(values)).mean()))
            * 2.0**-bits
        )
        settings = {"step": step}
        payload = uniform.encode(np.where(finite, original, 0).astype(original.dtype), form, shape, settings)
        changed = np.where(finite, uniform.decode(memoryview(payload), form, shape, settings), original)
        metric = None if name not in moments else Metric.of(moments[name])
        lost = squared_error(original, changed, form, metric, shape)
        error = validation.measure(adapter.variant({name: changed})).error
        weights[name] = min(error, 1e6) ** 2 / lost if lost else 0.0
        if progress is not None:
            progress(name, original.nbytes)
    # A tensor that this data does not reach still has numbers: the least sensitive ones count a little.
    floor = 1e-6 * max((w * found.curves[n].square for n, w in weights.items()), default=0.0)
    return {n: max(w, floor / (found.curves[n].square or 1.0), 1e-300) for n, w in weights.items()}
