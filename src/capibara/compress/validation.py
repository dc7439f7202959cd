"""Compare a compressed model's outputs with the original's on validation data.

Data are batches: an array, or a dict of inputs by name; or such a batch with targets, as a pair ``(inputs, targets)``;
or a list, a loader or another iterable of these. Targets are classes, integers in the shape of the outputs without
their last axis; with them accuracy is measured too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.formats import to_float
from capibara.compress.models.adapters import Adapter
from capibara.compress.models.compiled import compiled_run
from capibara.compress.models.numbers import is_array, to_bits

__all__ = ["Measured", "Validation", "as_batches"]


@dataclass(frozen=True)
class Measured:
    """The result of a comparison.

    Attributes:
      error: of the outputs, relative to the original's: √(Σ(y′ − y)² / Σy²).
      accuracy: the share of right classes; ``None`` without targets.
      reference: the original's accuracy.
    """

    error: float
    accuracy: float | None = None
    reference: float | None = None

    @property
    def fidelity(self) -> float:
        """Accuracy over the original's; without targets 1 − error, at least 0."""
        if self.accuracy is not None and self.reference:
            return self.accuracy / self.reference
        return max(1.0 - self.error, 0.0)


def as_batches(data: Any) -> list[tuple[Any, Any]]:
    """Batches with their targets, or ``None``.

    Raises:
      CompressError: the data is not arrays or a container of arrays, or it is empty.
    """

    def one(item: Any) -> tuple[Any, Any]:
        if is_array(item) or isinstance(item, Mapping):
            return item, None
        if isinstance(item, tuple | list) and len(item) in (1, 2):
            inputs, targets = item if len(item) == 2 else (item[0], None)
            if (is_array(inputs) or isinstance(inputs, Mapping)) and (targets is None or is_array(targets)):
                return inputs, targets
        raise CompressError(
            f"validation_data: got a batch of type {type(item).__name__}, expected an array, a dict of inputs, or a "
            "pair (inputs, targets)"
        )

    if is_array(data) or isinstance(data, Mapping) or (isinstance(data, tuple) and len(data) == 2):
        out = [one(data)]
    elif isinstance(data, Iterable):
        out = [one(item) for item in data]
    else:
        raise CompressError(
            f"validation_data: got {type(data).__name__}, expected batches: an array, a dict of inputs, a pair "
            "(inputs, targets), or a list of these"
        )
    if not out:
        raise CompressError("validation_data: there is no batch in it")
    return out


def _leaves(value: Any) -> Iterator[Any]:
    if is_array(value):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _leaves(v)


def _numbers(value: Any) -> np.ndarray:
    """An output as float64."""
    bits, form, shape = to_bits(value, "output")
    return to_float(bits, form).astype(np.float64).reshape(shape)


def float_outputs(outputs: Any) -> list[np.ndarray]:
    """The floating-point outputs.

    Raises:
      CompressError: there is none.
    """
    found = []
    for leaf in _leaves(outputs):
        bits, form, shape = to_bits(leaf, "output")
        if form.is_float:
            found.append(to_float(bits, form).astype(np.float64).reshape(shape))
    if not found:
        raise CompressError(
            f"model: its output is {type(outputs).__name__}, expected an array of floats, or "
            "dicts, lists and tuples of them"
        )
    return found


class Validation:
    """Validation data, and the original model's outputs on them.

    Raises:
      CompressError: invalid data, a model that cannot be run, outputs that cannot be compared.
    """

    def __init__(self, adapter: Adapter, data: Any) -> None:
        self._batches = as_batches(data)
        self._run = compiled_run(adapter)
        self._expected = [float_outputs(self._run(adapter.model, x)) for x, _ in self._batches]
        if not any(y.size for ys in self._expected for y in ys):
            raise CompressError("validation_data: there is nothing in its batches, so that outputs are empty")
        self._square = sum(float((y**2).sum()) for ys in self._expected for y in ys)
        if not math.isfinite(self._square):
            raise CompressError("model: its outputs on the validation data are not finite")
        self._targets = [None if t is None else self._classes(t, ys[0]) for (_, t), ys in
                         zip(self._batches, self._expected, strict=True)]  # fmt: skip
        given = [t is not None for t in self._targets]
        if any(given) and not all(given):
            raise CompressError("validation_data: some batches have targets, some have none")
        self.reference = self._accuracy(self._expected)

    @staticmethod
    def _classes(targets: Any, output: np.ndarray) -> np.ndarray:
        array = np.asarray(targets.detach().cpu() if hasattr(targets, "detach") else targets)
        if array.dtype.kind not in "iu" or array.shape != output.shape[:-1]:
            raise CompressError(
                f"validation_data: targets are {array.dtype} {array.shape}, expected classes: integers of "
                f"the shape {output.shape[:-1]}. Remedy: leave them out; outputs are then compared with the original's."
            )
        classes = output.shape[-1]
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < classes:
            raise CompressError(
                f"validation_data: targets are from {array.min()} to {array.max()}, expected classes from 0 to "
                f"{classes - 1}, as many as the outputs have. Remedy: leave padding and unknown classes out."
            )
        return array

    @property
    def batches(self) -> list[tuple[Any, Any]]:
        return self._batches

    def _accuracy(self, outputs: list[list[np.ndarray]]) -> float | None:
        right, count = 0, 0
        for found, targets in zip(outputs, self._targets, strict=True):
            if targets is None:
                return None
            right += int((found[0].argmax(-1) == targets).sum())
            count += targets.size
        return right / count if count else None

    def measure(self, model: Any) -> Measured:
        """Run a model of the adapter, and compare."""
        outputs = [float_outputs(self._run(model, x)) for x, _ in self._batches]
        lost = sum(
            float(((a - b) ** 2).sum())
            for found, expected in zip(outputs, self._expected, strict=True)
            for a, b in zip(found, expected, strict=True)
        )
        if self._square:
            error = math.sqrt(lost / self._square)
        else:
            error = 0.0 if lost == 0 else math.inf
        error = error if math.isfinite(error) else math.inf
        return Measured(error, self._accuracy(outputs), self.reference)
