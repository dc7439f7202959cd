"""A TPU slice as a target of compilation and prediction: its devices and their topology.

A slice is a grid of chips. A JAX device is a whole chip if its cores act as one (v4 with megacore, v5p, v5e, v6e) or
one core of two (v4 without megacore, TPU7x): the two *views*. Figures here are always per device.

Links: each chip has one link each way along each axis of the grid. An axis closes to a ring ("wraps") on v4, v5p and
TPU7x if the slice consists of whole cubes of 4×4×4, and on v5e and v6e if the axis is 16 long, the whole pod (the
Cloud TPU documentation's pages of each version; "How to Scale Your Model", part 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from capibara.errors import did_you_mean
from capibara.hardware import Chip, get_chip
from capibara.hardware.topology import parse_topology
from capibara.plan.errors import PlanError
from capibara.plan.grids import (
    DIMENSIONS,
    MOST_CHIPS,
    at_least,
    grid_text,
    is_part_of_host,
    is_rented,
    nearest,
    usual_grid,
)
from capibara.sharding import ASYNCHRONOUS as _ASYNCHRONOUS
from capibara.sharding import WHOLE_PRODUCTS as _WHOLE_PRODUCTS
from capibara.sharding import Links, links_of
from capibara.sharding.communication import flags_of, whole_products

__all__ = [
    "ASYNCHRONOUS",
    "GENERATIONS",
    "LIMIT",
    "WHOLE_PRODUCTS",
    "Slice",
    "limit_option",
    "parse_slice",
    "views_of",
]

View = Literal["chip", "core"]

LIMIT = "xla_tpu_max_hbm_size_mib"
"""The TPU compiler's option for the memory that a program may use, in MiB; what the runtime reserves is not part of it
(libtpu 0.0.42)."""

ASYNCHRONOUS = flags_of(_ASYNCHRONOUS["tpu"])
# Where activations are exchanged (a model axis) it can be either way, so both are tried.
WHOLE_PRODUCTS = flags_of(_WHOLE_PRODUCTS)

GENERATIONS = ("v4", "v5e", "v5p", "v6e", "v7x")
# A device's floating-point operations in one cycle in bfloat16: matrix units × rows × columns × 2. With the vendor's
# peak it gives the clock, which no page states. Units per chip: jax's TPU table and "How to Scale Your Model", part 2.
_FLOP_PER_CYCLE = {
    "v4": 8 * 128 * 128 * 2,
    "v5e": 4 * 128 * 128 * 2,
    "v5p": 8 * 128 * 128 * 2,
    "v6e": 4 * 256 * 256 * 2,
    "v7x": 8 * 256 * 256 * 2,
}


@dataclass(frozen=True)
class Slice:
    """A slice of a TPU pod.

    Attributes:
      generation: ``"v4"``, ``"v5e"``, ``"v5p"``, ``"v6e"`` or ``"v7x"``.
      shape: chips along each axis of the grid.
      view: whether a device is a whole chip or one core.
    """

    generation: str
    shape: tuple[int, ...]
    view: View = "chip"

    @property
    def platform(self) -> Literal["tpu"]:
        """JAX's name of the platform that programs are lowered for."""
        return "tpu"

    @property
    def kind(self) -> str:
        """What it is called."""
        return "slice"

    @property
    def unit(self) -> str:
        """What it consists of and is priced by."""
        return "chip"

    @property
    def compiler(self) -> str:
        """Whose figures those of a compiled program are, in words."""
        return "the TPU compiler"

    @property
    def num_chips(self) -> int:
        """Number of chips, the unit of rental."""
        return math.prod(self.shape)

    @property
    def devices_per_chip(self) -> int:
        """JAX devices per chip."""
        return (self._whole_chip.cores_per_chip or 1) if self.view == "core" else 1

    @property
    def num_devices(self) -> int:
        """JAX devices in total."""
        return self.num_chips * self.devices_per_chip

    @cached_property
    def _whole_chip(self) -> Chip:
        return get_chip(f"tpu-{self.generation}")

    @property
    def chip(self) -> Chip:
        """The capabilities of one device (half of a chip in the core view)."""
        return self._device

    @cached_property
    def _device(self) -> Chip:
        return self._whole_chip.core_view() if self.view == "core" else self._whole_chip

    @property
    def chip_name(self) -> str:
        """The whole chip's name in the catalogue, and in price files."""
        return f"tpu-{self.generation}"

    @property
    def pads_to_tiles(self) -> bool:
        """Whether arrays are padded to tiles in memory."""
        return True

    @property
    def plans_host_memory(self) -> bool:
        """Whether a program compiled without the device can keep arrays in the host's memory."""
        return True

    @property
    def usable_hbm_bytes(self) -> int:
        """Memory that the compiler makes available to a program on one device, in bytes."""
        usable = self.chip.usable_hbm_bytes
        if usable is None and self.view == "chip":
            usable = self._whole_chip.usable_hbm_bytes_core
        if usable is None:
            raise PlanError(f"{self}: the usable memory of a device is not known in the {self.view} view")
        return usable

    @property
    def clock_hz(self) -> float:
        """Cycles per second: the vendor's bfloat16 peak over the matrix units' operations per cycle."""
        return self._whole_chip.peak("bfloat16") / _FLOP_PER_CYCLE[self.generation]

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second over one link, one way."""
        return self.links({}).bandwidth / 2  # of a ring, which goes both ways round

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Which axes of the grid close to a ring."""
        if DIMENSIONS[self.generation] == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == 16 for size in self.shape)

    @property
    def grid(self) -> str:
        """``"2x2x4"``."""
        return "x".join(map(str, self.shape))

    @property
    def topology_name(self) -> str:
        """The name that ``jax.experimental.topologies.get_topology_desc`` knows."""
        return f"{'tpu7x' if self.generation == 'v7x' else self.generation}:{self.grid}"

    @property
    def topology_options(self) -> dict[str, Any]:
        """Further arguments of ``get_topology_desc``."""
        options: dict[str, Any] = {}
        if self.generation == "v4" and self.view == "chip":
            options["chip_config_name"] = "megacore"
        if any(self.wrap):
            # Of three axes, also where the grid has two.
            options["wrap"] = (*self.wrap, *(False,) * (3 - len(self.shape)))
        if any(size % 2 for size in self.shape[:2]):
            # A host has 2×2 chips; fewer are cut out of one.
            options["chips_per_host_bounds"] = (1, 1, 1)
        return options

    @property
    def slice_name(self) -> str:
        """Google's name of the slice, such as ``"v4-32"``."""
        return parse_topology(f"{self.generation}:{self.grid}").slice_name or ""

    @property
    def text(self) -> str:
        """The short form that :func:`parse_slice` reads back (without the view): ``"v4:2x2x4"``."""
        return f"{self.generation}:{self.grid}"

    def links(self, sizes: dict[str, int]) -> Links:
        """What a mesh of these sizes exchanges over, for estimates without a program: a ring of the grid each axis."""
        return replace(links_of(self._whole_chip, sizes), hop_seconds=0.0)

    def flag_choices(self, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Options of the compiler that are tried on a mesh, the usual ones first."""
        usual = flags_of(whole_products(self.generation))
        return (usual, ASYNCHRONOUS) if dict(mesh).get("model", 1) > 1 else (usual,)

    def limit_flag(self, limit_bytes: int) -> tuple[str, str]:
        """The option by which a program may use so many bytes of a device's memory, rounded down to MiB."""
        return limit_option(limit_bytes)

    def larger(self, chips: int) -> Slice | None:
        """The smallest rented slice of the same generation with so many chips; None where there is none."""
        grid = at_least(self.generation, chips)
        return None if grid is None else Slice(self.generation, grid)

    @property
    def most(self) -> str:
        """The most that there is, for messages."""
        return f"the {MOST_CHIPS[self.generation]} chips of a {self.generation} pod"

    def notes(self) -> list[str]:
        """A note for a part of a host, which has no price of its own."""
        if not is_part_of_host(self.generation, self.shape):
            return []
        whole = self.larger(2) or self
        return [f"{self.text} is a part of a host, which is rented as {whole}; the price is that part's"]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"generation": self.generation, "shape": list(self.shape), "view": self.view}

    def __str__(self) -> str:
        devices = f", {self.num_devices} devices (one a core)" if self.view == "core" else ""
        chips = f"{self.num_chips} chip{'s' * (self.num_chips != 1)}"
        return f"{self.text} ({chips}, {self.slice_name}{devices})"


def limit_option(limit_bytes: int) -> tuple[str, str]:
    """The option by which a program may use so many bytes of a TPU's memory, rounded down to MiB."""
    return LIMIT, str(max(1, limit_bytes >> 20))


def parse_slice(text: str | Slice, view: str | None = None, *, rented: bool = True) -> Slice:
    """Read ``"v4:2x2x4"`` or a name such as ``"v4-32"`` (cores, 16 chips) or ``"v6e-16"`` (chips).

    Args:
      text: the slice; a grid with one size too few gets a last axis of 1.
      view: ``"chip"`` or ``"core"``; by default a chip if the generation supports it (all but TPU7x).
      rented: whether grids of which there are no slices are refused; files that were written once are read anyway.

    Raises:
      PlanError: an unknown generation or view, a grid with the wrong number of axes, a name or grid of which there are
        no slices, or more chips than a pod has.
      TopologyError: it is not the name of a topology.
    """
    if isinstance(text, Slice):
        return text if view in (None, text.view) else _slice(text.generation, text.shape, view)
    topology = parse_topology(text)
    if topology.generation is None:
        raise PlanError(
            f"topology={text!r} names no TPU generation: write 'v4:{text}' (chips on a grid) or a name as 'v4-32'"
        )
    generation = topology.generation
    if generation not in GENERATIONS:
        raise PlanError(f"topology={text!r}: plans are made for {', '.join(GENERATIONS)}")
    dimensions = DIMENSIONS[generation]
    shape = topology.shape
    if len(shape) == 1:
        usual = usual_grid(generation, shape[0])
        if usual is None:
            raise PlanError(
                f"topology={text!r}: no slice of {generation} has {shape[0]} chips. The nearest: "
                f"{_names(generation, shape[0])}; or give the grid ({generation}:{'x'.join('4' * dimensions)})"
            )
        shape = usual
    elif len(shape) == dimensions - 1:
        shape = (*shape, 1)
    if len(shape) != dimensions:
        raise PlanError(
            f"topology={text!r} has {len(shape)} axes, expected {dimensions}: {generation} chips stand on a grid of "
            f"{dimensions} axes"
        )
    _check_size(generation, shape)
    if rented and not is_rented(generation, shape) and not is_part_of_host(generation, shape):
        raise PlanError(
            f"topology={text!r}: no slice of {generation} has this grid ({math.prod(shape)} chips). The nearest: "
            f"{_names(generation, math.prod(shape))}"
            + ("; beyond 32 chips the sizes are multiples of 4" if dimensions == 3 else "")
        )
    return _slice(generation, shape, view)


def views_of(generation: str) -> tuple[View, ...]:
    """What JAX may show as a device, the usual one first."""
    return ("chip", "core") if generation == "v4" else ("core",) if generation == "v7x" else ("chip",)


def _slice(generation: str, shape: tuple[int, ...], view: str | None) -> Slice:
    chip = get_chip(f"tpu-{generation}")
    _check_size(generation, shape)
    views = views_of(generation)
    if view is None:
        return Slice(generation, shape, views[0])
    if view not in ("chip", "core"):
        raise PlanError(f"view={view!r} must be 'chip' or 'core'.{did_you_mean(str(view), ('chip', 'core'))}")
    if view not in views:
        raise PlanError(f"view={view!r}: {chip.title} shows JAX one device a {views[0]} only")
    return Slice(generation, shape, views[0] if view == views[0] else "core")


def _check_size(generation: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MOST_CHIPS[generation]:
        raise PlanError(
            f"{grid_text(generation, shape)} has {math.prod(shape)} chips; a {generation} pod has "
            f"{MOST_CHIPS[generation]}"
        )


def _names(generation: str, chips: int) -> str:
    """``"v4:2x2x4 (16 chips, v4-32), …"``: the rented slices nearest to a number of chips."""
    return ", ".join(str(Slice(generation, grid)) for grid in nearest(generation, chips))
