"""What a monitor measured, in the rows and columns of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.config import TPUConfig
from capibara.observe.monitor.rules import MonitorError

if TYPE_CHECKING:
    from capibara.hardware.accelerators import DeviceReading

__all__ = ["LOAD_METRICS", "MeasuredLoad", "grid_of", "load_of"]

LOAD_METRICS = ("utilization", "memory_usage")


def grid_of(config: TPUConfig) -> tuple[int, int]:
    """Rows and columns of a mesh: its first axis, and the others together (1 if there are none)."""
    rows = config.mesh_shape[0]
    return rows, config.num_chips // rows


@dataclass(frozen=True, eq=False)
class MeasuredLoad:
    """The mean load of each device of a mesh over some seconds.

    It is an array for NumPy and JAX: ``config.detect_hotspots(load)`` takes it.

    Attributes:
      values: 0 to 1 [rows, columns]; NaN where it is unknown.
      metric: ``"utilization"``, or ``"memory_usage"``.
      seconds: between the first reading and the last. readings: how many there were.
      names: of the devices, row by row, such as ``TPU_0``.
      reasons: why the load of a device is unknown, by its name.
    """

    values: np.ndarray
    metric: str
    seconds: float
    readings: int
    names: tuple[str, ...]
    reasons: Mapping[str, str]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)

    def name(self, row: int, column: int) -> str:
        """The device at a position."""
        return self.names[row * self.values.shape[1] + column]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an unknown load is None."""
        rows = [[None if np.isnan(value) else float(value) for value in row] for row in self.values]
        return {
            "metric": self.metric,
            "values": rows,
            "names": list(self.names),
            "seconds": self.seconds,
            "readings": self.readings,
            "reasons": dict(self.reasons),
        }


def load_of(
    samples: Sequence[tuple[float, Sequence[DeviceReading]]],
    config: TPUConfig,
    names: Sequence[str],
    metric: str | None,
    otherwise: str,
) -> MeasuredLoad:
    """Average samples of (seconds, devices) into the grid of a mesh.

    Args:
      names: of the devices, row by row.
      metric: of :data:`LOAD_METRICS`; None: utilization, or memory use if no device reports utilization.
      otherwise: the reason for a device that is in no sample.
    """
    if metric is None:
        known = any(one.utilization is not None for _, devices in samples for one in devices)
        full = any(one.memory_usage is not None for _, devices in samples for one in devices)
        metric = "utilization" if known or not full else "memory_usage"
    found: dict[str, list[float]] = {name: [] for name in names}
    reasons: dict[str, str] = {}
    for _, devices in samples:
        for one in devices:
            value = getattr(one, metric)
            if one.name not in found:
                continue
            if value is not None:
                found[one.name].append(value)
            else:
                reasons[one.name] = one.reasons.get(metric, "it is not reported")
    missing = {name: reasons.get(name, otherwise) for name, values in found.items() if not values}
    means = [fmean(values) if values else np.nan for values in found.values()]
    seconds = samples[-1][0] - samples[0][0] if samples else 0.0
    return MeasuredLoad(
        np.array(means, np.float64).reshape(grid_of(config)),
        metric,
        seconds,
        len(samples),
        tuple(names),
        missing,
    )


def check_load_arguments(config: Any, metric: Any, seconds: Any) -> None:
    """Refuse invalid arguments of :meth:`TpuRealTimeMonitor.load`.

    Raises:
      MonitorError: names the argument.
    """
    if not isinstance(config, TPUConfig):
        raise MonitorError(f"config: got {config!r:.200}, expected a TPUConfig")
    if metric is not None and metric not in LOAD_METRICS:
        raise MonitorError(f"metric: got {metric!r}, expected {' or '.join(LOAD_METRICS)}, or None")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400:
        raise MonitorError(f"seconds: got {seconds!r}, expected a number above 0, at most 86400")
