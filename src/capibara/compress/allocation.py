"""Choose codecs and bits per tensor, so that a whole file meets a ratio at the least error.

The optimal trade-offs between all ways to store every tensor are found with a price per byte (Y. Shoham and A.
Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans. Acoust. Speech Signal Process.,
1988): for a given price, each tensor independently takes the way with the least ``weight · squared error + price ·
bytes``, and the price is raised until the file is small enough. At that size, no other combination of the measured
ways is better.

Sizes of the codec ``uniform``, whose step is continuous, are first estimated from some rows; the tensors are then
encoded with the chosen steps, the estimates corrected, and the price updated, until the file's real size is within
half a percent.

Vectors (biases, norm scales) are a thousandth of a model and its most sensitive part: they stay exact.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Metric, stack_of
from capibara.compress.codecs.matrices import LARGEST
from capibara.compress.codecs.protocol import CODECS, get_codec, stored_settings
from capibara.compress.container.index import CHUNK, Chunk, Entry, dump
from capibara.compress.curves import Curve, Point, coded_size, measure, measure_curve, payloads_of
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float
from capibara.compress.models.source import TensorSource

__all__ = [
    "Allocation",
    "Survey",
    "allocate",
    "check_ratio",
    "estimate",
    "everywhere",
    "survey",
]

_TOLERANCE = 0.004  # of the size of a file; a fifth of what is promised
_PROMISED = 0.02
_KEPT = 1 << 26  # bytes of payloads that are kept to be written


@dataclass
class Survey:
    """Measurements of tensors before a ratio is chosen.

    Attributes:
      curves: the ways to store each tensor that may be lossy.
      exact: payload bytes of the others.
      total: original bytes of all tensors.
      index: bytes of the archive besides payloads.
    """

    source: TensorSource
    curves: dict[str, Curve]
    exact: dict[str, int]
    total: int
    index: float

    @property
    def fixed(self) -> float:
        """Bytes that do not depend on the choice."""
        return self.index + sum(self.exact.values())

    def choose(self, price: float) -> dict[str, Point]:
        """The best way for each tensor at a price per byte."""
        return {name: curve.best(price) for name, curve in self.curves.items()}

    def size(self, chosen: Mapping[str, Point]) -> float:
        """The approximate size of the archive in bytes."""
        return self.fixed + sum(p.size + _settings_size(p.settings) for p in chosen.values())

    def error(self, chosen: Mapping[str, Point]) -> float:
        """The weighted relative error of all tensors that may be lossy."""
        lost = sum(self.curves[n].weight * p.error for n, p in chosen.items())
        whole = sum(c.weight * c.square for c in self.curves.values())
        return math.sqrt(lost / whole) if whole else 0.0


@dataclass(frozen=True)
class Allocation:
    """The chosen allocation.

    Attributes:
      points: how each lossy tensor is stored; the others are ``lossless``.
      size: bytes of the archive, from real encoding.
      error: the estimated relative error, each tensor's squared error weighted by its sensitivity.
    """

    points: dict[str, Point]
    size: float
    error: float


def everywhere(
    source: TensorSource, codec: str, *, exclude: Iterable[str] = (), smallest: int = 4096
) -> Allocation:
    """One codec, with default settings, for every tensor that it applies to.

    Args:
      source: the tensors.
      codec: its name.
      exclude: name patterns of tensors that stay exact.
      smallest: tensors with fewer elements, and vectors, stay exact.

    Raises:
      CompressError: there is no such tensor, or the codec needs a ratio.
    """
    points: dict[str, Point] = {}
    exclude = tuple(exclude)
    problem = f"no tensor can be compressed with loss (vectors, integers, fewer than {smallest} numbers, or excluded)."
    remedy = "strategy='lossless', or a lower smallest"
    for name, form, shape in source:
        if not _may_lose(name, form, shape, exclude, smallest):
            continue
        try:
            size = coded_size(codec, {}, source.read(name), form, shape)
            points[name] = Point(codec, {}, size, math.nan)
        except CompressError as error:
            problem, remedy = str(error), "a ratio"
    if not points:
        raise CompressError(f"strategy: {codec} without a ratio: {problem} Remedy: {remedy}.")
    return Allocation(points, math.nan, math.nan)


def check_ratio(ratio: object) -> float:
    """The ratio as a float.

    Raises:
      CompressError: it is not a number above 1.
    """
    if not isinstance(ratio, float | int) or isinstance(ratio, bool) or not 1 < ratio < math.inf:
        raise CompressError(f"ratio: got {ratio!r}, expected a number above 1, such as 4")
    return float(ratio)


def _settings_size(settings: Mapping[str, Any]) -> int:
    plain = stored_settings(settings)
    return len(json.dumps(plain, separators=(",", ":"))) + 12 if plain else 0


def _may_lose(
    name: str, form: NumberFormat, shape: tuple[int, ...], exclude: Iterable[str], smallest: int
) -> bool:
    if not form.is_float or form.bits <= 8 or len(shape) < 2 or math.prod(shape) < smallest:
        return False
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def survey(
    source: TensorSource,
    *,
    codecs: Iterable[str] | None = None,
    tied: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
    smallest: int = 4096,
    metadata: int = 0,
    moments: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Survey:
    """Measure the ways to store each tensor.

    Args:
      source: the tensors.
      codecs: names of the candidates besides ``lossless``; all by default.
      tied: names of tensors that share another tensor's data, and take no bytes of their own.
      exclude: name patterns of tensors that stay exact.
      smallest: tensors with fewer elements stay exact.
      metadata: bytes of the archive's metadata.
      moments: ``hessian`` and ``input_axes`` of layers, by the names of their weights.
      progress: called after each tensor with its original bytes.

    Raises:
      CompressError: an unknown codec.
    """
    names = list(CODECS) if codecs is None else list(codecs)
    for name in names:
        get_codec(name)
    tied, exclude = tied or {}, tuple(exclude)
    curves: dict[str, Curve] = {}
    exact: dict[str, int] = {}
    total, entries = 0, []
    for name, form, shape in source:
        count = math.prod(shape)
        total += count * form.bits // 8
        rows = shape[0] if shape else 1
        step = max(CHUNK // max(math.prod(shape[1:]), 1), 1)
        if stack_of((moments or {}).get(name, {}).get("hessian")) is not None:
            step = 1
        chunks = [Chunk(min(step, rows), total + 1000, step, 1 << 31)] * max(-(-rows // step), 1)
        same = tied.get(name)
        entries.append(Entry(name, form, shape, "uniform", {}, () if same else tuple(chunks), same))
        if name in tied:
            continue
        bits = source.read(name)
        plain = coded_size("lossless", {}, bits, form, shape)
        usable = _usable(names, bits, form) if _may_lose(name, form, shape, exclude, smallest) else []
        if usable:
            known = (moments or {}).get(name)
            curves[name] = measure_curve(bits, form, shape, usable, lossless=plain, moments=known)
        else:
            exact[name] = plain
        if progress is not None:
            progress(name, count * form.bits // 8)
    index = len(dump(entries, {}, total)) + metadata + 16
    return Survey(source, curves, exact, total, index)


def _usable(names: list[str], bits: np.ndarray, form: NumberFormat) -> list[str]:
    """The codecs that can take a tensor: some keep numbers that are not finite, others need all to be."""
    flat, any_there, all_finite = bits.reshape(-1), False, True
    for start in range(0, len(flat), CHUNK):
        with np.errstate(invalid="ignore"):  # quiets NaNs
            values = to_float(flat[start : start + CHUNK], form)
        finite = np.isfinite(values)
        if not finite.all():
            all_finite, values = False, values[finite]
        # Errors are compared by their squares, which have to be finite as well.
        if float(np.abs(values).max(initial=0)) > LARGEST:
            return []
        any_there = any_there or bool(values.any())
    if not any_there:
        return []
    return [n for n in names if all_finite or getattr(get_codec(n), "keeps_strange", False)]


def estimate(found: Survey, ratio: float, *, weights: Mapping[str, float]) -> Allocation | None:
    """An estimate of the result of :func:`allocate`, without encoding; ``None`` if the ratio cannot be met."""
    target = found.total / check_ratio(ratio)
    _weigh(found, weights)
    lossless = {name: curve.points[0] for name, curve in found.curves.items()}
    if found.size(lossless) <= target:
        return Allocation({}, found.size(lossless), 0.0)
    if found.fixed + sum(c.smallest for c in found.curves.values()) > target:
        return None
    chosen = _fill(found, _find_price(found, target), target)
    lossy = {name: point for name, point in chosen.items() if point.codec != "lossless"}
    return Allocation(lossy, found.size(chosen), found.error(chosen))


def _weigh(found: Survey, weights: Mapping[str, float] | None) -> None:
    for name, curve in found.curves.items():
        curve.weight = float((weights or {}).get(name, 1.0))


def allocate(found: Survey, ratio: float, *, weights: Mapping[str, float] | None = None) -> Allocation:
    """Choose how each tensor is stored, so that the file becomes ``ratio`` times smaller, within 2 %.

    Args:
      found: of :func:`survey`.
      ratio: original bytes over the archive's.
      weights: the weight of each tensor's squared error; equal by default.

    Raises:
      CompressError: ``ratio`` is not a number above 1, or cannot be met with these codecs.
    """
    target = found.total / check_ratio(ratio)
    _weigh(found, weights)
    lossless = {name: curve.points[0] for name, curve in found.curves.items()}
    if found.size(lossless) <= target * (1 + _TOLERANCE):
        return Allocation({}, found.size(lossless), 0.0)
    least = found.fixed + sum(c.smallest for c in found.curves.values())
    if least > target * (1 + _PROMISED):
        raise CompressError(
            f"ratio: {ratio} cannot be met: of {found.total} bytes, {target:.0f} would be left, and these tensors take "
            f"{least:.0f} with the codecs at hand (vectors, integers and small tensors stay exact, and what has NaN or "
            f"infinities with all but int8, int4 and nf4: {found.fixed:.0f}). "
            f"Remedy: one up to {found.total / least * 0.99:.2f}."
        )
    coded = _Coded(found)
    best: dict[str, Point] | None = None
    tries = 0
    while tries < 5:
        chosen = _fill(found, _find_price(found, target), target)
        if coded.replaced(chosen):
            continue
        tries += 1
        chosen = coded.measured(chosen)
        size = found.size(chosen)
        if best is None or abs(size - target) < abs(found.size(best) - target):
            best = chosen
        if abs(size - target) <= _TOLERANCE * target:
            break
    assert best is not None
    if abs(found.size(best) - target) > _TOLERANCE * target:
        best = _shift(found, best, target, coded)
    if found.size(best) > target * (1 + _PROMISED):
        raise CompressError(
            f"ratio: {ratio} cannot be met; the nearest is {found.total / found.size(best):.2f}. Remedy: another ratio."
        )
    lossy = {name: coded.kept(name, point) for name, point in best.items() if point.codec != "lossless"}
    return Allocation(lossy, found.size(best), found.error(best))


def _find_price(found: Survey, target: float) -> float:
    """The lowest price of a byte at which the file is small enough, as far as is known."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        if found.size(found.choose(2.0**middle)) > target:
            low = middle
        else:
            high = middle
    return high


def _fill(found: Survey, log_price: float, target: float) -> dict[str, Point]:
    """The choice at a price, and what it leaves of the file given to the tensors that gain most by it."""
    chosen = found.choose(2.0**log_price)
    left = target - found.size(chosen)
    # A codec that takes calibration has few points, with gaps between them.
    for _ in range(len(chosen)):
        best: tuple[float, str, Point] | None = None
        for name, point in chosen.items():
            curve = found.curves[name]
            other = curve.nearest(point.size + left - _settings_size({"step": 2.0**-0.1}))
            gain = 0.0 if other is None else curve.weight * (point.error - other.error)
            if other is not None and gain > 0 and (best is None or gain > best[0]):
                best = gain, name, other
        if best is None:
            break
        _, name, point = best
        left -= point.size - chosen[name].size
        chosen[name] = point
    return chosen


def _shift(found: Survey, chosen: dict[str, Point], target: float, coded: _Coded) -> dict[str, Point]:
    """All steps longer or shorter by one factor, until the coded file has its size: estimates did not lead there."""
    steps = {n: math.log2(p.settings["step"]) for n, p in chosen.items() if p.codec == "uniform"}

    def shifted(by: float) -> dict[str, Point]:
        moved = {
            n: replace(
                chosen[n],
                settings={**chosen[n].settings, "step": 2.0 ** (s + by)},
                error=chosen[n].error * 4.0**by,
            )
            for n, s in steps.items()
        }
        return coded.measured({**chosen, **moved})

    low, high, best = -0.125, 0.125, chosen
    if not steps:
        return best
    while high < 8 and found.size(shifted(high)) > target:
        low, high = high, 2 * high
    while low > -8 and found.size(shifted(low)) < target:
        low, high = 2 * low, low
    for _ in range(12):
        made = shifted((low + high) / 2)
        if abs(found.size(made) - target) < abs(found.size(best) - target):
            best = made
        if abs(found.size(best) - target) <= _TOLERANCE * target:
            break
        if found.size(made) > target:
            low = (low + high) / 2
        else:
            high = (low + high) / 2
    return best


class _Coded:
    """Tensors coded by ``uniform`` while a ratio is looked for: their sizes, and the last payloads of each."""

    def __init__(self, found: Survey) -> None:
        self._found = found
        self._forms = {name: (form, shape) for name, form, shape in found.source}
        self._sizes: dict[tuple[str, float], int] = {}
        self._payloads: dict[str, tuple[float, tuple[bytes, ...]]] = {}
        self._kept = 0

    def replaced(self, chosen: Mapping[str, Point]) -> bool:
        """Whether some were only estimated: they are measured now, and another choice may be better."""
        new = False
        for name, point in chosen.items():
            if not point.estimated:
                continue
            curve, new = self._found.curves[name], True
            metric = Metric.of(point.settings) if "hessian" in point.settings else None
            exact: list[Point] = []
            with contextlib.suppress(CompressError):  # this codec is not for this tensor
                bits = self._found.source.read(name)
                exact.append(measure(
                    point.codec, point.settings, bits, *self._forms[name], metric, _KEPT - self._kept
                ))  # fmt: skip
                self._kept += int(exact[0].size) if exact[0].payloads else 0
            left = [p for p in curve.points if p is not point]
            if exact:
                # What is expected of the codec's other settings is off in the same way.
                longer, worse = exact[0].size / max(point.size, 1), exact[0].error / max(point.error, 1e-300)
                left = [
                    replace(p, size=longer * p.size, error=worse * p.error)
                    if p.estimated and p.codec == point.codec
                    else p
                    for p in left
                ]
            curve.points = left + exact
        return new

    def measured(self, chosen: Mapping[str, Point]) -> dict[str, Point]:
        """The same with the sizes of ``uniform`` measured; estimates are corrected by them."""
        out = dict(chosen)
        for name, point in chosen.items():
            if point.codec != "uniform":
                continue
            size = self._size(name, point.settings)
            self._found.curves[name].scale *= size / max(point.size, 1e-9)
            out[name] = replace(point, size=size)
        return out

    def _size(self, name: str, settings: Mapping[str, Any]) -> int:
        step = settings["step"]
        if (name, step) in self._sizes:
            return self._sizes[name, step]
        if name in self._payloads:
            self._kept -= sum(map(len, self._payloads.pop(name)[1]))
        payloads, size = [], 0
        for payload in payloads_of("uniform", settings, self._found.source.read(name), *self._forms[name]):
            size += len(payload)
            # Beyond so many bytes they are made again when they are written.
            if self._kept + size <= _KEPT:
                payloads.append(payload)
        if self._kept + size <= _KEPT:
            self._payloads[name] = step, tuple(payloads)
            self._kept += size
        self._sizes[name, step] = size
        return size

    def kept(self, name: str, point: Point) -> Point:
        """The same with its payloads, where these are at hand."""
        step, payloads = self._payloads.get(name, (None, ()))
        same = point.codec == "uniform" and point.settings["step"] == step
        return replace(point, payloads=payloads) if same else point
