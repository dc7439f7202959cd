"""Plot a model's rate–error curve."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from capibara.compress.errors import CompressError
from capibara.errors import MissingExtraError
from capibara.files import replace_file

__all__ = ["plot_rate_error"]


def plot_rate_error(
    path: str | os.PathLike[str],
    expected: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]] = (),
    *,
    title: str = "",
) -> Path:
    """Write a PNG: relative error over ratio, both axes logarithmic.

    Args:
      path: the file; it ends in ``.png``.
      expected: pairs of (ratio, relative error), such as :attr:`Compressibility.frontier`; a line.
      measured: the same for written archives; points.
      title: above it.

    Raises:
      CompressError: no pair has an error above 0, or the file does not end in ``.png``.
      MissingExtraError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise CompressError(f"path: got {str(target)!r}, expected a name that ends in .png")
    lines = [p for p in expected if p[1] > 0]
    points = [p for p in measured if p[1] > 0]
    if not lines and not points:
        raise CompressError("expected: there is no pair of a ratio and an error above 0 to show")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "Drawing the rate–error curve") from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    if lines:
        axes.plot(*zip(*lines, strict=True), marker=".", label="expected")
    if points:
        axes.plot(*zip(*points, strict=True), "o", label="written")
    axes.set(
        xscale="log", yscale="log", xlabel="ratio (original bytes / file's bytes)", ylabel="relative error"
    )
    axes.set_title(title)
    ticks = sorted({round(p[0], 2) for p in (*lines, *points)})
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(True, alpha=0.3)
    axes.legend()
    replace_file(target, functools.partial(figure.savefig, format="png", dpi=150))
    return target
