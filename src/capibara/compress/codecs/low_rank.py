"""A matrix as the product of two thin ones: truncated singular values, in the metric of the layer's inputs.

Of all matrices of a rank the truncated SVD is the nearest to W (C. Eckart and G. Young, Psychometrika, 1936). Trained
weights have a nearly flat spectrum, though, and their plain SVD pays little: see :func:`estimated_gain`. What matters
is the layer's output, whose mean square error is tr(D S Dᵀ) with S = E[x xᵀ] of its inputs, and those lie mostly in
few directions. With S = L Lᵀ, the best matrix of a rank is the truncated SVD of W L, times L⁻¹ (X. Wang et al.,
"SVD-LLM", 2024; Z. Yuan et al., "ASVD", 2023, with a diagonal L). ``hessian`` is S;
:mod:`capibara.compress.calibration.activations` measures it.

The factors go through another codec. With a ``step`` that is ``"uniform"``, and then each pair of singular vectors is
scaled so that an error of one step costs the same in every number of both factors, and the features of the right one
by the size of their inputs: one step for all is then the least error for the bits, as it is of transform
coefficients, and what is worth no bit falls out, so that the rank need not be given. The right factor is fitted to
the left one after that was rounded. Without a step, the factors are kept in the tensor's own format, by default
without further loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import from_matrix
from capibara.compress.codecs.matrices import (
    check_axes,
    finite_matrix,
    get_axes,
    get_hessian,
    get_number,
    sides,
)
from capibara.compress.codecs.nested import Part, check_size, join, part_of, split
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest

__all__ = ["LOW_RANK", "Factors", "LowRank", "candidates", "estimated_gain", "expected", "remember"]

_OCTAVE = 8  # scales are powers of two to the eighth
_TALL = 4  # a side that is so many times the other is left out of a decomposition
_remembered: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("capibara_low_rank", default=None)
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
    """What a low-rank tensor is made of, for layers that multiply by it without putting it together.

    Attributes:
      left: float64 [out, rank].
      right: float64 [rank, features]. The matrix [out, features] is ``left @ right``: a layer's output is
        ``(x @ right.T) @ left.T``.
      axes: of the tensor, those along which its features run.
    """

    left: np.ndarray
    right: np.ndarray
    axes: tuple[int, ...]


class LowRank:
    """The codec ``"low_rank"``.

    Settings, of which ``rank``, ``step`` or ``relative_step`` must be given:
      rank: at most so many singular values.
      step: of the rounded factors, an error of so much in a number of the tensor being about as bad.
      relative_step: the same, in root mean squares of the tensor.
      factors: the codec of the factors; ``"uniform"`` with a step, else ``"lossless"`` by default.
      factor_settings: of that codec; not for ``"uniform"``, whose step it is.
      hessian: E[x xᵀ] ``[features, features]`` of the layer's inputs; without it all features count alike.
      damping: is added to its diagonal, as a share of the mean of that; 0.01 by default.
      input_axes: the axes of the features; the last of a matrix, all but the first of other tensors by default.
    """

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: settings that are none, a tensor that is no matrix, integers, or numbers that are not finite.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise CompressError(f"{name}: is no setting of low_rank, which has {', '.join(_SETTINGS)}")
        if len(shape) < 2:
            raise CompressError(f"shape: got {shape}, expected two axes or more. Remedy: codec='lossless'.")
        axes = get_axes(settings, shape)
        matrix = finite_matrix(bits, form, shape, axes)
        step = _step(settings, matrix)
        rank = settings.get("rank")
        if (rank is not None or step is None) and (type(rank) is not int or rank < 1):
            raise CompressError(f"rank: got {rank!r}, expected a whole number above 0, or a step instead")
        hessian = get_hessian(settings, matrix.shape[1])
        codec = settings.get("factors", "lossless" if step is None else "uniform")
        inner = dict(settings.get("factor_settings") or {})
        if (codec == "uniform") != (step is not None) or (inner and codec == "uniform"):
            raise CompressError(
                f"factors: got {codec!r} with step={step!r} and factor_settings={inner!r}: "
                "a step belongs to 'uniform', factor_settings to the other codecs"
            )
        left, singular, right = _once(_decompose, matrix, hessian)
        left, singular, right = left[:, :rank], singular[:rank], right[:rank]
        if step is None:
            parts = _kept(left, singular, right, form, codec, inner)
        else:
            weights = np.ones(matrix.shape[1]) if hessian is None else np.sqrt(hessian.diagonal())
            worth = _worth(singular, matrix.shape, step)
            parts = _rounded(matrix, left[:, worth], singular[worth], weights, step)
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
        """The factors, without multiplying them.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        head, parts = split(payload, 4, 4 * math.prod(shape) + 4)
        if len(shape) < 2 or not form.is_float:
            raise DamagedError("a tensor of low rank is no matrix of floats: the file is damaged")
        axes = check_axes(head.get("axes"), shape)
        out, features = sides(shape, axes)
        left, right, pairs, weights = parts
        rank = left.shape[0] if left.shape else 0
        if rank > min(out, features) or left.shape != (rank, out) or right.shape != (rank, features):
            raise DamagedError("a tensor's factors do not fit its shape: the file is damaged")
        if not left.form.is_float or not right.form.is_float:
            raise DamagedError("a tensor's factors are no floats: the file is damaged")
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
        """Not bounded: what lies outside of the leading directions is gone."""
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


@contextlib.contextmanager
def remember() -> Iterator[None]:
    """Inside, in this thread, a matrix that is coded with several settings is decomposed once."""
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def _once(
    what: Callable[[np.ndarray, np.ndarray | None], Any], matrix: np.ndarray, hessian: np.ndarray | None
) -> Any:
    """``what(matrix, hessian)``, or what it was before inside :func:`remember`."""
    if (known := _remembered.get()) is None:
        return what(matrix, hessian)
    some = [matrix] if hessian is None else [matrix, hessian]
    key = (what, *((a.shape, hashlib.blake2b(np.ascontiguousarray(a).data).digest()) for a in some))
    if key not in known:
        known[key] = what(matrix, hessian)
    return known[key]


def _thin(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, σ and V of a matrix; of a long one from its short side, by the Gram matrix.

    What that loses are values below 1e-8 of the largest: U·diag(σ)·V is the matrix all the same.
    """
    if matrix.shape[1] >= _TALL * len(matrix):
        left, singular, right = _thin(matrix.T)
        return right.T, singular, left.T
    if len(matrix) < _TALL * matrix.shape[1]:
        return np.linalg.svd(matrix, full_matrices=False)
    right = np.linalg.eigh(matrix.T @ matrix)[1][:, ::-1].T
    scaled = matrix @ right.T
    singular = np.sqrt((scaled**2).sum(0))
    order = np.argsort(-singular, kind="stable")
    singular = singular[order]
    return scaled[:, order] / np.maximum(singular, 1e-300), singular, right[order]


def _decompose(matrix: np.ndarray, hessian: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U [out, k], σ [k] and R [k, features]: U·diag(σ)·R is the matrix; its outputs owe most to the first."""
    if hessian is None:
        return _thin(matrix)
    values, vectors = np.linalg.eigh(hessian)
    root = np.sqrt(np.maximum(values, values[-1] * 1e-12))
    left, singular, right = np.linalg.svd(matrix @ (vectors * root), full_matrices=False)
    return left, singular, (right / root) @ vectors.T


def _singular_values(matrix: np.ndarray, hessian: np.ndarray | None) -> np.ndarray:
    """Those of :func:`_decompose` alone, from the Gram matrix of the shorter side: good to 1e-8 of the largest."""
    if len(matrix) <= matrix.shape[1]:
        gram = (matrix if hessian is None else matrix @ hessian) @ matrix.T
    else:
        gram = matrix.T @ matrix
        if hessian is not None:
            lower = np.linalg.cholesky(hessian)
            gram = lower.T @ gram @ lower
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))


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


def _worth(singular: np.ndarray, shape: tuple[int, ...], step: float) -> np.ndarray:
    """Which singular values lower the error by more than their bits would elsewhere.

    A bit elsewhere lowers a squared error of step² / 12 at the rate of ln 4.
    """
    saved, bits = singular**2, np.zeros(len(singular))
    for size in shape:
        rate, error = _gaussian(singular / (math.sqrt(size) * step))
        bits, saved = bits + size * rate, saved - size * step**2 * error
    return (saved > math.log(4) / 12 * step**2 * bits) & (singular > 0)


@cache
def _gaussians() -> np.ndarray:
    """For Gaussian numbers with deviations of 2⁻⁴ … 2⁸ steps: log₂ of those, bits and mean square errors [3, 49].

    Rounded to the nearest multiple, entropy-coded, and decoded as the mean of what fell there.
    """
    rows = []
    for exponent in np.arange(-4, 8.25, 0.25):
        deviation = 2.0**exponent
        edges = (np.arange(-int(8 * deviation) - 2, int(8 * deviation) + 2) + 0.5) / deviation
        below = np.array([0.0, *(0.5 * math.erfc(-x / math.sqrt(2)) for x in edges), 1.0])
        density = np.array([0.0, *(np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)), 0.0])
        share, moment = np.diff(below), -np.diff(density)
        used = share > 1e-15
        bits = -float((share[used] * np.log2(share[used])).sum())
        error = 1 - float((moment[used] ** 2 / share[used]).sum())
        rows.append((exponent, bits, max(error, 0.0) * deviation**2))
    return np.array(rows).T


def _gaussian(deviations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits, and mean square errors in steps², of Gaussian numbers with these deviations in steps."""
    logs, bits, errors = _gaussians()
    at = np.log2(np.maximum(deviations, 1e-30))
    rate = np.interp(at, logs, bits) + np.maximum(at - logs[-1], 0)
    small = at < logs[0]
    return np.where(small, 0.0, rate), np.where(small, deviations**2, np.interp(at, logs, errors))


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
    """Settings worth trying, from large payloads to small ones; none for what is no matrix of floats."""
    if not form.is_float or len(shape) < 2 or min(sides(shape, get_axes({}, shape))) < 16:
        return []
    return [{"relative_step": 2.0 ** (k / 2)} for k in range(-8, 5)]


def estimated_gain(matrix: np.ndarray, bits: float, hessian: np.ndarray | None = None) -> float:
    """About how many bits a number of a matrix takes less by ``"low_rank"`` than by ``"uniform"`` at the same error.

    From the singular values alone, with both rounded by steps and entropy-coded; negative where low rank is the worse,
    which it is for nearly all trained weights without a ``hessian``: their spectrum would have to fall fast enough to
    pay for two sets of singular vectors. An allocator that asks this first spares itself the coding.

    Args:
      matrix: [out, features].
      bits: of a number by ``"uniform"``.
      hessian: E[x xᵀ] of the inputs; then the error is that of the outputs, for both.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise CompressError(f"matrix: got the shape {matrix.shape}, expected finite numbers [out, features]")
    if not matrix.any():
        return 0.0
    second = None if hessian is None else get_hessian({"hessian": hessian}, matrix.shape[1])
    singular = _once(_singular_values, matrix, second)
    # Rounding all numbers alike costs the mean of the diagonal, which is 1 but for the damping.
    logs, rates, errors = _gaussians()
    deviation = 2.0 ** float(np.interp(bits, rates, logs))
    step = math.sqrt(float((matrix**2).mean())) / deviation
    allowed = matrix.size * step**2 * float(np.interp(math.log2(deviation), logs, errors))
    low, high = step * 2.0**-12, step * 2.0**12
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if _estimate(singular, matrix.shape, middle)[0] < allowed else (low, middle)
        )
    return bits - _estimate(singular, matrix.shape, low)[1] / matrix.size


def expected(
    matrix: np.ndarray, settings: Mapping[str, Any], hessian: np.ndarray | None = None
) -> tuple[float, float] | None:
    """About the squared error and the bytes of a matrix coded with a step, from its singular values alone.

    Args:
      matrix: [out, features].
      settings: with ``step`` or ``relative_step``; ``None`` comes back without them.
      hessian: E[x xᵀ] of the inputs; then the error is that of the outputs.
    """
    matrix = np.asarray(matrix, np.float64)
    if (step := _step(settings, matrix)) is None:
        return None
    second = None if hessian is None else get_hessian({"hessian": hessian}, matrix.shape[1])
    error, bits = _estimate(_once(_singular_values, matrix, second), matrix.shape, step)
    return error, bits / 8


def _estimate(singular: np.ndarray, shape: tuple[int, ...], step: float) -> tuple[float, float]:
    """The squared error and the bits of both factors at a step."""
    kept = singular[_worth(singular, shape, step)]
    error, bits = float((singular**2).sum() - (kept**2).sum()), 0.0
    for size in shape:
        rate, lost = _gaussian(kept / (math.sqrt(size) * step))
        bits += size * float(rate.sum())
        error += size * step**2 * float(lost.sum())
    return error, bits
