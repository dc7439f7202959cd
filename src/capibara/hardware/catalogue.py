"""The chip catalogue: ``chips.toml`` as :class:`~capibara.hardware.chip.Chip` objects, found by name."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from capibara.errors import did_you_mean
from capibara.hardware.chip import GIB, Chip, ChipError, Source
from capibara.hardware.tomlfile import read_toml

__all__ = ["chip_for_device_kind", "get_chip", "list_chips"]

_FILE = Path(__file__).with_name("chips.toml")
_PLAIN = (
    "name",
    "title",
    "vendor",
    "kind",
    "cores_per_chip",
    "megacore",
    "link_bandwidth",
    "links_per_chip",
    "interconnect_bandwidth",
    "dcn_bandwidth",
    "topology_dims",
    "hbm_bytes",
    "hbm_bandwidth",
    "gke_accelerator",
    "chips_per_host",
    "most_chips_on_one_host",
)
_OTHER = {"aliases", "device_kinds", "peak_flops", "sources", "usable_hbm_gib_core", "usable_hbm_gib_chip"}


def _read_chip(row: dict[str, Any], sources: dict[str, Source]) -> Chip:
    unknown = row.keys() - {*_PLAIN, *_OTHER}
    if unknown:
        raise ChipError(f"chips.toml, {row.get('name')}: unknown keys {sorted(unknown)}")
    usable_chip, usable_core = row.get("usable_hbm_gib_chip"), row.get("usable_hbm_gib_core")
    return Chip(
        **{key: row[key] for key in _PLAIN if key in row},
        peaks=tuple((dtype, float(rate)) for dtype, rate in row.get("peak_flops", {}).items()),
        usable_hbm_bytes=None if usable_chip is None else round(usable_chip * GIB),
        usable_hbm_bytes_core=None if usable_core is None else round(usable_core * GIB),
        aliases=tuple(row.get("aliases", ())),
        device_kinds=tuple(row.get("device_kinds", ())),
        sources=tuple((figure, sources[key]) for figure, key in row.get("sources", {}).items()),
    )


@functools.cache
def _catalogue() -> dict[str, Chip]:
    data, _ = read_toml(_FILE, what="chip catalogue", error=ChipError)
    sources = {key: Source(**value) for key, value in data["sources"].items()}
    return {row["name"]: _read_chip(row, sources) for row in data["chip"]}


@functools.cache
def _by_alias() -> dict[str, str]:
    table: dict[str, str] = {}
    for chip in _catalogue().values():
        for alias in (chip.name, chip.title, *chip.aliases, *chip.device_kinds):
            key = _folded(alias)
            if table.setdefault(key, chip.name) != chip.name:
                raise ChipError(f"chips.toml: {alias!r} names both {table[key]!r} and {chip.name!r}")
    return table


def _folded(name: str) -> str:
    return re.sub(r"[\s_./()]+", "-", name.strip().lower()).strip("-")


def list_chips(kind: str | None = None) -> tuple[Chip, ...]:
    """Every chip of the catalogue, or those of one kind (``"tpu"``, ``"gpu"``, ``"cpu"``).

    Raises:
      ChipError: (a ``ValueError``) an unknown kind.
    """
    if kind not in (None, "tpu", "gpu", "cpu"):
        raise ChipError(f"kind: got {kind!r}, expected 'tpu', 'gpu', 'cpu' or None")
    return tuple(chip for chip in _catalogue().values() if kind is None or chip.kind == kind)


def get_chip(name: str | Chip) -> Chip:
    """The chip of that name, alias (``"v4"``, ``"h100"``) or JAX device kind (``"TPU v4"``), in any case.

    With the suffix ``-core`` (``"tpu-v4-core"``), one TensorCore of a TPU.

    Raises:
      ChipError: (a ``ValueError``) an unknown chip; the message gives the nearest spelling and all names.
    """
    if isinstance(name, Chip):
        return name
    if not isinstance(name, str):
        raise ChipError(f"name: got {name!r}, expected a chip's name such as 'tpu-v4'")
    key = _folded(name)
    table = _by_alias()
    if key in table:
        return _catalogue()[table[key]]
    base = key.removesuffix("-core")
    if base != key and base in table:
        return _catalogue()[table[base]].core_view()
    names = ", ".join(_catalogue())
    raise ChipError(
        f"there is no chip {name[:80]!r} in the catalogue.{did_you_mean(key, table)} Known: {names}"
    )


def chip_for_device_kind(device_kind: str) -> Chip | None:
    """The chip that JAX's ``device.device_kind`` names, or None."""
    name = _by_alias().get(_folded(device_kind))
    return None if name is None else _catalogue()[name]
