"""Hosts of 1, 2, 4 or 8 GPUs: their names, memory and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from capibara.errors import CapibaraError, did_you_mean
from capibara.hardware import Chip, get_chip
from capibara.jax_versions import MEMORY_FRACTIONS, memory_fraction
from capibara.plan.errors import PlanError
from capibara.sharding import ASYNCHRONOUS, Links, links_of
from capibara.sharding.communication import DOUBLE_BUFFERED, flags_of

__all__ = ["COUNTS", "FRACTION", "GPUS", "GpuHost", "is_gpu_name", "parse_gpus"]

GPUS = ("h100", "h200", "b200")
"""GPUs that plans are made for, by their names in the chip catalogue."""
COUNTS = (1, 2, 4, 8)
"""GPUs of a host: an HGX or DGX board has eight, and clouds rent parts of it."""
FRACTION = MEMORY_FRACTIONS[0]
"""JAX's setting of the part of a GPU's memory that it takes when it starts."""
# Without the setting (JAX documentation, "GPU memory allocation").
_TAKEN = 0.75
# Of the memory in a description the compiler's scheduler plans with this part (xla/service/gpu/gpu_hlo_schedule.cc,
# GetSchedulerMemoryLimit); in a process that trains, with the memory that JAX took.
_SCHEDULED = 0.8
# NVIDIA's names: a100, h100, gh200, l40s … All of TPUs begin otherwise.
_NAME = re.compile(r"(?:[abhl]|g[bh])\d+[a-z]*(?:[-:].*)?")
_MEMORY = re.compile(r"device_memory_size: (\d+)")


@dataclass(frozen=True)
class GpuHost:
    """GPUs of one host, each a JAX device.

    Attributes:
      generation: ``"h100"``, ``"h200"`` or ``"b200"``: the SXM form, with NVLink and NVSwitch.
      count: 1, 2, 4 or 8.
      fraction: of its memory that a GPU gives to JAX.
    """

    generation: str
    count: int
    fraction: float = _TAKEN

    @property
    def platform(self) -> Literal["cuda"]:
        """JAX's name of the platform that programs are lowered for."""
        return "cuda"

    @property
    def kind(self) -> str:
        """What it is called."""
        return "host"

    @property
    def unit(self) -> str:
        """What it consists of and is priced by."""
        return "GPU"

    @property
    def compiler(self) -> str:
        """Whose figures those of a compiled program are, in words."""
        return "XLA's GPU compiler"

    @property
    def view(self) -> Literal["chip"]:
        """A GPU is one device."""
        return "chip"

    @property
    def devices_per_chip(self) -> int:
        """JAX devices of each GPU."""
        return 1

    @property
    def num_chips(self) -> int:
        """Number of GPUs, the unit of prices."""
        return self.count

    @property
    def num_devices(self) -> int:
        """JAX devices in total: one a GPU."""
        return self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """GPUs behind the switch."""
        return (self.count,)

    @property
    def chip(self) -> Chip:
        """The capabilities of one GPU."""
        return get_chip(self.generation)

    @property
    def chip_name(self) -> str:
        """In the catalogue, and in price files."""
        return self.chip.name

    @property
    def memory_bytes(self) -> int:
        """A GPU's memory as its driver reports it."""
        found = _MEMORY.search(_description(self.generation))
        assert found is not None  # of our own files
        return int(found[1])

    @property
    def usable_hbm_bytes(self) -> int:
        """The part of a GPU's memory that JAX takes, and so has for arrays and programs."""
        return int(self.memory_bytes * self.fraction)

    @property
    def pads_to_tiles(self) -> bool:
        """Whether arrays are padded to tiles in memory."""
        return False

    @property
    def plans_host_memory(self) -> bool:
        """False: JAX does not know the memories of a GPU that is only described, so that arrays stay on it."""
        return False

    @property
    def text(self) -> str:
        """The short form that :func:`parse_gpus` reads back: ``"h100:8"``."""
        return f"{self.generation}:{self.count}"

    @property
    def slice_name(self) -> str:
        """``"8 × NVIDIA H100 SXM"``."""
        return f"{self.count} × {self.chip.title}"

    @property
    def topology_name(self) -> str:
        """The name that ``jax.experimental.topologies.get_topology_desc`` gives the description."""
        return self.generation

    @property
    def topology_options(self) -> dict[str, Any]:
        """Further arguments of ``get_topology_desc``: the description of a GPU, and one host of so many."""
        memory = round(self.usable_hbm_bytes / _SCHEDULED)
        text = _MEMORY.sub(f"device_memory_size: {memory}", _description(self.generation))
        return {"target_config": text, "topology": f"1x1x{self.count}"}

    def links(self, sizes: dict[str, int]) -> Links:
        """What a mesh of these sizes exchanges over, for estimates without a program."""
        return links_of(self.chip, sizes)

    def flag_choices(self, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Options of the compiler that are tried on a mesh, the usual ones first."""
        usual = flags_of(ASYNCHRONOUS["gpu"])
        # Where devices exchange something, it can also go on beside the next turn of a loop.
        return (usual, flags_of(DOUBLE_BUFFERED)) if self.count > 1 else (usual,)

    def limit_flag(self, limit_bytes: int) -> tuple[str, str] | None:
        """None: the GPU compiler has no option for the memory that a program may use."""
        return None

    def larger(self, chips: int) -> GpuHost | None:
        """The smallest host of these GPUs with so many; None beyond 8."""
        return next((GpuHost(self.generation, n, self.fraction) for n in COUNTS if n >= chips), None)

    @property
    def most(self) -> str:
        """The most that there is, for messages."""
        return f"the {COUNTS[-1]} GPUs of a host"

    def notes(self) -> list[str]:
        """What a plan says of these GPUs."""
        return [
            "the time is that of a stated model of the GPU, which is not calibrated (docs: Plan, One host of GPUs)",
            f"a GPU gives JAX {self.fraction:.0%} of its {self.memory_bytes / 2**30:.1f} GiB, as {FRACTION} says, for "
            "planning and for training (0.75 without it)",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"generation": self.generation, "count": self.count, "fraction": self.fraction}

    def __str__(self) -> str:
        return f"{self.text} ({self.slice_name})"


def is_gpu_name(text: object) -> bool:
    """Whether a text names GPUs rather than a slice of TPUs: ``"h100:8"``, also one that is not planned."""
    return isinstance(text, str) and _NAME.fullmatch(text.strip().lower()) is not None


def parse_gpus(text: str, view: str | None = None) -> GpuHost:
    """Read ``"h100:8"``: GPUs of one host.

    The part of their memory that JAX has is that of the environment variable ``XLA_CLIENT_MEM_FRACTION`` (or
    ``XLA_PYTHON_CLIENT_MEM_FRACTION``, its deprecated name), as for training; without it three quarters.

    Raises:
      PlanError: an unknown GPU, another number than 1, 2, 4 or 8, a view of cores, or a fraction that is not between 0
        and 1, or given by both variables.
    """
    name, _, number = text.strip().lower().partition(":")
    if name not in GPUS:
        raise PlanError(
            f"topology={text[:80]!r}: plans for GPUs are made for {', '.join(GPUS)}.{did_you_mean(name, GPUS)} Write "
            f"{GPUS[0]}:8 for eight of one host"
        )
    counts = ", ".join(f"{name}:{n}" for n in COUNTS)
    if not number:
        raise PlanError(f"topology={text!r}: how many GPUs? Expected one of {counts}")
    if number not in map(str, COUNTS):
        raise PlanError(
            f"topology={text[:80]!r}: got {number[:20]!r} GPUs, expected 1, 2, 4 or 8: one host ({counts}). Several "
            "hosts are not planned"
        )
    if view not in (None, "chip"):
        raise PlanError(f"view={view!r}: a GPU is one device. Leave it out")
    return GpuHost(name, int(number), _fraction())


def _fraction() -> float:
    try:
        found = memory_fraction()
    except CapibaraError as error:
        raise PlanError(str(error)) from None
    if found is None:
        return _TAKEN
    name, said = found
    try:
        fraction = float(said)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise PlanError(f"{name}={said[:40]!r}: expected a part of a GPU's memory, above 0 and at most 1")
    return fraction


@lru_cache(maxsize=len(GPUS))
def _description(generation: str) -> str:
    return Path(__file__).with_name(f"{generation}.txtpb").read_text()
