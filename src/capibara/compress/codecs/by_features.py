"""Rounding a layer's weight by what the layer puts out: a step for each input, and errors made up for in other inputs.

Columns of the weight are rounded one after another, and what that does to the output is made up for in those that are
not rounded yet (:mod:`capibara.compress.calibration.gptq`). What of a column's error cannot be made up for is its
product with a number of its own, 1 / U[j, j]; with steps in proportion to U[j, j] every column adds as much to the
output's error, which is the least for all bits together: the "water-filling" of rate–distortion theory (E. Lifar,
S. Savkin, O. Ordentlich and Y. Polyanskiy, "WaterSIC: information-theoretically (near) optimal linear layer
quantization", 2026). Multiples of these steps are entropy-coded input by input, since they differ in size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.fixed_storage import Cursor
from capibara.compress.codecs.matrices import BLOCK, check_axes, sides
from capibara.compress.errors import DamagedError
from capibara.compress.formats import get_format

__all__ = ["Rounded", "most_of_steps", "pack_steps", "read_steps", "round_by_outputs"]

_QUARTERS = 4  # steps are powers of two to the fourth: their bits count where matrices are small
_MOST = 80  # quarters of an octave between a step and the typical one
_CODES = get_format("I8")


@dataclass(frozen=True)
class Rounded:
    """A matrix [out, features] as multiples.

    Attributes:
      codes: of the steps, int8 [features]; ``None`` where all are the same.
      means: by how many 256ths of a step decoded numbers lie off multiples of 0, 1, 2 …
      multiples: float64 [features, out]; not all are finite where steps are too small for the numbers.
      error: the squared error of the outputs, tr(D H Dᵀ), for moments of 1 in the mean.
    """

    codes: np.ndarray | None
    means: np.ndarray
    multiples: np.ndarray
    error: float


def round_by_outputs(
    matrix: np.ndarray,
    hessian: np.ndarray,
    step: float,
    means_of: Callable[[Iterator[np.ndarray]], np.ndarray],
    stored: Callable[[np.ndarray], np.ndarray],
    damping: float,
) -> Iterator[Rounded]:
    """A matrix with one step, which loses nothing where all numbers are multiples; the same with errors made up for;
    and that with a step for each feature.

    Args:
      matrix: float64 [out, features].
      hessian: float64 [features, features], E[x xᵀ] of the inputs; its scale does not matter.
      step: the geometric mean of the steps.
      means_of: of numbers in steps, a few at a time, the ``means``.
      stored: what becomes of float64 numbers in the type of the tensor.
      damping: share of the mean moment that is added to the diagonal.

    Raises:
      CompressError: ``hessian`` is not positive.
    """
    from capibara.compress.calibration.gptq import feed_back, get_factor

    factor = get_factor(hessian, damping)
    free = np.log2(factor.diagonal())
    codes = np.clip(np.rint(_QUARTERS * (free - free.mean())), -_MOST, _MOST).astype(np.int8)
    second = hessian / (float(np.mean(np.diag(hessian))) or 1.0)

    # Steps that are too small for the numbers are seen by multiples that are too large, or not finite.
    @np.errstate(all="ignore")
    def one(codes: np.ndarray | None, fed_back: bool) -> Rounded:
        steps = _steps(step, np.zeros(matrix.shape[1]) if codes is None else codes)
        rows = max(BLOCK // matrix.shape[1], 1)
        means = means_of(matrix[i : i + rows] / steps for i in range(0, len(matrix), rows))
        offsets = np.append(means / 256, 0.0)
        multiples = np.rint(matrix.T / steps[:, None])

        def restored(multiples: np.ndarray, steps: np.ndarray | float) -> np.ndarray:
            magnitude = np.abs(multiples)
            off = offsets[np.fmin(magnitude, len(means)).astype(np.int64)]
            return stored(np.copysign((magnitude + off) * steps, multiples))

        def rounded(j: int, columns: np.ndarray) -> np.ndarray:
            multiples[j] = np.rint(columns[0] / steps[j])
            return restored(multiples[j], steps[j])

        if fed_back:
            feed_back(matrix, factor, rounded)
        lost = restored(multiples, steps[:, None]) - matrix.T
        return Rounded(codes, means, multiples, float(np.vdot(lost, second @ lost)))

    yield one(None, False)
    yield one(None, True)
    if codes.any():
        yield one(codes, True)


def _steps(step: float, codes: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return step * 2.0 ** (codes.astype(np.float64) / _QUARTERS)


def pack_steps(codes: np.ndarray, axes: tuple[int, ...]) -> bytes:
    """The axes along which inputs run, and the steps."""
    packed = lossless.encode(codes.view(np.uint8), _CODES, codes.shape)
    return struct.pack("<B", len(axes)) + bytes(axes) + struct.pack("<I", len(packed)) + packed


def most_of_steps(count: int) -> int:
    """The most bytes that the axes and steps of a tensor of ``count`` numbers take."""
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
        raise DamagedError("a tensor's steps are none: the file is damaged")
    return axes, steps, cursor.rest()
