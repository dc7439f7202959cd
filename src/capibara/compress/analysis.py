"""How far a model can be compressed: estimates from each codec's results on each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from capibara.compress.allocation import Survey, estimate
from capibara.compress.errors import CompressError

__all__ = ["Compressibility", "TensorCompressibility", "analyse"]

RATIOS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)


@dataclass(frozen=True)
class TensorCompressibility:
    """One tensor.

    Attributes:
      name, dtype, shape: of the tensor.
      original_bytes: uncompressed.
      lossless_bytes: with lossless compression.
      may_lose: whether codecs may round it.
      sensitivity: its share of the model's error if all such tensors had the same relative error.
      codecs: at each ratio of the report's frontier, the codec that would be chosen.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    original_bytes: int
    lossless_bytes: int
    may_lose: bool
    sensitivity: float
    codecs: tuple[str, ...]


@dataclass(frozen=True)
class Compressibility:
    """A model.

    Attributes:
      original_bytes: of all tensors.
      lossless_ratio: original bytes over those of a lossless archive.
      frontier: pairs of a ratio and the estimated relative error, weighted by sensitivity.
      tensors: one by one.
    """

    original_bytes: int
    lossless_ratio: float
    frontier: tuple[tuple[float, float], ...]
    tensors: tuple[TensorCompressibility, ...]

    def best_ratio(self, error: float) -> float:
        """The largest ratio with an expected error of at most ``error``, interpolated along the frontier.

        Raises:
          CompressError: ``error`` is not a number of at least 0.
        """
        if not isinstance(error, float | int) or isinstance(error, bool) or not error >= 0:
            raise CompressError(f"error: got {error!r}, expected a number, 0 or more")
        best, last = self.lossless_ratio, (self.lossless_ratio, 0.0)
        for ratio, expected in self.frontier:
            if expected > error:
                if ratio > last[0] and expected > last[1]:
                    share = (error - last[1]) / (expected - last[1])
                    best = max(best, last[0] + share * (ratio - last[0]))
                break
            best, last = max(best, ratio), (ratio, expected)
        return best

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "original_bytes": self.original_bytes,
            "lossless_ratio": self.lossless_ratio,
            "frontier": [list(p) for p in self.frontier],
            "tensors": [{**vars(t), "shape": list(t.shape), "codecs": list(t.codecs)} for t in self.tensors],
        }

    def __str__(self) -> str:
        lines = [f"{self.original_bytes:,} bytes; without loss {self.lossless_ratio:.3f} times smaller"]
        lines += [
            f"  ratio {ratio:<5g} expected relative error {error:.4g}" for ratio, error in self.frontier
        ]
        width = max(len(t.name) for t in self.tensors)
        for t in self.tensors:
            how = f"sensitivity {t.sensitivity:.3g}, {', '.join(t.codecs)}" if t.may_lose else "exact"
            lines.append(f"  {t.name:<{width}}  {t.original_bytes:>12,} {t.lossless_bytes:>12,}  {how}")
        return "\n".join(lines)


def analyse(found: Survey, weights: dict[str, float], ratios: Iterable[float] = RATIOS) -> Compressibility:
    """The report of a survey."""
    points, chosen = [], []
    for ratio in ratios:
        guess = estimate(found, ratio, weights=weights)
        if guess is not None:
            points.append((float(ratio), guess.error))
            chosen.append(guess.points)
    whole = sum(c.weight * c.square for c in found.curves.values())
    tensors = []
    exact_size = found.fixed
    for name, form, shape in found.source:
        curve = found.curves.get(name)
        plain = found.exact.get(name, 0) if curve is None else int(curve.points[0].size)
        exact_size += 0 if curve is None else plain
        tensors.append(
            TensorCompressibility(
                name, form.name, shape, math.prod(shape) * form.bits // 8, plain, curve is not None,
                0.0 if curve is None else curve.weight * curve.square / whole,
                () if curve is None else tuple(c[name].codec if name in c else "lossless" for c in chosen),
            )
        )  # fmt: skip
    return Compressibility(found.total, found.total / exact_size, tuple(points), tuple(tensors))
