"""The result of a health check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from capibara.errors import did_you_mean
from capibara.measure.sizes import size_text
from capibara.observe.health.errors import UnknownCheckError
from capibara.observe.health.results import AxisHealth, DeviceHealth, Fault

__all__ = ["HealthReport"]


@dataclass(frozen=True, eq=False)
class HealthReport(Mapping[str, "bool | None"]):
    """A mapping from the name of each check to True, False, or None where it cannot be known.

    Its keys are ``all_chips_online``, ``temperature_normal``, ``memory_healthy``, ``interconnect_ok``,
    ``compute_correct`` and ``speed_normal``.

    Attributes:
      verdicts: the mapping.
      reasons: for each check, what was found, or why it cannot be known.
      faults: what failed, and where.
      devices: those of all processes.
      axes: of the mesh.
      expected: number of devices that there should be; None if nothing says so.
      seconds: that the check took.
      unfinished: work that was still waiting for a device at the end.
      versions: of Python and the packages.
    """

    verdicts: Mapping[str, bool | None]
    reasons: Mapping[str, str]
    faults: tuple[Fault, ...] = ()
    devices: tuple[DeviceHealth, ...] = ()
    axes: tuple[AxisHealth, ...] = ()
    expected: int | None = None
    seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> bool | None:
        if name not in self.verdicts:
            raise self._unknown(name)
        return self.verdicts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    @property
    def healthy(self) -> bool:
        """Whether no check failed. What cannot be known did not fail."""
        return False not in self.verdicts.values()

    def reason(self, name: str) -> str:
        """What a check found, or why its result cannot be known.

        Raises:
          UnknownCheckError: (a ``KeyError``) there is no check of that name.
        """
        if name not in self.reasons:
            raise self._unknown(name)
        return self.reasons[name]

    def _unknown(self, name: object) -> UnknownCheckError:
        hint = did_you_mean(name, self.verdicts) if isinstance(name, str) else ""
        return UnknownCheckError(
            f"name: got {name!r}, which is not a check.{hint} Use one of: {', '.join(self.verdicts)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "healthy": self.healthy,
            "checks": {name: {"ok": ok, "reason": self.reasons[name]} for name, ok in self.verdicts.items()},
            "faults": [asdict(fault) for fault in self.faults],
            "devices": [asdict(device) for device in self.devices],
            "axes": [asdict(axis) for axis in self.axes],
            "expected_devices": self.expected,
            "seconds": self.seconds,
            "unfinished": list(self.unfinished),
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        kinds = ", ".join(sorted({device.kind for device in self.devices})) or "no device"
        count = len(self.faults)
        state = "healthy" if self.healthy else f"{count} fault{'s' * (count != 1)}"
        lines = [f"{len(self.devices)} × {kinds}: {state} ({self.seconds:.1f} s)"]
        width = max(map(len, self.verdicts), default=0)
        for name, ok in self.verdicts.items():
            word = "unknown" if ok is None else "ok" if ok else "FAILED"
            lines.append(f"  {name:<{width}}  {word:<7}  {self.reasons[name]}")
        lines += [f"  {device.name}: {_figures(device)}" for device in self.devices]
        lines += [f"  axis {axis.name!r}: {_axis_figures(axis)}" for axis in self.axes]
        return "\n".join(lines)


def _figures(device: DeviceHealth) -> str:
    parts = [] if device.online else [device.problem]
    if device.products is not None:
        parts += [f"{dtype} {rate / 1e9:,.4g} GFLOP/s" for dtype, rate in device.products.rates.items()]
    if device.memory is not None and device.memory.bandwidth is not None:
        parts.append(f"memory {device.memory.bandwidth / 1e9:,.3g} GB/s ({size_text(device.memory.tested)})")
    if device.temperature is not None and device.temperature.celsius is not None:
        parts.append(f"{device.temperature.celsius:.0f} °C")
    return ", ".join(parts) or "not reached"


def _axis_figures(axis: AxisHealth) -> str:
    if axis.all_reduce_bandwidth is None or axis.link_bandwidth is None:
        return axis.problem or "not reached"
    return (
        f"{axis.size} devices, all-reduce {axis.all_reduce_bandwidth / 1e9:,.3g} GB/s, "
        f"to a neighbour {axis.link_bandwidth / 1e9:,.3g} GB/s ({size_text(axis.payload)})"
    )
