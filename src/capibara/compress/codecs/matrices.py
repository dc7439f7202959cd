"""A tensor as a layer's matrix [out, features], and the moments of the layer's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import as_matrix, stack_of
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, to_float

__all__ = [
    "BLOCK",
    "LARGEST",
    "InOrder",
    "check_axes",
    "check_finite",
    "finite_matrix",
    "get_axes",
    "get_hessian",
    "get_moments",
    "get_number",
    "sides",
]

BLOCK = 1 << 18  # numbers of which something is computed at a time

LARGEST = 1e140  # sums of squares of so large numbers are finite


def get_axes(settings: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """``input_axes``: the tensor's axes along which a layer's inputs run.

    By default the last of a matrix, and all but the first of other tensors, as in torch.
    """
    given = settings.get("input_axes")
    if given is None:
        return tuple(range(1, len(shape))) if len(shape) != 1 else (0,)
    if (
        not isinstance(given, list | tuple)
        or not all(type(a) is int and 0 <= a < len(shape) for a in given)
        or list(given) != sorted(set(given))
    ):
        raise CompressError(
            f"input_axes: got {given!r} for the shape {shape}, expected some of its axes in order, such as [1]"
        )
    return tuple(given)


def check_axes(given: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same for values from a file."""
    try:
        return get_axes({"input_axes": given}, shape)
    except CompressError:
        raise DamagedError(f"a tensor's input axes are {given!r:.40}: the file is damaged") from None


def get_number(settings: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A numeric setting within limits, or ``None`` if it is missing."""
    value = settings.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, float | int | np.floating | np.integer)
        or isinstance(value, bool)
        or not low <= value <= high
    ):
        raise CompressError(f"{name}: got {value!r}, expected a number from {low:g} to {high:g}")
    return float(value)


def get_moments(hessian: Any, features: int) -> np.ndarray:
    """Second moments, float64 [features, features]; also of an entry of a stack, [1, features, features].

    Raises:
      CompressError: a wrong shape, or invalid values.
    """
    stack = stack_of(hessian)
    if stack is not None and len(stack) != 1:
        raise CompressError(
            f"hessian: got those of {len(stack)} entries of a stack, which are coded one by one. Remedy: "
            "ArchiveWriter.add, which does that, or one entry."
        )
    found = np.asarray(hessian if stack is None else stack[0], np.float64)
    if found.shape != (features, features):
        raise CompressError(
            f"hessian: got the shape {found.shape}, expected {(features, features)}, "
            "the second moments of the layer's inputs"
        )
    if (
        not np.isfinite(found).all()
        or not math.isfinite(float(np.trace(found)))
        or (np.diag(found) < 0).any()
    ):
        raise CompressError(
            "hessian: got a matrix that is not a second moment of inputs (NaN, infinite or negative)"
        )
    return found


def get_hessian(settings: Mapping[str, Any], features: int) -> np.ndarray | None:
    """``hessian``: E[x xᵀ] of the inputs, scaled to a mean diagonal of 1 and damped by ``damping`` (0.01) of that.

    Damping makes it positive definite, and accounts for inputs that are not in the calibration data.
    """
    given = settings.get("hessian")
    damping = get_number(settings, "damping", 0.0, 1e3)
    if given is None:
        if damping is not None:
            raise CompressError("damping: got one without a hessian. Remedy: calibrate, or leave it out.")
        return None
    second = get_moments(given, features).copy()
    mean = float(second.diagonal().mean()) if features else 1.0
    if not mean > 0:
        raise CompressError("hessian: got a matrix that is not a second moment of inputs (all zero)")
    if not np.allclose(second, second.T, rtol=1e-6, atol=1e-9 * mean):
        raise CompressError("hessian: got one that is not symmetric, expected E[x xᵀ]")
    second /= mean
    second[np.diag_indices(features)] += 0.01 if damping is None else max(damping, 1e-9)
    return second


def finite_matrix(
    bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], axes: tuple[int, ...]
) -> np.ndarray:
    """The values as float64 [out, features].

    Raises:
      CompressError: integers, NaN or infinity.
    """
    check_finite(bits, form)
    values = to_float(bits, form).astype(np.float64)
    return as_matrix(values.reshape(shape), axes)


def check_finite(bits: np.ndarray, form: NumberFormat) -> None:
    """Check that all values have finite squares.

    Raises:
      CompressError: integers, or values that are not finite or whose squares are not.
    """
    most = 0.0
    for first in range(0, max(bits.size, 1), BLOCK):
        with np.errstate(invalid="ignore"):  # quiets NaNs
            values = to_float(bits[first : first + BLOCK], form)
        if not np.isfinite(values).all():
            raise CompressError("values: NaN or infinite. Remedy: codec='lossless' for this tensor.")
        most = max(most, float(np.abs(values).max(initial=0)))
    if most > LARGEST:
        raise CompressError(
            f"values: some are above {LARGEST:g}, whose squares overflow. Remedy: codec='lossless' for this tensor."
        )


class InOrder:
    """The elements of a tensor in the order of its matrix [out, features], in blocks, without copying all of them.

    Args:
      bits: the elements [count], in the order of the tensor.
      shape: of the tensor.
      axes: those along which its features run.
    """

    def __init__(self, bits: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
        others = [a for a in range(len(shape)) if a not in axes]
        self._array = bits.reshape(shape).transpose(*others, *axes)
        self.is_plain = self._array.flags.c_contiguous
        self.size = self._array.size

    def take(self, start: int, stop: int) -> np.ndarray:
        """Those elements [stop - start]; do not modify them."""
        return self._array.reshape(-1)[start:stop] if self.is_plain else self._array.flat[start:stop]

    def put(self, start: int, numbers: np.ndarray) -> None:
        """Write elements [count] from ``start`` on."""
        stop = start + len(numbers)
        if self.is_plain:
            self._array.reshape(-1)[start:stop] = numbers
        else:
            self._array.flat[start:stop] = numbers

    def blocks(self, step: int = BLOCK) -> Iterator[np.ndarray]:
        """All of them, ``step`` at a time."""
        for start in range(0, self.size, step):
            yield self.take(start, min(start + step, self.size))


def sides(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of outputs and features of the matrix."""
    features = math.prod(shape[a] for a in axes)
    return math.prod(shape[a] for a in range(len(shape)) if a not in axes), features
