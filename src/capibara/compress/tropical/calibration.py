"""The rows and columns of linear steps, and what they read and make on data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from capibara.compress.tropical.network import Dense, Linear, Step, run

__all__ = ["Data", "columns_of", "put_columns", "put_rows", "reads", "rows_of", "unread"]

_BATCH = 256


def rows_of(step: Linear) -> np.ndarray:
    """[neurons, in · taps], with the bias at the end where there is one."""
    flat = step.weight.reshape(len(step.weight), -1)
    parts = [flat] if step.bias is None else [flat, step.bias[:, None]]
    return np.concatenate(parts, axis=1).astype(np.float64)


def columns_of(step: Linear, neurons: int) -> np.ndarray:
    """[neurons, out · places]."""
    blocks = step.weight.reshape(len(step.weight), neurons, -1).astype(np.float64)
    return blocks.transpose(1, 0, 2).reshape(neurons, -1)


def put_rows(step: Linear, rows: np.ndarray) -> Linear:
    dtype = step.weight.dtype
    weight, bias = (rows, None) if step.bias is None else (rows[:, :-1], rows[:, -1].astype(dtype))
    return replace(step, weight=weight.reshape(-1, *step.weight.shape[1:]).astype(dtype), bias=bias)


def put_columns(step: Linear, columns: np.ndarray, shift: np.ndarray) -> Linear:
    out, dtype = len(step.weight), step.weight.dtype
    blocks = columns.reshape(len(columns), out, -1).transpose(1, 0, 2)
    shape = (out, -1, *step.weight.shape[2:])
    bias = None if step.bias is None and not shift.any() else shift.astype(dtype)
    return replace(step, weight=blocks.reshape(shape).astype(dtype), bias=bias)


def reads(columns: np.ndarray, out: int) -> np.ndarray:
    """Columns [k, out · places] as the matrix [k · places, out] that a window is multiplied by."""
    return columns.reshape(len(columns), out, -1).transpose(0, 2, 1).reshape(-1, out)


def unread(matrix: np.ndarray, neurons: int) -> np.ndarray:
    return matrix.reshape(neurons, -1, matrix.shape[1]).transpose(0, 2, 1).reshape(neurons, -1)


class Data:
    """The examples on their way through the original and the merged network, in batches.

    What reaches the layer that is being merged is kept, twice the memory of one layer's inputs, so that no layer before
    it runs again. So layers have to be asked for in order.
    """

    def __init__(self, original: Sequence[Step], steps: list[Step], inputs: np.ndarray) -> None:
        self.original, self.steps = original, steps
        batches = [inputs[start : start + _BATCH] for start in range(0, len(inputs), _BATCH)]
        self.place, self.before, self.after = 0, batches, list(batches)

    def _reach(self, i: int) -> None:
        if i > self.place:
            self.before = [run(self.original[self.place : i], batch) for batch in self.before]
            self.after = [run(self.steps[self.place : i], batch) for batch in self.after]
            self.place = i

    def parts(self, i: int, j: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What step j reads from the network as it is now, and what it made in the original one."""
        self._reach(i)
        reader = self.steps[j]
        assert isinstance(reader, Linear)
        for before, after in zip(self.before, self.after, strict=True):
            wanted = run(self.original[i : j + 1], before)
            wanted = wanted if isinstance(reader, Dense) else np.moveaxis(wanted, 1, -1)
            wanted = wanted.reshape(-1, len(reader.weight)).astype(np.float64)
            at = 0
            for window in reader.windows(run(self.steps[i:j], after)):
                yield window.astype(np.float64), wanted[at : at + len(window)]
                at += len(window)

    def whole(self, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
        """What dense step i reads from the network as it is now, and what dense step j made in the original one."""
        self._reach(i)
        read = np.concatenate(self.after).astype(np.float64)
        wanted = np.concatenate([run(self.original[i : j + 1], batch) for batch in self.before])
        return read.reshape(-1, read.shape[-1]), wanted.reshape(-1, wanted.shape[-1]).astype(np.float64)

    def error(self, i: int, j: int) -> float:
        """The relative root mean square error of what step j makes, relative to how much that varies."""
        reader = self.steps[j]
        assert isinstance(reader, Linear)
        matrix = reader.weight.reshape(len(reader.weight), -1).T.astype(np.float64)
        shift = 0 if reader.bias is None else reader.bias
        # Around the first example: a large mean would hide what varies in the rounding of its square.
        count, missed, squares, total, middle = 0, 0.0, 0.0, np.zeros(len(reader.weight)), None
        for window, wanted in self.parts(i, j):
            middle = wanted[0] if middle is None else middle
            missed += float(np.sum((window @ matrix + shift - wanted) ** 2))
            squares += float(np.sum((wanted - middle) ** 2))
            total += (wanted - middle).sum(0)
            count += len(wanted)
        around = squares - float(np.sum(total**2)) / count
        return math.sqrt(missed / around) if around > 0 else (0.0 if missed == 0 else math.inf)
