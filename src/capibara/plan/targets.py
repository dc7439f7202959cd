"""What programs are compiled and timed for: a slice of TPUs, or a host of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from capibara.hardware import Chip
from capibara.plan.errors import PlanError
from capibara.plan.gpus import GpuHost, is_gpu_name, parse_gpus
from capibara.plan.slices import Slice, parse_slice
from capibara.sharding import Links

__all__ = ["Target", "parse_target", "target_from_json"]


@runtime_checkable
class Target(Protocol):
    """Devices of one kind, and how they are joined. Figures are per device."""

    @property
    def platform(self) -> Literal["tpu", "cuda"]:
        """JAX's name of the platform that programs are lowered for."""
        ...

    @property
    def kind(self) -> str:
        """``"slice"`` or ``"host"``."""
        ...

    @property
    def unit(self) -> str:
        """What it consists of and is priced by: ``"chip"`` or ``"GPU"``."""
        ...

    @property
    def compiler(self) -> str:
        """Whose figures those of a compiled program are, in words."""
        ...

    @property
    def generation(self) -> str:
        """``"v4"``, ``"h100"`` …"""
        ...

    @property
    def view(self) -> Literal["chip", "core"]:
        """Whether a device is a whole chip or one core of it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips along each axis of the grid, or behind the switch."""
        ...

    @property
    def num_chips(self) -> int:
        """Number of chips or GPUs."""
        ...

    @property
    def devices_per_chip(self) -> int:
        """JAX devices of each."""
        ...

    @property
    def num_devices(self) -> int:
        """JAX devices in total."""
        ...

    @property
    def chip(self) -> Chip:
        """The capabilities of one device."""
        ...

    @property
    def chip_name(self) -> str:
        """The chip's name in the catalogue and in price files."""
        ...

    @property
    def usable_hbm_bytes(self) -> int:
        """Memory that a program may use on one device, in bytes."""
        ...

    @property
    def pads_to_tiles(self) -> bool:
        """Whether arrays are padded to tiles in memory."""
        ...

    @property
    def plans_host_memory(self) -> bool:
        """Whether a program compiled without the device can keep arrays in the host's memory."""
        ...

    @property
    def text(self) -> str:
        """The short form that :func:`parse_target` reads back (without the view)."""
        ...

    @property
    def slice_name(self) -> str:
        """The vendor's name of the whole."""
        ...

    @property
    def topology_name(self) -> str:
        """The name that ``jax.experimental.topologies.get_topology_desc`` takes."""
        ...

    @property
    def topology_options(self) -> dict[str, Any]:
        """Further arguments of ``get_topology_desc``."""
        ...

    @property
    def most(self) -> str:
        """The most that there is, for messages."""
        ...

    def links(self, sizes: dict[str, int]) -> Links:
        """What a mesh of these sizes exchanges over, for estimates without a program."""
        ...

    def flag_choices(self, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Options of the compiler that are tried on a mesh, the usual ones first."""
        ...

    def limit_flag(self, limit_bytes: int) -> tuple[str, str] | None:
        """The option by which a program may use so many bytes; None if the compiler has none."""
        ...

    def larger(self, chips: int) -> Target | None:
        """The smallest of its kind with so many chips; None where there is none."""
        ...

    def notes(self) -> list[str]:
        """What a plan says of it."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain data, which :func:`target_from_json` reads."""
        ...


def parse_target(text: str | Target, view: str | None = None, *, rented: bool = True) -> Target:
    """Read ``"h100:8"``, a host of GPUs, or a slice of TPUs as :func:`~capibara.plan.slices.parse_slice` does.

    Raises:
      PlanError, TopologyError: it is neither.
    """
    if isinstance(text, GpuHost):
        return text if view in (None, "chip") else parse_gpus(text.text, view)
    if is_gpu_name(text):
        return parse_gpus(str(text), view)
    if isinstance(text, str | Slice):
        return parse_slice(text, view, rented=rented)
    raise PlanError(
        f"topology: got {text!r:.80}, expected a slice of TPUs such as 'v4:2x2x4' or GPUs such as 'h100:8'"
    )


def target_from_json(data: Mapping[str, Any]) -> Target:
    """Read the output of :meth:`Target.to_json`."""
    if "count" in data:
        return GpuHost(data["generation"], data["count"], data["fraction"])
    return Slice(data["generation"], tuple(data["shape"]), data["view"])
