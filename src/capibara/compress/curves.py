"""Rate–distortion points of each codec on a tensor: bytes and squared error at useful settings, measured by encoding.

The codec ``uniform`` has a continuous step, so its points form a curve: it is measured at steps an octave apart on
some rows of the tensor; between them, log₂ error and bytes are nearly linear in log₂ step. Other codecs list their
settings (``candidates``). If they compete with ``uniform``, they are tried on the same rows first, and those that
come close are measured on the whole tensor; a codec that predicts its result (``expected``) is measured only if an
allocation chooses it.

If the second moments S = E[x xᵀ] of a layer's inputs are known, the error of its outputs, tr(D S Dᵀ), is used instead
of the error D of its weights.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Metric, as_matrix
from capibara.compress.codecs.fixed import Fixed
from capibara.compress.codecs.fixed_settings import feeds_back
from capibara.compress.codecs.low_rank import remember
from capibara.compress.codecs.matrices import get_axes
from capibara.compress.codecs.protocol import CODECS, get_codec, settings_of_rows, stored_settings
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container.index import CHUNK
from capibara.compress.container.writer import coded_shape, rows_together
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float
from capibara.compress.samples import settings_of_sample, take_sample

__all__ = [
    "Curve",
    "Point",
    "candidates",
    "coded_size",
    "measure",
    "measure_curve",
    "moments_for",
    "payloads_of",
]

_FINE = 16  # steps to choose from in an octave
_MOST = 6  # settings of a codec that are tried where it competes with others
_RATES = (0.1, 18.0)  # bits of a number between which that is done, at most


@dataclass(frozen=True)
class Point:
    """A way to store one tensor.

    Attributes:
      codec: its name.
      settings: of the codec.
      size: bytes of the payload.
      error: sum of squared errors.
      payloads: of the chunks of an archive, if available.
      estimated: whether size and error are estimates; those of ``uniform`` are not marked.
    """

    codec: str
    settings: Mapping[str, Any]
    size: float
    error: float
    payloads: tuple[bytes, ...] | None = field(default=None, repr=False, compare=False)
    estimated: bool = False


@dataclass
class Curve:
    """The ways to store one tensor.

    Attributes:
      count: elements of the tensor.
      square: the sum of their squares.
      points: measured on the whole tensor; the first is ``lossless``.
      log_steps, sizes, errors: of ``uniform`` at those log₂ steps, estimated; empty if it is not used.
      settings: of ``uniform``, besides its step.
      weight: of this tensor's squared error.
      scale: actual over estimated bytes of ``uniform``; updated while encoding.
    """

    count: int
    square: float
    points: list[Point]
    log_steps: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    errors: np.ndarray = field(default_factory=lambda: np.zeros(0))
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    scale: float = 1.0

    def only(self, codec: str) -> Curve:
        """The ways with one codec, as measured by :func:`measure_curve`, and ``lossless``."""
        points = [p for p in self.points if p.codec in ("lossless", codec)]
        none = {} if codec == "uniform" else dict.fromkeys(("log_steps", "sizes", "errors"), np.zeros(0))
        return replace(self, points=points, scale=1.0, **none)

    def best(self, price: float) -> Point:
        """The point with the least ``weight · error + price · size``."""
        points = list(self.points)
        if len(self.log_steps):
            cost = self.weight * self.errors + price * self.scale * self.sizes
            points.append(self._uniform(int(np.argmin(cost))))
        return min(points, key=lambda p: self.weight * p.error + price * p.size)

    def nearest(self, size: float) -> Point | None:
        """The point with the least error within that many bytes."""
        points = [p for p in self.points if p.size <= size]
        fits = np.flatnonzero(self.scale * self.sizes <= size)
        if len(fits):
            points.append(self._uniform(int(fits[0])))
        return min(points, key=lambda p: p.error, default=None)

    def _uniform(self, i: int) -> Point:
        given = {"step": float(2.0 ** self.log_steps[i]), **self.settings}
        return Point("uniform", given, float(self.scale * self.sizes[i]), float(self.errors[i]))

    @property
    def smallest(self) -> float:
        """The fewest bytes."""
        sizes = [p.size for p in self.points]
        return min([*sizes, *(self.scale * self.sizes[-1:])])


def candidates(codec: str, form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Useful settings of a codec for such a tensor, from large to small payloads; empty if it cannot be used.

    The codec provides them, by a function ``candidates(form, shape)`` in its module or as a method.
    """
    how = CODECS[codec]
    function: Callable[..., Iterable[dict[str, Any]]] | None = getattr(how, "candidates", None)
    if function is None:
        function = getattr(sys.modules[type(how).__module__], "candidates", None)
    return [] if function is None else list(function(form, shape))


def finite_or_zero(bits: np.ndarray, form: NumberFormat) -> np.ndarray:
    """The values as float64, with NaN and infinity replaced by zero."""
    with np.errstate(invalid="ignore"):  # quiets NaNs
        values = to_float(bits, form).astype(np.float64)
    values[~np.isfinite(values)] = 0
    return values


def squared_error(
    a: np.ndarray,
    b: np.ndarray,
    form: NumberFormat,
    metric: Metric | None = None,
    shape: tuple[int, ...] | None = None,
) -> float:
    """The sum of squared differences of values given as bits.

    With a ``metric`` for a tensor of that shape it is tr(D S Dᵀ), scaled so that it is the same for S = 1. NaN and
    infinity in ``a`` have difference 0 if ``b`` has the same bits, otherwise infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        values = to_float(a, form).astype(np.float64)
        difference = values - to_float(b, form)
    if not np.isfinite(difference).all():
        strange = ~np.isfinite(values)
        if (a.reshape(values.shape)[strange] != b.reshape(values.shape)[strange]).any():
            return math.inf
        difference[strange] = 0
    if metric is None:
        return float(np.dot(difference.ravel(), difference.ravel()))
    assert shape is not None
    return metric.square(difference.reshape(shape))


def measure(
    codec: str,
    settings: Mapping[str, Any],
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    metric: Metric | None = None,
    keep: int = 0,
) -> Point:
    """Encode, decode, and measure the result.

    Args:
      metric: as in :func:`squared_error`.
      keep: the most bytes of payloads to return with the point.

    Raises:
      CompressError: the codec does not support this tensor.
    """
    how, size, error = get_codec(codec), 0, 0.0
    payloads: list[bytes] = []
    for part, some, given, known in _chunks(codec, bits, shape, settings, metric):
        payload = how.encode(part, form, some, given)
        decoded = how.decode(memoryview(payload), form, some, given)
        size += len(payload)
        error += squared_error(part, decoded, form, known, some)
        if size <= keep:
            payloads.append(payload)
    return Point(codec, settings, size, error, tuple(payloads) if size <= keep else None)


def decoded_bits(
    codec: str, settings: Mapping[str, Any], bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]
) -> np.ndarray:
    """What an archive gives back for a tensor.

    Raises:
      CompressError: the codec cannot take this tensor.
    """
    how = get_codec(codec)
    return np.concatenate(
        [
            how.decode(memoryview(how.encode(part, form, some, given)), form, some, given)
            for part, some, given, _ in _chunks(codec, bits, shape, settings, None)
        ]
    )


def coded_size(
    codec: str, settings: Mapping[str, Any], bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]
) -> int:
    """Bytes of a tensor's payloads, with the chunks of an archive.

    Raises:
      CompressError: the codec does not support this tensor.
    """
    return sum(map(len, payloads_of(codec, settings, bits, form, shape)))


def payloads_of(
    codec: str, settings: Mapping[str, Any], bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]
) -> Iterator[bytes]:
    """A tensor's payloads, one after another, as an archive cuts it into chunks.

    Raises:
      CompressError: the codec cannot take this tensor.
    """
    how = get_codec(codec)
    for part, some, given, _ in _chunks(codec, bits, shape, settings, None):
        yield how.encode(part, form, some, given)


def _chunks(
    codec: str,
    bits: np.ndarray,
    shape: tuple[int, ...],
    settings: Mapping[str, Any],
    metric: Metric | None,
) -> Iterator[tuple[np.ndarray, tuple[int, ...], Mapping[str, Any], Metric | None]]:
    """A tensor as an archive cuts it: numbers, shape, settings and metric of some rows."""
    if (coded := coded_shape(shape, get_codec(codec))) != shape:
        settings = stored_settings(settings)  # calibration is of the tensor's own axes, as a metric is
        shape = coded if metric is None else shape
    rows, step = shape[0] if shape else 1, rows_together(shape, get_codec(codec), settings)
    flat = bits.reshape(-1)
    if step >= rows:
        yield flat, shape, settings, metric
        return
    length = len(flat) // rows
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        known = None if metric is None else metric.of_rows(start, stop, rows)
        part = np.ascontiguousarray(flat[start * length : stop * length])
        yield part, (stop - start, *shape[1:]), settings_of_rows(settings, shape, start, stop), known


def measure_curve(
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    codecs: Iterable[str],
    *,
    lossless: int,
    moments: Mapping[str, Any] | None = None,
) -> Curve:
    """The ways to store a tensor.

    Args:
      bits, form, shape: of the tensor. Of numbers that are not finite nothing is measured.
      codecs: names of the candidates besides ``lossless``.
      lossless: the bytes of ``lossless``.
      moments: settings of calibration, ``hessian`` and ``input_axes``, of a layer.
    """
    with remember():
        return _measure_curve(bits, form, shape, list(codecs), lossless, moments)


def _measure_curve(
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    codecs: list[str],
    lossless: int,
    moments: Mapping[str, Any] | None,
) -> Curve:
    metric = None if moments is None else Metric.of(moments)
    square = 0.0
    for part, length, _, known in _chunks("lossless", bits, shape, {}, metric):
        values = finite_or_zero(part, form).ravel()
        square += float(np.dot(values, values)) if known is None else known.square(values.reshape(length))
    curve = Curve(bits.size, square, [Point("lossless", {}, lossless, 0.0)], settings=moments or {})
    some = take_sample(bits, shape, metric)
    sampled = settings_of_sample(moments, shape, some[1])
    if "uniform" in codecs:
        _measure_uniform(curve, *some, form, _metric_of_sample(metric, sampled), sampled)
    for codec in codecs:
        if codec in ("lossless", "uniform"):
            continue
        if bits.size > CHUNK and _looks_ahead(codec):
            continue  # it is cut into chunks, in each of which the rows share less
        if "uniform" in codecs and not _gains(codec, bits, form, shape, metric):
            continue
        tried = candidates(codec, form, shape)
        known = moments_for(codec, moments, shape)
        if "uniform" in codecs and len(tried) > _MOST:
            tried = tried[:: -(-len(tried) // _MOST)]
        if "uniform" in codecs and _looks_ahead(codec):
            # What rows share is not seen in some of them: a codec that lives on it is looked at as a whole.
            with contextlib.suppress(CompressError):  # this codec is not for this tensor
                given = [{**settings, **known} for settings in tried]
                curve.points += _expected(curve, codec, given, bits, form, shape, metric)
            continue
        by = _metric_of_sample(metric, sampled)
        at_sight = sampled if known and by is not metric else known
        if "uniform" in codecs and len(tried) > 1:
            # One look at the middle first: a codec that is far off there is not the best at its ends.
            middle = {**tried[len(tried) // 2], **at_sight}
            try:
                if not _competes(curve, codec, middle, *some, form, by, slack=0.5):
                    continue
            except CompressError:
                pass  # its other settings may do
        for settings in tried:
            given = {**settings, **known}
            try:
                seen_with = {**settings, **at_sight}
                if "uniform" in codecs and not _competes(curve, codec, seen_with, *some, form, by):
                    continue
                curve.points.append(measure(codec, given, bits, form, shape, metric))
            except CompressError:
                continue  # this codec is not for this tensor
    return curve


def _metric_of_sample(metric: Metric | None, sampled: Mapping[str, Any]) -> Metric | None:
    """Of a stack that of the entries in the sample."""
    if metric is None or not isinstance(metric.second, tuple):
        return metric
    found = Metric.of(sampled)
    return metric if len(found.second) == len(metric.second) else found


def moments_for(codec: str, moments: Mapping[str, Any] | None, shape: tuple[int, ...]) -> Mapping[str, Any]:
    """The moments, if the codec supports them for such a tensor."""
    how = CODECS[codec]
    if moments is None or not (isinstance(how, Fixed) or getattr(how, "calibrated", False)):
        return {}
    if isinstance(how, Fixed) and not feeds_back(moments["input_axes"], shape):
        return {}
    return moments


def _gains(
    codec: str, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], metric: Metric | None
) -> bool:
    """Whether a codec that can tell from the whole tensor alone does not rule itself out."""
    guess = getattr(_module(codec), "may_gain", None)
    return guess is None or any(
        guess(rows, 3.0, second) for rows, second, _ in _matrices(bits, form, shape, metric)
    )


def _competes(
    curve: Curve,
    codec: str,
    settings: Mapping[str, Any],
    bits: np.ndarray,
    shape: tuple[int, ...],
    form: NumberFormat,
    metric: Metric | None,
    slack: float = 0.1,
) -> bool:
    """Whether these rows come out at an error that is not far above that of ``uniform`` in as many bytes."""
    share = curve.count / bits.size
    point = measure(codec, settings, bits, form, shape, metric)
    return _near(curve, point.error * share, point.size * share, slack)


def _near(curve: Curve, error: float, size: float, slack: float) -> bool:
    """Whether an error is at most by ``slack`` (of log₂) above that of ``uniform`` in as many bytes."""
    if error == 0 and size > curve.points[0].size:
        return False  # nothing is lost, but "lossless" is smaller
    # Sizes fall along the curve.
    best = np.interp(size, curve.sizes[::-1], np.log2(curve.errors[::-1]))
    return math.log2(max(error, 1e-300)) < best + slack


def _expected(
    curve: Curve,
    codec: str,
    tried: list[dict[str, Any]],
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    metric: Metric | None,
) -> list[Point]:
    """Of the settings of a codec that looks ahead those that come near ``uniform``, as it expects them: coding a large
    tensor with each takes longer than all else, and few are chosen.

    Raises:
      CompressError: the codec cannot take this tensor.
    """
    expected: list[Point] = []
    matrices = list(_matrices(bits, form, shape, metric))
    for given in tried:
        error = size = 0.0
        for rows, second, level in matrices:
            lost, bytes_ = _module(codec).expected(rows, given, second)
            error, size = error + level * lost, size + bytes_
        if _near(curve, error, size, 0.3):  # what is expected is a little off
            expected.append(Point(codec, given, size, error, estimated=True))
    return expected


def _module(codec: str) -> Any:
    return sys.modules[type(CODECS[codec]).__module__]


def _looks_ahead(codec: str) -> bool:
    """Whether the codec's module says what to expect of it (``expected``), without coding anything."""
    return hasattr(_module(codec), "expected")


def _matrices(
    bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], metric: Metric | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None, float]]:
    """The matrix [out, features] of a tensor, or of each entry of a stack, with its moments and what these are in the
    mean, if that counts."""
    values = to_float(bits, form).astype(np.float64).reshape(shape)
    if metric is None:
        yield as_matrix(values, get_axes({}, shape)), None, 1.0
    elif isinstance(metric.second, tuple):
        for rows, second in zip(metric.entries(values), metric.second, strict=True):
            yield rows, second, float(second.diagonal().mean())
    else:
        yield as_matrix(values, metric.axes), metric.second, 1.0


def _measure_uniform(
    curve: Curve,
    bits: np.ndarray,
    shape: tuple[int, ...],
    form: NumberFormat,
    metric: Metric | None,
    given: Mapping[str, Any],
) -> None:
    values = to_float(bits, form).astype(np.float64)
    deviation = math.sqrt(float((values**2).mean())) or 1e-30
    # The entropy of a Gaussian in steps is log2(4.13 · deviation / step), with 4.13 = sqrt(2πe).
    top = math.log2(4.13 * deviation)
    last, first = math.ceil(top - _RATES[0]) + 2, math.floor(top - min(_RATES[1], form.mantissa + 2))
    # Above eight bits the curve is straight, above four nearly so.
    middle = max(first, math.floor(top - 8))
    bent = max(middle, math.floor(top - 4))
    steps = np.array([*range(first, middle, 5), *range(middle, bent, 2), *range(bent, last + 1)], np.float64)
    points = _measured(2.0**steps, bits, form, shape, metric, given)
    share = curve.count / bits.size
    # A curve that does not fall would not be one.
    sizes = np.maximum.accumulate(np.array([p.size for p in points])[::-1])[::-1] * share
    errors = np.maximum.accumulate(np.array([max(p.error, 1e-300) for p in points])) * share
    fine = np.linspace(first, last, (last - first) * _FINE + 1)
    curve.log_steps = fine
    curve.sizes = np.interp(fine, steps, sizes)
    curve.errors = 2.0 ** np.interp(fine, steps, np.log2(errors))


def _measured(
    steps: np.ndarray,
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    metric: Metric | None,
    given: Mapping[str, Any],
) -> list[Point]:
    """``uniform`` with each of the steps, those of one chunk together."""
    if metric is None or coded_shape(shape, UNIFORM) != shape:
        return [measure("uniform", {"step": s, **given}, bits, form, shape, metric) for s in steps.tolist()]
    sizes, errors = np.zeros(len(steps)), np.zeros(len(steps))
    for part, some, known, _ in _chunks("uniform", bits, shape, given, metric):
        for i, one in enumerate(UNIFORM.by_outputs(part.reshape(-1), form, some, known, steps.tolist())):
            if one is None:
                raise CompressError(
                    "values: their range is too large for steps. Remedy: codec='lossless' for this tensor."
                )
            sizes[i] += len(one[0])
            errors[i] += one[1]
    return [Point("uniform", {}, s, e) for s, e in zip(sizes.tolist(), errors.tolist(), strict=True)]
