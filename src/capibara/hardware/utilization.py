"""Utilization of JAX's GPUs and TPUs: now, and its mean over a region of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from capibara.hardware.accelerators import Nvml, said, tpu_values

__all__ = ["MeanUtilization", "UtilizationSampler", "utilizations"]

_PATIENCE = 5.0  # seconds


def utilizations(devices: Sequence[Any], nvml: Callable[[], Nvml]) -> list[tuple[float | None, str]]:
    """For each device the share of the time in which it worked, 0 to 1; or None and the reason.

    Args:
      devices: of JAX, of one platform and of this process; at least one.
      nvml: makes or returns the library.
    """
    first = devices[0]
    if first.platform == "tpu":
        chips, why = tpu_values("duty_cycle_pct")
        if not chips:
            return [(None, why)] * len(devices)
        # A chip is one device or two.
        return [
            (chips[min(place * len(chips) // len(devices), len(chips) - 1)] / 100, "")
            for place in range(len(devices))
        ]
    if "nvidia" not in first.device_kind.lower():
        return [(None, f"no source of utilization for {first.device_kind}")] * len(devices)
    found: list[tuple[float | None, str]] = []
    for device in devices:
        try:
            found.append((nvml().utilization(device), ""))
        except ImportError as error:
            found.append((None, f"{error}: pip install nvidia-ml-py"))
        except Exception as error:
            # NVMLError, and others in other versions.
            found.append((None, said(error)))
    return found


@dataclass(frozen=True)
class MeanUtilization:
    """The mean over devices and time.

    Attributes:
      value: 0 to 1; None if no device reports it.
      note: its source and number of readings, or why it is None.
    """

    value: float | None
    note: str


class UtilizationSampler:
    """Reads the utilization of devices in a thread while a region runs; a context manager.

    The drivers average over a window of their own, so a short region is not separated from what ran before it:
    :attr:`mean` says so.

    Args:
      devices: of JAX, of one platform and of this process; at least one.
      period: seconds between two readings.
    """

    def __init__(self, devices: Sequence[Any], *, period: float = 0.1) -> None:
        self._devices, self._period = tuple(devices), period
        self._library: Nvml | None = None
        self._readings: list[list[tuple[float | None, str]]] = []
        self._before: list[tuple[float | None, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capibara-utilization", daemon=True)

    def __enter__(self) -> UtilizationSampler:
        # Starts the library, so that the region does not wait for it; its values are those of the time before.
        self._before = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            ended = self._stop.wait(self._period)
            self._readings.append(self._read())
            if ended:
                return

    def _read(self) -> list[tuple[float | None, str]]:
        try:
            return utilizations(self._devices, self._nvml)
        except Exception as error:
            # A vendor's library without a stated interface of errors must not end the program that is measured.
            return [(None, said(error))] * len(self._devices)

    def _nvml(self) -> Nvml:
        if self._library is None:
            self._library = Nvml()
        return self._library

    @property
    def mean(self) -> MeanUtilization:
        """Over the region until now, or until it ended."""
        readings = list(self._readings)
        of_devices = [
            [value for reading in readings if (value := reading[place][0]) is not None]
            for place in range(len(self._devices))
        ]
        known = [fmean(values) for values in of_devices if values]
        if not known:
            reasons = [why for reading in (*reversed(readings), self._before) for _, why in reading if why]
            return MeanUtilization(None, reasons[0] if reasons else "no reading has ended")
        tpu = self._devices[0].platform == "tpu"
        source = "libtpu's duty cycle" if tpu else "NVML"
        window = "its own window" if tpu else "the last 1/6 to 1 s"
        note = (
            f"{source}, mean of {max(map(len, of_devices))} readings, each over {window}, of {len(known)} of "
            f"{len(self._devices)} devices; a region that is shorter includes the time before"
        )
        missing = next((why for reading in reversed(readings) for value, why in reading if value is None), "")
        return MeanUtilization(fmean(known), f"{note}; others: {missing}" if missing else note)
