"""Step times that the planner predicts, against those that MaxText published for the same models on TPU slices.

Every row of ``_maxtext/rows.toml`` is compiled for its slice by the real TPU compiler (no TPU is needed; about 1.5
minutes of one core each the first time, kept in ``~/.cache/capibara/calibration``), read and timed as a plan's step is.
*Raw* has no constant fitted to anything. *Fitted* has one: what a predicted second takes in truth. *Left out*: each row
with the constant of the other rows. Below the table is what three constants would do, one each for computing (matrix
products and kernels), memory (all other work) and communication that nothing hides.

``ratio`` is predicted over published, raw: 1 is right. Run in the repository's root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._maxtext.fit import fit, leave_one_out, median_error
from benchmarks._maxtext.rows import PublishedRow, SeveralRow, load_rows, load_several

LONG = "15 compilations of a minute and a half each, unless cached"

__all__ = ["CONSTANTS", "Calibration", "Prediction", "calibrate", "exchange_of", "run", "several_markdown"]

CONSTANTS = ("compute", "memory", "communication")
MARKS = ("<!-- table: begin -->", "<!-- table: end -->")
SEVERAL_MARKS = ("<!-- several: begin -->", "<!-- several: end -->")
# Of a gradient between slices: the compiled programs sum them in bfloat16 within one (43.5 GiB of all-reduces in the
# step of 22B, two bytes for each parameter and the embedding's).
GRADIENT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One row as the planner sees it.

    Attributes:
      row: what was published.
      seconds: predicted, nothing fitted; ``low`` and ``high`` are the planner's own range.
      parts: seconds of computing, memory and communication that nothing hides; their sum is ``seconds``.
      hidden: seconds of exchanges beside work.
      hbm_bytes: of one chip, from the compiler. usable_bytes: what it lets a program have.
    """

    row: PublishedRow
    seconds: float
    low: float
    high: float
    parts: tuple[float, float, float]
    hidden: float
    hbm_bytes: int
    usable_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the chip's memory holds it."""
        return self.hbm_bytes <= self.usable_bytes


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All rows together.

    Attributes:
      predictions: one a row, in the order of the rows.
      scale: what a predicted second takes in truth, fitted to all rows.
      fitted, left_out: seconds a row, with that constant and with that of the other rows.
      constants: fitted to all rows, one for each of :data:`CONSTANTS` instead of one for all.
      left_out_three: seconds a row with three constants of the other rows.
      missing: names of published rows that were not compiled.
    """

    predictions: tuple[Prediction, ...]
    scale: float
    fitted: tuple[float, ...]
    left_out: tuple[float, ...]
    constants: dict[str, float]
    left_out_three: tuple[float, ...]
    missing: tuple[str, ...] = ()

    @property
    def published(self) -> list[float]:
        """Seconds a row."""
        return [p.row.seconds for p in self.predictions]

    @property
    def errors(self) -> dict[str, float]:
        """Median relative errors."""
        raw = [p.seconds for p in self.predictions]
        sides = {"raw": raw, "fitted": self.fitted, "left out": self.left_out, "three": self.left_out_three}
        return {name: median_error(side, self.published) for name, side in sides.items()}

    def to_markdown(self) -> str:
        """The table and what it comes to."""
        head = (
            "row",
            "chips",
            "published",
            "raw",
            "error",
            "range",
            "fitted",
            "left out",
            "GiB a chip",
            "of",
        )
        lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for p, fitted, left_out in zip(self.predictions, self.fitted, self.left_out, strict=True):
            published = p.row.seconds

            def error(seconds: float, published: float = published) -> str:
                return f"{seconds / published - 1:+.1%}"

            cells = (
                p.row.name,
                f"{p.row.num_devices}",
                f"{published:.2f} s",
                f"{p.seconds:.2f} s",
                error(p.seconds),
                f"{p.low:.1f}–{p.high:.1f} s",
                error(fitted),
                error(left_out),
                f"{p.hbm_bytes / 2**30:.1f}",
                f"{p.usable_bytes / 2**30:.1f}" + ("" if p.fits else " (does not fit)"),
            )
            lines.append("| " + " | ".join(cells) + " |")
        errors = {name: f"{value:.1%}" for name, value in self.errors.items()}
        three = ", ".join(f"{name} {value:.2f}" for name, value in self.constants.items())
        lines += [
            "",
            f"Median error: raw {errors['raw']}, fitted {errors['fitted']}, left out {errors['left out']}. A predicted "
            f"second takes {self.scale:.3f} s. Three constants in place of one ({three}): left out {errors['three']}.",
        ]
        if self.missing:
            lines.append(f"Not compiled yet: {', '.join(self.missing)}.")
        return "\n".join(lines)

    def draw(self, path: Path) -> None:
        """A picture of predicted over published step times."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6.4, 6.0), layout="constrained")
        ends = np.array([min(self.published) / 1.4, max(self.published) * 1.4])
        axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.9", label="within 10 %")
        axes.plot(ends, ends, color="0.5", linewidth=1)
        for generation, colour in (("v4", "tab:green"), ("v5e", "tab:orange"), ("v5p", "tab:blue")):
            chosen = [i for i, p in enumerate(self.predictions) if p.row.generation == generation]
            x = [self.published[i] for i in chosen]
            axes.plot(
                x,
                [self.predictions[i].seconds for i in chosen],
                "o",
                color=colour,
                label=f"{generation}, raw",
            )
            axes.plot(
                x,
                [self.left_out[i] for i in chosen],
                "x",
                color=colour,
                label=f"{generation}, scaled by the other rows",
            )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ticks = [t for t in (5, 10, 20, 50, 100, 200) if ends[0] < t < ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(t) for t in ticks])
            axis.set_ticks([], minor=True)
        axes.set(xlabel="published step time, seconds", ylabel="predicted step time, seconds")
        axes.legend(frameon=False, fontsize="small")
        figure.savefig(path, dpi=130, metadata={"Software": None})
        plt.close(figure)


def exchange_of(one: SeveralRow) -> Any:
    """What its slices exchange in a step (a ``capibara.plan.time.network.Exchange``)."""
    from capibara.hardware import get_chip
    from capibara.plan.time.network import Exchange

    bandwidth = get_chip(one.row.generation).dcn_bandwidth
    if bandwidth is None:
        raise ValueError(f"{one.name}: the network between slices of {one.row.generation} is not known")
    return Exchange(
        slices=one.slices,
        bytes=GRADIENT_BYTES * one.row.decoder.num_parameters / one.row.num_devices,
        bandwidth=bandwidth,
        pieces=one.row.decoder.layers,
    )


def several_markdown(predictions: Sequence[Prediction]) -> str:
    """The table of runs on several slices: the prediction for one, and what the exchange adds."""
    known = {p.row.name: p for p in predictions}
    head = ("slices × row", "published", "slower than one", "raw", "error", "slower", "the exchange")
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    errors, published_slower, slower, missing = [], [], [], []
    for one in load_several():
        if one.row.name not in known:
            missing.append(one.name)
            continue
        base, extra = known[one.row.name], exchange_of(one).seconds
        errors.append((base.seconds + extra) / one.seconds - 1)
        published_slower.append(one.seconds / one.row.seconds - 1)
        slower.append(extra / base.seconds)
        cells = (
            one.name,
            f"{one.seconds:.2f} s",
            f"{published_slower[-1]:+.1%}",
            f"{base.seconds + extra:.2f} s",
            f"{errors[-1]:+.1%}",
            f"{slower[-1]:+.1%}",
            f"{extra:.2f} s",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if errors:
        lines += [
            "",
            f"Median error of {len(errors)} rows: {np.median(np.abs(errors)):.1%}. Median slowdown against one slice: "
            f"published {np.median(published_slower):+.1%}, predicted {np.median(slower):+.1%}.",
        ]
    if missing:
        lines.append(f"Not compiled yet: {', '.join(missing)}.")
    return "\n".join(lines)


def predict(row: PublishedRow, program: Any) -> Prediction:
    """What the planner says of a compiled row (a ``capibara.plan.compiler.CompiledProgram``)."""
    from benchmarks._maxtext.kernels import state_kernels
    from capibara.plan.program import read_program
    from capibara.plan.slices import parse_slice
    from capibara.plan.time import predict_step

    target = parse_slice(row.topology)
    facts = state_kernels(read_program(program.text), row.decoder)
    time = predict_step(facts, target, row.mesh, places=program.coordinates)
    return Prediction(
        row=row,
        seconds=time.seconds,
        low=time.low,
        high=time.high,
        parts=(time.compute, time.memory, time.communication),
        hidden=time.hidden,
        hbm_bytes=program.memory.total,
        usable_bytes=target.usable_hbm_bytes,
    )


def calibrate(predictions: Sequence[Prediction]) -> Calibration:
    """Fit the constants.

    Raises:
      ValueError: fewer than four predictions: leaving one out must leave as many as there are constants.
    """
    if len(predictions) <= len(CONSTANTS):
        raise ValueError(f"{len(predictions)} predictions, expected at least {len(CONSTANTS) + 1}")
    parts = np.array([p.parts for p in predictions])
    raw = np.array([[p.seconds] for p in predictions])
    published = np.array([p.row.seconds for p in predictions])
    scale = fit(raw, published)
    return Calibration(
        predictions=tuple(predictions),
        scale=float(scale[0]),
        fitted=tuple(map(float, raw @ scale)),
        left_out=tuple(map(float, leave_one_out(raw, published))),
        constants=dict(zip(CONSTANTS, map(float, fit(parts, published)), strict=True)),
        left_out_three=tuple(map(float, leave_one_out(parts, published))),
        missing=tuple(row.name for row in load_rows() if row.name not in {p.row.name for p in predictions}),
    )


def predict_rows(tell: Callable[[str], None], *, compile_missing: bool = True) -> list[Prediction]:
    """All rows, compiled or found in the cache (or those that are in it only).

    Raises:
      RuntimeError: a row did not compile; none is left out.
    """
    from benchmarks._maxtext.programs import compile_rows, is_kept

    rows = [row for row in load_rows() if compile_missing or is_kept(row)]
    found = {}
    for row, program in compile_rows(rows):
        if not program.fits:
            raise RuntimeError(f"{row.name} did not compile: {program}")
        found[row.name] = predict(row, program)
        tell(
            f"{len(found)} of {len(rows)}: {row.name} {found[row.name].seconds:.2f} s, published {row.seconds:.2f} s"
        )
    return [found[row.name] for row in rows]


def run() -> list[dict[str, Any]]:
    """Rows whose ratio is the predicted step time over the published one."""
    result = calibrate(predict_rows(lambda words: print(words, file=sys.stderr, flush=True)))
    print(result.to_markdown())
    print(several_markdown(result.predictions))
    return [
        {
            "what": p.row.name,
            "shape": f"{p.row.topology}, {p.row.tokens} tokens a chip",
            "peer": "published by MaxText",
            "ratio": p.seconds / p.row.seconds,
            "published_seconds": p.row.seconds,
            "predicted_seconds": p.seconds,
            "fitted_seconds": fitted,
            "left_out_seconds": left_out,
            "hbm_gib": p.hbm_bytes / 2**30,
        }
        for p, fitted, left_out in zip(result.predictions, result.fitted, result.left_out, strict=True)
    ]


def write_page(result: Calibration, page: Path) -> None:
    """Put the tables into a page between their marks, and the picture beside it.

    Raises:
      ValueError: the page lacks the marks.
    """
    from capibara.files import replace_file

    text = page.read_text(encoding="utf-8")
    for (begin, end), table in (
        (MARKS, result.to_markdown()),
        (SEVERAL_MARKS, several_markdown(result.predictions)),
    ):
        if not all(text.count(mark) == 1 for mark in (begin, end)):
            raise ValueError(f"{page}: expected {begin} and {end}, once each")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    replace_file(page, text)
    result.draw(page.with_suffix(".png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Print the table; write it into a page of the documentation."
    )
    parser.add_argument("--page", type=Path, help="such as docs/calibration.md")
    parser.add_argument("--kept", action="store_true", help="only what was compiled before; names the rest")
    given = parser.parse_args()
    calibration = calibrate(
        predict_rows(lambda words: print(words, file=sys.stderr, flush=True), compile_missing=not given.kept)
    )
    print(calibration.to_markdown())
    print(several_markdown(calibration.predictions))
    if given.page:
        write_page(calibration, given.page)
