"""How many bits each tensor gets, so that a whole file meets a ratio at the least error.

With numbers rounded to multiples of a step, the squared error of a tensor is close to step² / 12 for each number, and
halving the step costs one bit for each. The sum of squared errors over a file of given size is least where the last
bit buys as much everywhere: with one step for all numbers. So there is one unknown. A file's size is measured by
coding it, not estimated, and the step that meets the size is found by the secant of log₂ step and size, which is nearly
a straight line.

Vectors (biases, scales of norms) are a thousandth of a model and its most sensitive part: they stay exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from capibara.compress.codecs import lossless, uniform
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float

__all__ = ["Source", "choose_steps"]

_TOLERANCE = 0.005  # of the size of a file; a quarter of what is promised
_SMALLEST = 4096  # numbers of a tensor that is worth a step of its own


class Source(Protocol):
    """Named tensors, one in memory at a time."""

    @property
    def tensors(self) -> dict[str, tuple[NumberFormat, tuple[int, ...], int, int]]: ...

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor."""
        ...


def _rounded(source: Source) -> list[str]:
    """The tensors that may be rounded."""
    out = []
    for name, (form, shape, _, _) in source.tensors.items():
        if form.is_float and form.bits > 8 and len(shape) >= 2 and math.prod(shape) >= _SMALLEST:
            values = to_float(source.read(name), form)
            if np.isfinite(values).all() and values.any():
                out.append(name)
    return out


def choose_steps(source: Source, ratio: float, twins: Mapping[str, str] | None = None) -> dict[str, float]:
    """The step of each tensor that is rounded, so that the file becomes ``ratio`` times smaller, within 2 %.

    Args:
      source: the tensors.
      ratio: original bytes over the archive's.
      twins: names of tensors that are stored as others, and take no bytes of their own.

    Returns:
      name → step; empty where lossless coding is small enough already.

    Raises:
      CompressError: ``ratio`` is no number above 1, or cannot be met by rounding matrices.
    """
    if not isinstance(ratio, float | int) or isinstance(ratio, bool) or not 1 < ratio < math.inf:
        raise CompressError(f"ratio: got {ratio!r}, expected a number above 1, such as 4")
    twins = twins or {}
    names = [name for name in _rounded(source) if name not in twins]
    total = sum(math.prod(s) * f.bits // 8 for f, s, _, _ in source.tensors.values())
    target = total / ratio
    # The index, as good as to the byte for tensors of one chunk.
    rest = 70.0 + sum(155 + len(json.dumps(n)) + 5 * len(s) for n, (_, s, _, _) in source.tensors.items())
    exact, count, squares = 0.0, 0, 0.0
    for name, (form, shape, _, _) in source.tensors.items():
        if name in twins:
            continue
        bits = source.read(name)
        size = len(lossless.encode(bits, form, shape))
        if name in names:
            exact += size
            count += bits.size
            squares += float((to_float(bits, form).astype(np.float64) ** 2).sum())
        else:
            rest += size
    if exact + rest <= target:
        return {}
    if rest + count / 64 >= target:
        raise CompressError(
            f"ratio: {ratio} cannot be met: of {total} bytes, {target:.0f} would be left, and what is not rounded "
            f"(vectors, integers, small tensors) takes {rest:.0f}. Remedy: one below {total / (rest + count / 32):.2f}."
        )

    def size_at(step: float) -> float:
        sizes = (
            len(uniform.UNIFORM.encode(source.read(n), *source.tensors[n][:2], {"step": step})) for n in names
        )
        return rest + sum(sizes)

    # The entropy of a Gaussian in steps is log2(4.13 · deviation / step), with 4.13 = sqrt(2πe).
    bits = 8 * (target - rest) / count
    log_step = math.log2(math.sqrt(squares / count) * 4.13) - max(bits, 0.05)
    points: list[tuple[float, float]] = []
    for _ in range(16):
        points.append((log_step, size_at(2.0**log_step)))
        if abs(points[-1][1] - target) <= _TOLERANCE * target:
            step = 2.0**log_step
            return dict.fromkeys(names, float(step))
        log_step = _next(points, target, count)
    nearest = min(points, key=lambda p: abs(p[1] - target))
    if abs(nearest[1] - target) > 4 * _TOLERANCE * target:
        raise CompressError(
            f"ratio: {ratio} cannot be met; the nearest is {total / nearest[1]:.2f}. Remedy: another ratio."
        )
    step = 2.0 ** nearest[0]
    return dict.fromkeys(names, float(step))


def _next(points: list[tuple[float, float]], target: float, count: int) -> float:
    """Where the line through the nearest point below the target and the nearest above it meets the target."""
    small = max((p for p in points if p[1] <= target), key=lambda p: p[1], default=None)
    large = min((p for p in points if p[1] > target), key=lambda p: p[1], default=None)
    if small is None or large is None:
        at, size = points[-1]
        # One bit for each number a halving at high rates; less at low ones, so the step goes on from there.
        return at + min(max(8 * (size - target) / count, -4.0), 4.0) * (1.0 if len(points) < 3 else 2.0)
    share = (large[1] - target) / (large[1] - small[1])
    return large[0] + min(max(share, 0.02), 0.98) * (small[0] - large[0])
