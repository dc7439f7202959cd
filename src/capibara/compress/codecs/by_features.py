"""Rounding that minimises the error of a layer's output: one step per input, with error feedback to other inputs.

Columns of the weight are rounded one after another, and their effect on the output is compensated in those that are
not rounded yet (:mod:`capibara.compress.calibration.gptq`). The part of a column's error that cannot be compensated
is scaled by 1 / U[j, j]; with steps in proportion to U[j, j], every column adds equally to the output's error, which
is the least for the total number of bits: the "water-filling" of rate–distortion theory (E. Lifar, S. Savkin, O.
Ordentlich and Y. Polyanskiy, "WaterSIC: information-theoretically (near) optimal linear layer quantization", 2026).
Multiples of these steps are entropy-coded input by input, since they differ in size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capibara.compress.calibration.blas import one_thread
from capibara.compress.codecs import lossless
from capibara.compress.codecs.fixed_storage import Cursor
from capibara.compress.codecs.matrices import BLOCK, check_axes, sides
from capibara.compress.errors import DamagedError
from capibara.compress.formats import get_format

__all__ = ["Rounded", "entry_gain", "most_of_steps", "pack_steps", "read_steps", "round_by_outputs"]

_QUARTERS = 4  # steps are powers of two to the fourth: their bits count where matrices are small
_MOST = 80  # quarters of an octave between a step and the typical one
_CODES = get_format("I8")


@dataclass(frozen=True)
class Rounded:
    """A matrix [out, features] as multiples of steps.

    Attributes:
      codes: of the steps, int8 [features]; ``None`` if all are equal.
      means: offsets of decoded values from the multiples 0, 1, 2 …, in 1/256 of a step.
      multiples: float64 [features, out]; not all are finite if steps are too small for the values.
      error: the squared error of the outputs, tr(D H Dᵀ), for moments with mean 1.
    """

    codes: np.ndarray | None
    means: np.ndarray
    multiples: np.ndarray
    error: float


def round_by_outputs(
    matrix: np.ndarray,
    hessian: np.ndarray,
    steps: Sequence[float],
    means_of: Callable[[Iterator[np.ndarray]], np.ndarray],
    stored: Callable[[np.ndarray], np.ndarray],
    damping: float,
) -> list[list[Rounded]]:
    """For each step, a matrix rounded to it (exact if all values are multiples); the same with error feedback; and
    that with a step per feature.

    All are computed together, column by column: rounding a column of a small matrix takes less time than the calls.

    Args:
      matrix: float64 [out, features].
      hessian: float64 [features, features], E[x xᵀ] of the inputs; its scale does not matter.
      steps: the geometric means of the steps.
      means_of: function from values in steps, a few at a time, to ``means``.
      stored: function that rounds float64 values to the tensor's dtype.
      damping: share of the mean moment that is added to the diagonal.

    Raises:
      CompressError: ``hessian`` is not positive.
    """
    from capibara.compress.calibration.gptq import feed_back, get_factor

    factor = get_factor(hessian, damping)
    free = np.log2(factor.diagonal())
    codes = np.clip(np.rint(_QUARTERS * (free - free.mean())), -_MOST, _MOST).astype(np.int8)
    second = hessian / (float(np.mean(np.diag(hessian))) or 1.0)
    rows, features = matrix.shape
    block = max(BLOCK // features, 1)
    # Steps that are too small for the numbers are seen by multiples that are too large, or not finite.
    with np.errstate(all="ignore"):
        kinds = [None, codes] if codes.any() else [None]
        variants = [(step, kind) for step in steps for kind in kinds]
        widths = np.stack([_steps(s, np.zeros(features) if k is None else k) for s, k in variants])
        means = [means_of(matrix[i : i + block] / w for i in range(0, rows, block)) for w in widths]
        offsets = np.stack([np.append(m / 256, 0.0) for m in means])
        many, places = len(variants), offsets.shape[1]
        first = (np.arange(many) * places)[:, None]

        def restored(multiples: np.ndarray, width: np.ndarray) -> np.ndarray:
            """Of [variants, outputs]."""
            magnitude = np.abs(multiples)
            off = offsets.ravel()[np.fmin(magnitude, places - 1).astype(np.int64) + first]
            return stored(np.copysign((magnitude + off) * width, multiples))

        multiples = np.empty((features, many, rows))
        lost = np.empty((features, many, rows))

        def rounded(j: int, columns: np.ndarray) -> np.ndarray:
            width = widths[:, j, None]
            np.rint(columns[0].reshape(many, rows) / width, out=multiples[j])
            found = restored(multiples[j], width)
            np.subtract(found, matrix[:, j], out=lost[j])
            return found.ravel()

        feed_back(np.tile(matrix, (many, 1)), factor, rounded)
        errors = _weighed(lost, second)
        out: list[list[Rounded]] = []
        plain = slice(None, None, len(kinds))
        fed, widths, offsets, first = multiples, widths[plain], offsets[plain], first[: len(steps)]
        multiples = np.rint(matrix.T[:, None] / widths.T[:, :, None])
        lost = np.stack([restored(m, w[:, None]) for m, w in zip(multiples, widths.T, strict=True)])
        lost -= matrix.T[:, None]
        for i, error in enumerate(_weighed(lost, second)):
            found = [Rounded(None, means[i * len(kinds)], multiples[:, i], error)]
            for k, kind in enumerate(kinds):
                at = i * len(kinds) + k
                found.append(Rounded(kind, means[at], fed[:, at], errors[at]))
            out.append(found)
    return out


def entry_gain(hessian: np.ndarray, damping: float) -> float:
    """By how much longer steps are, in the geometric mean, that add as much to the error of outputs as equal steps of
    independent inputs would.

    Args:
      hessian: float64 [features, features]; its scale does not matter.
      damping: as in :func:`round_by_outputs`.
    """
    from capibara.compress.calibration.gptq import get_factor

    return 2.0 ** float(np.log2(get_factor(hessian, damping).diagonal()).mean())


def _weighed(lost: np.ndarray, second: np.ndarray) -> list[float]:
    """tr(D H Dᵀ) of each of [features, variants, outputs]."""
    flat = lost.reshape(len(lost), -1)
    with one_thread(len(second)):
        return (flat * (second @ flat)).reshape(lost.shape).sum((0, 2)).tolist()


def _steps(step: float, codes: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return step * 2.0 ** (codes.astype(np.float64) / _QUARTERS)


def pack_steps(codes: np.ndarray, axes: tuple[int, ...]) -> bytes:
    """The axes along which inputs run, and the steps."""
    packed = lossless.encode(codes.view(np.uint8), _CODES, codes.shape)
    return struct.pack("<B", len(axes)) + bytes(axes) + struct.pack("<I", len(packed)) + packed


def most_of_steps(count: int) -> int:
    """The maximum number of bytes of the axes and steps of a tensor of ``count`` elements."""
    return 1 + 255 + 4 + lossless.size_bound(_CODES, count)


def read_steps(
    payload: memoryview, step: float, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], np.ndarray, memoryview]:
    """The reverse: axes, steps as float64 [features], and what follows.

    Raises:
      DamagedError: they are not what :func:`pack_steps` writes for a tensor of this shape.
    """
    cursor = Cursor(payload)
    (count,) = struct.unpack("<B", cursor.take(1))
    axes = check_axes(list(cursor.take(count)), shape)
    (size,) = struct.unpack("<I", cursor.take(4))
    codes = lossless.decode(cursor.take(size), _CODES, (sides(shape, axes)[1],)).view(np.int8)
    steps = _steps(step, codes)
    if not (np.isfinite(steps).all() and (steps > 0).all()):
        raise DamagedError("a tensor's steps are invalid: the file is damaged")
    return axes, steps, cursor.rest()
