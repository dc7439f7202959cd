"""A matrix as the product of two thin ones: a truncated SVD in the metric of the layer's inputs.

Among all matrices of a given rank, the truncated SVD is the nearest to W (C. Eckart and G. Young, Psychometrika,
1936). However, trained weights have a nearly flat spectrum, and their plain SVD gains little: see
:func:`estimated_gain`. What matters is the layer's output, whose mean squared error is tr(D S Dᵀ) with S = E[x xᵀ] of
its inputs, which lie mostly in few directions. With S = L Lᵀ, the best matrix of a rank is the truncated SVD of W L,
times L⁻¹ (X. Wang et al., "SVD-LLM", 2024; Z. Yuan et al., "ASVD", 2023, with a diagonal L). ``hessian`` is S;
:mod:`capibara.compress.calibration.activations` measures it.

The factors are stored by another codec. With a ``step`` this is ``"uniform"``: each pair of singular vectors is
scaled so that an error of one step costs the same in every element of both factors, and the features of the right one
by the size of their inputs. A single step then gives the least error for the size, as for transform coefficients, and
components that are not worth a bit vanish, so that the rank need not be given. The right factor is fitted to the left
one after rounding. Without a step, the factors are stored in the tensor's own format, by default without further
loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import from_matrix
from capibara.compress.calibration.blas import one_thread
from capibara.compress.codecs.matrices import (
    check_axes,
    finite_matrix,
    get_axes,
    get_hessian,
    get_number,
    sides,
)
from capibara.compress.codecs.nested import Part, check_size, join, part_of, split
from capibara.compress.codecs.singular_values import (
    decompose,
    estimate,
    gaussians,
    once,
    remember,
    singular_values,
    worth,
)
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest

__all__ = [
    "LOW_RANK",
    "Factors",
    "LowRank",
    "candidates",
    "estimated_gain",
    "expected",
    "may_gain",
    "remember",
]

_OCTAVE = 8  # scales are powers of two to the eighth
_SETTINGS = (
    "rank",
    "step",
    "relative_step",
    "factors",
    "factor_settings",
    "hessian",
    "input_axes",
    "damping",
)


@dataclass(frozen=True)
class Factors:
    """The factors of a low-rank tensor, for layers that multiply by it without forming it.

    Attributes:
      left: float64 [out, rank].
      right: float64 [rank, features]. The matrix [out, features] is ``left @ right``: a layer's output is
        ``(x @ right.T) @ left.T``.
      axes: the tensor's axes along which its features run.
    """

    left: np.ndarray
    right: np.ndarray
    axes: tuple[int, ...]


class LowRank:
    """The codec ``"low_rank"``.

    Attributes:
      calibrated: whether a hessian is used.

    Settings; one of ``rank``, ``step`` or ``relative_step`` is required:
      rank: maximum number of singular values.
      step: of the rounded factors, scaled to be comparable with an error of that size in the tensor's elements.
      relative_step: the same, relative to the tensor's root mean square.
      factors: the codec of the factors; by default ``"uniform"`` with a step, otherwise ``"lossless"``.
      factor_settings: of that codec; not for ``"uniform"``, which uses ``step``.
      hessian: E[x xᵀ] ``[features, features]`` of the layer's inputs; without it all features have equal weight.
      damping: the share of the mean of the diagonal that is added to it; 0.01 by default.
      input_axes: the axes of the features; the last of a matrix, all but the first of other tensors by default.
    """

    calibrated = True

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: invalid settings, a tensor that is not a matrix, integers, NaN or infinity.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise CompressError(f"{name}: is not a setting of low_rank, which has {', '.join(_SETTINGS)}")
        if len(shape) < 2:
            raise CompressError(f"shape: got {shape}, expected two axes or more. Remedy: codec='lossless'.")
        axes = get_axes(settings, shape)
        matrix = finite_matrix(bits, form, shape, axes)
        step = _step(settings, matrix)
        rank = settings.get("rank")
        if (rank is not None or step is None) and (type(rank) is not int or rank < 1):
            raise CompressError(f"rank: got {rank!r}, expected an integer above 0, or a step instead")
        hessian = get_hessian(settings, matrix.shape[1])
        codec = settings.get("factors", "lossless" if step is None else "uniform")
        inner = dict(settings.get("factor_settings") or {})
        if (codec == "uniform") != (step is not None) or (inner and codec == "uniform"):
            raise CompressError(
                f"factors: got {codec!r} with step={step!r} and factor_settings={inner!r}: "
                "a step belongs to 'uniform', factor_settings to the other codecs"
            )
        left, singular, right = once(decompose, matrix, hessian)
        left, singular, right = left[:, :rank], singular[:rank], right[:rank]
        if step is None:
            parts = _kept(left, singular, right, form, codec, inner)
        else:
            weights = np.ones(matrix.shape[1]) if hessian is None else np.sqrt(hessian.diagonal())
            paying = worth(singular, matrix.shape, step)
            parts = _rounded(matrix, left[:, paying], singular[paying], weights, step)
        payload = join({"axes": axes}, parts)
        check_size(len(payload), math.prod(shape), CompressError)
        return payload

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        check_size(len(payload), math.prod(shape))
        found = self.parts(payload, form, shape, settings)
        with np.errstate(over="ignore", invalid="ignore"):
            product = found.left @ found.right
            if not np.isfinite(product).all():
                raise DamagedError("a tensor's factors are not finite: the file is damaged")
            values = np.clip(from_matrix(product, shape, found.axes), -largest(form), largest(form))
            return from_float(np.ascontiguousarray(values), form).reshape(-1)

    def parts(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Factors:
        """The factors, not multiplied.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        head, parts = split(payload, 4, 4 * math.prod(shape) + 4)
        if len(shape) < 2 or not form.is_float:
            raise DamagedError("a tensor of low rank is not a matrix of floats: the file is damaged")
        axes = check_axes(head.get("axes"), shape)
        out, features = sides(shape, axes)
        left, right, pairs, weights = parts
        rank = left.shape[0] if left.shape else 0
        if rank > min(out, features) or left.shape != (rank, out) or right.shape != (rank, features):
            raise DamagedError("a tensor's factors do not fit its shape: the file is damaged")
        if not left.form.is_float or not right.form.is_float:
            raise DamagedError("a tensor's factors are not floats: the file is damaged")
        with np.errstate(over="ignore", invalid="ignore"):
            a = left.values() / _scales(pairs, rank)[:, None]
            b = right.values() / _scales(weights, features)
        return Factors(a.T, b, axes)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        from capibara.compress.codecs.protocol import get_codec

        # The factors of a matrix have at most twice as many numbers as it has.
        codec = get_codec(settings.get("factors", "uniform"))
        wide = get_format("F64")
        return (
            2 * codec.size_bound(wide, 2 * count, settings.get("factor_settings") or {})
            + 4 * count
            + (1 << 16)
        )

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Not bounded: what is outside the leading directions is lost."""
        return None


LOW_RANK = LowRank()


def _step(settings: Mapping[str, Any], matrix: np.ndarray) -> float | None:
    step = get_number(settings, "step", 1e-30, 1e30)
    relative = get_number(settings, "relative_step", 1e-12, 1e3)
    if step is not None and relative is not None:
        raise CompressError("step: got one and a relative_step too, expected one of them")
    if relative is not None:
        size = float(np.sqrt((matrix**2).mean())) if matrix.size else 0.0
        return relative * size if size > 1e-30 else 1.0
    return step


def _kept(
    left: np.ndarray,
    singular: np.ndarray,
    right: np.ndarray,
    form: NumberFormat,
    codec: str,
    inner: Mapping[str, Any],
) -> list[Part]:
    """The factors in the tensor's format, or one that has the range for them, each with the root of the values."""
    root = np.sqrt(singular)[:, None]
    kind = form if form.name in ("F64", "F32", "BF16") else get_format("F32" if form.bits == 16 else "BF16")
    none = part_of(np.zeros(0, np.uint8), get_format("U8"), "lossless", {}, bits=True)
    return [part_of(x, kind, codec, inner) for x in (left.T * root, right * root)] + [none, none]


def _rounded(
    matrix: np.ndarray, left: np.ndarray, singular: np.ndarray, weights: np.ndarray, step: float
) -> list[Part]:
    """The factors rounded to multiples of a step, and the scales of pairs and of features."""
    uniform, wide, byte = {"step": step}, get_format("F32"), get_format("U8")
    pairs, pair_sizes = _codes(singular)
    features, feature_sizes = _codes(weights)
    # Both factors carry the singular values, so that both are rounded to the same error; one is divided off again.
    first = part_of((left * singular).T, wide, "uniform", uniform)
    rounded = first.values() / pair_sizes[:, None]
    # The columns are nearly orthonormal, but for what rounding did; the hessian drops out of their least squares.
    gram = rounded @ rounded.T
    gram[np.diag_indices(len(gram))] += 1e-9
    fitted = np.linalg.solve(gram, rounded @ matrix)
    second = part_of(fitted * feature_sizes, wide, "uniform", uniform)
    return [first, second, *(part_of(c, byte, "lossless", {}, bits=True) for c in (pairs, features))]


def _codes(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes as powers of two to the eighth, a byte each after the exponent of the largest; and those powers."""
    if not len(sizes) or (sizes == sizes[0]).all():
        power = 0 if not len(sizes) else round(_OCTAVE * math.log2(max(float(sizes[0]), 1e-30)))
        codes = np.zeros(0, np.uint8)
        steps = np.full(len(sizes), power)
    else:
        power = round(_OCTAVE * math.log2(float(sizes.max())))
        logs = np.rint(_OCTAVE * np.log2(np.maximum(sizes, sizes.max() * 2.0**-31))).astype(int)
        codes = np.clip(power - logs, 0, 255).astype(np.uint8)
        steps = power - codes.astype(int)
    head = np.frombuffer((power + 0x8000).to_bytes(2, "little"), np.uint8)
    return np.concatenate([head, codes]), 2.0 ** (steps / _OCTAVE)


def _scales(part: Part, count: int) -> np.ndarray:
    """What :func:`_codes` wrote; no bytes at all stand for ones."""
    if part.form.name != "U8" or part.shape not in ((0,), (2,), (2 + count,)):
        raise DamagedError("a tensor's scales do not fit its factors: the file is damaged")
    if part.shape == (0,):
        return np.ones(count)
    codes = part.bits()
    power = int.from_bytes(codes[:2].tobytes(), "little") - 0x8000
    if abs(power) > 1024 * _OCTAVE:
        raise DamagedError("a tensor's scale is out of range: the file is damaged")
    steps = np.full(count, power) if len(codes) == 2 else power - codes[2:].astype(int)
    return 2.0 ** (steps / _OCTAVE)


def candidates(form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Useful settings, from large payloads to small ones; empty if the tensor is not a floating-point matrix."""
    if not form.is_float or len(shape) < 2 or min(sides(shape, get_axes({}, shape))) < 16:
        return []
    return [{"relative_step": 2.0 ** (k / 2)} for k in range(-8, 5)]


def estimated_gain(matrix: np.ndarray, bits: float, hessian: np.ndarray | None = None) -> float:
    """Estimate how many fewer bits per element ``"low_rank"`` takes than ``"uniform"`` at the same error.

    Computed from the singular values alone, with both rounded by steps and entropy-coded; negative if low rank is
    worse, as for nearly all trained weights without a ``hessian``: their spectrum would have to fall fast enough to
    pay for two sets of singular vectors. With this estimate, an allocator can avoid the encoding.

    Args:
      matrix: [out, features].
      bits: per element with ``"uniform"``.
      hessian: E[x xᵀ] of the inputs; then the error is that of the outputs, for both.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise CompressError(f"matrix: got the shape {matrix.shape}, expected finite numbers [out, features]")
    if not matrix.any():
        return 0.0
    second = None if hessian is None else get_hessian({"hessian": hessian}, matrix.shape[1])
    singular = once(singular_values, matrix, second)
    # Rounding all numbers alike costs the mean of the diagonal, which is 1 but for the damping.
    logs, rates, errors = gaussians()
    deviation = 2.0 ** float(np.interp(bits, rates, logs))
    step = math.sqrt(float((matrix**2).mean())) / deviation
    allowed = matrix.size * step**2 * float(np.interp(math.log2(deviation), logs, errors))
    low, high = step * 2.0**-12, step * 2.0**12
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if estimate(singular, matrix.shape, middle)[0] < allowed else (low, middle)
    return bits - estimate(singular, matrix.shape, low)[1] / matrix.size


def may_gain(matrix: np.ndarray, bits: float, hessian: np.ndarray | None = None) -> bool:
    """Whether :func:`estimated_gain` can be above 0, told in a tenth of its time.

    Of g = ½ log₂ of the arithmetic over the geometric mean of the squared singular values, no transform saves more bits
    an element; the shorter factor takes its share more. Where g is below ``bits`` times that share, nothing is gained.

    Args:
      matrix, bits, hessian: as in :func:`estimated_gain`.
    """
    matrix = np.asarray(matrix)
    size = math.sqrt(float(np.square(matrix, dtype=np.float64).mean())) if matrix.size else 0.0
    if not 1e-100 < size < 1e100:
        return True
    # In float32: eigenvalues below a millionth of the largest are too large then, or no determinant comes out.
    matrix = (matrix / size).astype(np.float32)
    wide = len(matrix) <= matrix.shape[1]
    rows = matrix if wide else matrix.T
    second = None if hessian is None else get_hessian({"hessian": hessian}, matrix.shape[1])
    with one_thread(len(rows)):
        gram = (rows if second is None or not wide else rows @ second.astype(np.float32)) @ rows.T
        logs = [_log_determinant(gram), 0.0 if second is None or wide else _log_determinant(second)]
    if logs[0] is None or logs[1] is None:
        return True
    gain = (math.log2(matrix.size / len(gram)) - (logs[0] + logs[1]) / len(gram)) / 2
    return gain > bits * len(gram) / sum(matrix.shape)


def _log_determinant(matrix: np.ndarray) -> float | None:
    """log₂ of it, or ``None`` where the matrix is not positive definite."""
    try:
        return 2 * float(np.log2(np.linalg.cholesky(matrix.astype(np.float64)).diagonal()).sum())
    except np.linalg.LinAlgError:
        return None


def expected(
    matrix: np.ndarray, settings: Mapping[str, Any], hessian: np.ndarray | None = None
) -> tuple[float, float] | None:
    """Estimate the squared error and the bytes of a matrix encoded with a step, from its singular values alone.

    Args:
      matrix: [out, features].
      settings: with ``step`` or ``relative_step``; returns ``None`` without them.
      hessian: E[x xᵀ] of the inputs; then the error is that of the outputs.
    """
    matrix = np.asarray(matrix, np.float64)
    if (step := _step(settings, matrix)) is None:
        return None
    second = None if hessian is None else get_hessian({"hessian": hessian}, matrix.shape[1])
    error, bits = estimate(once(singular_values, matrix, second), matrix.shape, step)
    return error, bits / 8
