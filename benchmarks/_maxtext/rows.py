"""Published rows as facts, and the step time each of them says.

A row states floating-point operations a second, and its own code of the time says which operations were counted; so
its step time is what was counted over what was stated. Of the two forms a rate is stated in the one with more digits
is taken: the share of the chip's peak (MFU), not the rounded TFLOP/s. A row that states tokens a second needs no
counting.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks._maxtext.decoder import Decoder

__all__ = ["COUNTED", "PublishedRow", "SeveralRow", "load_rows", "load_several"]

COUNTED = ("weights", "half scores", "all scores", "tokens")
_FILE = Path(__file__).with_name("rows.toml")


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published result.

    Attributes:
      name: model and slice, as ``"22B v4-128"``.
      topology: the slice, ``"v4:4x4x4"``.
      mesh: mesh axes and sizes.
      model: the parameters of :class:`~benchmarks._maxtext.decoder.Decoder`.
      flags: compiler options that the run was made with.
      counted: which operations the stated rate counts, one of :data:`COUNTED`.
      mfu: the stated share of the peak, in percent; ``peak_tflops`` that peak, 10¹² operations a second and chip.
      tflops: the stated rate, None where tokens a second are stated.
      tokens_per_second: of one chip, where stated.
      results, settings, base: commit and file where the result, the run's settings and their defaults stand.
    """

    name: str
    generation: str
    topology: str
    mesh: tuple[tuple[str, int], ...]
    model: Mapping[str, Any]
    flags: Mapping[str, str]
    counted: str
    mfu: float
    peak_tflops: float
    tflops: float | None = None
    tokens_per_second: float | None = None
    results: str
    settings: str
    base: str

    @property
    def decoder(self) -> Decoder:
        """The model."""
        from benchmarks._maxtext.decoder import Decoder

        return Decoder(**self.model)

    @property
    def num_devices(self) -> int:
        """Chips of the slice."""
        n = 1
        for _, size in self.mesh:
            n *= size
        return n

    @property
    def tokens(self) -> int:
        """Tokens a chip and step."""
        return self.model["batch"] * self.model["length"]

    def flops(self, counted: str) -> float:
        """Floating-point operations of a step on one chip, in one of the ways of counting in :data:`COUNTED`.

        Raises:
          ValueError: no such way.
        """
        model = self.decoder
        scores = 12.0 * model.layers * model.heads * model.head_dim * model.length * self.tokens
        share = {"weights": 0.0, "half scores": 0.5, "all scores": 1.0}
        if counted not in share:
            raise ValueError(f"counted={counted!r}: expected one of {', '.join(share)}")
        return 6.0 * model.num_parameters * self.tokens + share[counted] * scores

    @property
    def seconds(self) -> float:
        """The step time that the row says."""
        if self.tokens_per_second is not None:
            return self.tokens / self.tokens_per_second
        return self.flops(self.counted) / (self.mfu / 100 * self.peak_tflops * 1e12)


@dataclass(frozen=True, kw_only=True)
class SeveralRow:
    """The same run on several slices, each with the same batch for each chip.

    Attributes:
      row: what was published for one of them.
      slices: how many.
      tflops, mfu: the stated rate of a chip, as for ``row``.
    """

    row: PublishedRow
    slices: int
    tflops: float
    mfu: float

    @property
    def name(self) -> str:
        """As ``"2 × 22B v4-128"``."""
        return f"{self.slices} × {self.row.name}"

    @property
    def seconds(self) -> float:
        """The step time that it says, counted as for one slice."""
        return self.row.flops(self.row.counted) / (self.mfu / 100 * self.row.peak_tflops * 1e12)


def load_several(path: Path = _FILE) -> tuple[SeveralRow, ...]:
    """The rows of a file for several slices.

    Raises:
      ValueError: one is of a row that is not there, or contradicts itself.
    """
    rows = {row.name: row for row in load_rows(path)}
    found = []
    for given in tomllib.loads(path.read_text(encoding="utf-8")).get("several", ()):
        row = rows.get(given["of"])
        if row is None:
            raise ValueError(f"{path}: several slices of {given['of']!r}, which is not a row")
        for slices, (tflops, mfu) in given["rates"].items():
            if abs(mfu / 100 * row.peak_tflops / tflops - 1) > 0.006:
                raise ValueError(
                    f"{path}: {slices} × {row.name!r}: {tflops} TFLOP/s are not {mfu} % of {row.peak_tflops}"
                )
            found.append(SeveralRow(row=row, slices=int(slices), tflops=tflops, mfu=mfu))
    return tuple(found)


def load_rows(path: Path = _FILE) -> tuple[PublishedRow, ...]:
    """The rows of a file such as ``rows.toml``.

    Raises:
      ValueError: a row lacks something, says something unknown, or contradicts itself.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for given in data["rows"]:
        defaults = data["defaults"].get(given["like"]) if "like" in given else {}
        if defaults is None:
            raise ValueError(
                f"{path}: row {given.get('name')!r} is like {given['like']!r}, which has no defaults"
            )
        merged = {**defaults, **{k: v for k, v in given.items() if k != "like"}}
        merged["model"] = {**defaults.get("model", {}), **given["model"]}
        merged["flags"] = {k: str(v).lower() for k, v in merged["flags"].items()}
        merged["mesh"] = tuple((axis, size) for axis, size in merged["mesh"])
        try:
            row = PublishedRow(**merged)
        except TypeError as error:
            raise ValueError(f"{path}: row {given.get('name')!r}: {error}") from None
        if row.counted not in COUNTED or (row.counted == "tokens") != (row.tokens_per_second is not None):
            raise ValueError(
                f"{path}: row {row.name!r}: counted={row.counted!r} does not go with what it states"
            )
        if row.tflops is not None and abs(row.mfu / 100 * row.peak_tflops / row.tflops - 1) > 0.005:
            raise ValueError(
                f"{path}: row {row.name!r}: {row.tflops} TFLOP/s are not {row.mfu} % of {row.peak_tflops}"
            )
        found.append(row)
    return tuple(found)
