"""Prices of chips, with date and source; your own file overrides them.

A price file is TOML with one ``[[price]]`` table each::

    [[price]]
    chip = "tpu-v4"              # a name or alias of the catalogue
    region = "us-central2"
    term = "on-demand"           # or "spot", "committed-1y", "committed-3y"
    usd_per_chip_hour = 2.50
    as_of = 2026-10-01
    source = "our contract"
"""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError, did_you_mean
from capibara.hardware.catalogue import get_chip
from capibara.hardware.chip import Chip, ChipError
from capibara.hardware.tomlfile import read_toml

__all__ = ["Price", "PriceError", "UnknownPriceError", "get_price", "load_prices"]

TERMS = ("on-demand", "spot", "committed-1y", "committed-3y")
_PACKAGED = Path(__file__).with_name("prices.toml")
_KEYS = ("chip", "region", "term", "usd_per_chip_hour", "as_of", "source", "dated_by")


class PriceError(CapibaraError, ValueError):
    """A price file is invalid."""


class UnknownPriceError(CapibaraError, LookupError):
    """No price is known for that chip, region and term."""


@dataclass(frozen=True)
class Price:
    """US dollars for one chip for one hour.

    ``as_of`` is the date given by the source (``dated_by == "source"``) or, if it has none, the day it was read
    (``"reading"``). ``own`` distinguishes prices of the user's file from packaged ones.
    """

    chip: str
    region: str
    term: str
    usd_per_chip_hour: float
    as_of: datetime.date
    source: str
    dated_by: str = "source"
    own: bool = False

    def cost(self, chips: float, hours: float) -> float:
        """US dollars for ``chips`` chips over ``hours`` hours.

        Raises:
          PriceError: (a ``ValueError``) one of them is negative or not finite.
        """
        for name, value in (("chips", chips), ("hours", hours)):
            if not math.isfinite(value) or value < 0:
                raise PriceError(f"{name}: got {value!r}, expected a finite number of at least 0")
        return self.usd_per_chip_hour * chips * hours

    def __str__(self) -> str:
        return (
            f"${self.usd_per_chip_hour:.4g} per chip-hour: {self.chip}, {self.region}, {self.term}, "
            f"as of {self.as_of} [{self.source}]"
        )


def load_prices(path: str | os.PathLike[str] | None = None) -> tuple[Price, ...]:
    """The packaged prices, overridden by a file: ``path``, or that of CAPIBARA_PRICES.

    A row of the file replaces the packaged row of the same chip, region and term; other rows are added.

    Raises:
      PriceError: the file cannot be read, or a row is invalid; the message names row, key and what is expected.
    """
    prices = {(p.chip, p.region, p.term): p for p in _read(_PACKAGED, own=False)}
    if path is None:
        path = os.environ.get("CAPIBARA_PRICES") or None
    if path is not None:
        prices.update({(p.chip, p.region, p.term): p for p in _read(Path(path), own=True)})
    return tuple(prices.values())


def get_price(
    chip: str | Chip,
    *,
    region: str | None = None,
    term: str = "on-demand",
    path: str | os.PathLike[str] | None = None,
) -> Price:
    """The price of a chip; without a region the lowest known, among the user's own prices if there are any.

    Raises:
      UnknownPriceError: (a ``LookupError``) none is known; the message lists those that are. Never a silent 0.
      PriceError: an unknown term, or an invalid price file.
      ChipError: an unknown chip.
    """
    if term not in TERMS:
        raise PriceError(
            f"term: got {term!r}, expected one of {', '.join(TERMS)}.{did_you_mean(str(term), TERMS)}"
        )
    name = get_chip(chip).name.removesuffix("-core")
    of_chip = [p for p in load_prices(path) if p.chip == name]
    found = [p for p in of_chip if p.term == term and region in (None, p.region)]
    found = [p for p in found if p.own] or found
    if found:
        return min(found, key=lambda p: p.usd_per_chip_hour)
    known = "; ".join(f"{p.region} {p.term}" for p in of_chip) or "none"
    where = f" in region {region!r}" if region else ""
    looked = "" if of_chip else _why_unpriced(name)
    raise UnknownPriceError(
        f"the {term} price of {name}{where} is not known (known for this chip: {known}){looked}. Give one in a TOML "
        "file named by the environment variable CAPIBARA_PRICES; see capibara.hardware.prices"
    )


def _why_unpriced(name: str) -> str:
    """What was found when a price was looked for; empty if none was."""
    data, _ = read_toml(_PACKAGED, what="price file", error=PriceError)
    found = data["unpriced"].get(name)
    return "" if found is None else f": by {found['as_of']} none was found. {found['why']}"


def _read(path: Path, *, own: bool) -> list[Price]:
    data, _ = read_toml(path, what="price file", error=PriceError)
    unknown = data.keys() - ({"price", "sources"} if own else {"price", "sources", "unpriced"})
    if unknown:
        name = sorted(unknown)[0]
        raise PriceError(
            f"{path}: unknown key {name!r}.{did_you_mean(name, ['price'])} Expected [[price]] tables"
        )
    rows, sources = data.get("price", []), data.get("sources", {})
    if not isinstance(rows, list) or not isinstance(sources, dict):
        raise PriceError(
            f"{path}: expected [[price]] tables (double brackets: a list), got {type(rows).__name__}"
        )
    return [_price(row, sources, f"{path}, price {number}", own) for number, row in enumerate(rows, 1)]


def _price(row: Any, sources: dict[str, Any], where: str, own: bool) -> Price:
    if not isinstance(row, dict):
        raise PriceError(f"{where}: got {row!r}, expected a table")
    for key in row:
        if key not in _KEYS:
            raise PriceError(
                f"{where}: unknown key {key!r}.{did_you_mean(key, _KEYS)} Known: {', '.join(_KEYS)}"
            )
    for key in _KEYS[:-1]:
        if key not in row:
            raise PriceError(f"{where}: the key {key!r} is missing. A price has: {', '.join(_KEYS[:-1])}")
    for key in ("chip", "region", "term", "source"):
        if not isinstance(row[key], str) or not row[key]:
            raise PriceError(f"{where}: {key} = {row[key]!r}, expected a string")
    try:
        chip = get_chip(row["chip"]).name.removesuffix("-core")
    except ChipError as error:
        raise PriceError(f"{where}: {error}") from error
    if row["term"] not in TERMS:
        hint = did_you_mean(row["term"], TERMS)
        raise PriceError(f"{where}: term = {row['term']!r}, expected one of {', '.join(TERMS)}.{hint}")
    usd = row["usd_per_chip_hour"]
    if isinstance(usd, bool) or not isinstance(usd, (int, float)) or not math.isfinite(usd) or usd < 0:
        raise PriceError(f"{where}: usd_per_chip_hour = {usd!r}, expected a finite number of at least 0")
    as_of = row["as_of"]
    if isinstance(as_of, str):
        try:
            as_of = datetime.date.fromisoformat(as_of)
        except ValueError:
            as_of = None
    if not isinstance(as_of, datetime.date) or isinstance(as_of, datetime.datetime):
        raise PriceError(f"{where}: as_of = {row['as_of']!r}, expected a day such as 2026-10-01")
    dated_by = row.get("dated_by", "source")
    if dated_by not in ("source", "reading"):
        raise PriceError(f"{where}: dated_by = {dated_by!r}, expected 'source' or 'reading'")
    known = sources.get(row["source"])
    title = (
        known["title"] if isinstance(known, dict) and isinstance(known.get("title"), str) else row["source"]
    )
    return Price(chip, row["region"], row["term"], float(usd), as_of, title, dated_by, own)
