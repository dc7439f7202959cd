"""Fine-tune weights for compression with the straight-through estimator.

Weights are kept in full precision besides their compressed form. A step runs the model with the compressed weights,
computes the gradient there, and applies it to the full-precision ones, as if there were no rounding (Y. Bengio, N.
Léonard and A. Courville, "Estimating or propagating gradients through stochastic neurons", 2013). So small changes
accumulate until a value moves to another step. Every tensor that the model trains is tuned, including those that stay
exact.

Updates are Adam's (D. Kingma and J. Ba, ICLR 2015), in float32 with NumPy, for modules and JAX functions alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from capibara.compress.allocation import Allocation
from capibara.compress.curves import decoded_bits
from capibara.compress.errors import CompressError
from capibara.compress.formats import from_float, to_float
from capibara.compress.models.adapters import Adapter
from capibara.compress.models.gradients import gradients

__all__ = ["mean_loss", "tune"]


def tune(
    adapter: Adapter,
    batches: list[tuple[Any, Any]],
    chosen: Allocation,
    loss: Callable[[Any, Any], Any],
    *,
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, np.ndarray]:
    """The bits of weights that lose less when stored according to ``chosen``.

    Args:
      adapter: of the model, which is not changed.
      batches: inputs and targets, used cyclically.
      chosen: how each tensor is stored.
      loss: a scalar function of outputs and targets, in the model's framework.
      steps: their number; each encodes and decodes the lossy tensors.
      learning_rate: Adam's.
      progress: called after each step, with its number and loss.

    Raises:
      CompressError: a loss that is not finite, or a model without gradients.
    """
    forms = adapter.tensors.forms
    names = [n for n, (form, _) in forms.items() if form.is_float and form.bits > 8 and n not in adapter.tied]
    full = {n: to_float(adapter.tensors.read(n), forms[n][0]).astype(np.float32) for n in names}
    first = {n: np.zeros_like(w) for n, w in full.items()}
    second = {n: np.zeros_like(w) for n, w in full.items()}
    trained: set[str] = set()
    for step in range(1, steps + 1):
        inputs, targets = batches[(step - 1) % len(batches)]
        model = adapter.variant(_stored(full, forms, chosen))
        value, slopes = gradients(adapter, model, inputs, targets, loss)
        if not math.isfinite(value):
            raise CompressError(
                f"loss: {value} at step {step}. Remedy: a lower learning_rate (it is {learning_rate})."
            )
        for name, slope in slopes.items():
            slope = slope.reshape(-1)
            trained.add(name)
            first[name] += 0.1 * (slope - first[name])
            second[name] += 0.001 * (slope * slope - second[name])
            rate = learning_rate * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            full[name] -= rate * first[name] / (np.sqrt(second[name]) + 1e-8)
        if progress is not None:
            progress(step, value)
    return {n: from_float(full[n], forms[n][0]) for n in trained}


def mean_loss(
    adapter: Adapter, model: Any, batches: list[tuple[Any, Any]], loss: Callable[[Any, Any], Any]
) -> float:
    """The loss of a model that the adapter made, over all batches, without gradients."""
    return sum(float(loss(adapter.run(model, x), y)) for x, y in batches) / len(batches)


def _stored(
    full: Mapping[str, np.ndarray], forms: Mapping[str, Any], chosen: Allocation
) -> dict[str, np.ndarray]:
    """The bits that come back from the archive."""
    out = {}
    for name, values in full.items():
        form, shape = forms[name]
        bits = from_float(values, form)
        if (point := chosen.points.get(name)) is not None:
            bits = decoded_bits(point.codec, point.settings, bits, form, shape)
        out[name] = bits
    return out
