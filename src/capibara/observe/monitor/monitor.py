"""The monitor: a thread that reads metrics at a steady pace, and says when one is beyond its bound for too long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.observe.monitor.rules import Alert, AlertRule, MonitorError, RuleState, rules_of
from capibara.observe.monitor.sinks import Sink
from capibara.observe.monitor.sources import MachineSource, Reading, Source

__all__ = ["TpuRealTimeMonitor"]

_HISTORY = 1000  # alerts that are kept


class TpuRealTimeMonitor:
    """Watch devices and machine while a program works; also a context manager.

    Metrics are those of :data:`capibara.observe.monitor.sources.METRICS`. On TPUs they come from libtpu's monitoring,
    on NVIDIA's GPUs from NVML, on CPUs from the operating system. JAX is not started for it: before the program uses
    its devices, only the machine is watched.

    Args:
      update_frequency_ms: milliseconds between two readings, at least 10.
      alert_thresholds: bounds by metric: ``{"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3}``.
        ``utilization`` must not stay below its bound for 10 s, the others not above theirs for 2 s.
      rules: further :class:`~capibara.observe.monitor.rules.AlertRule`, with durations and ends of their own.
      sinks: told of every reading and alert. One that raises is named in the log and in :attr:`problems`, and goes on
        being told.
      source: what is read; by default this machine and its devices.

    Raises:
      MonitorError: a frequency, a threshold or a rule that makes no sense.
    """

    def __init__(
        self,
        update_frequency_ms: float = 100,
        alert_thresholds: Mapping[str, float] | None = None,
        *,
        rules: Sequence[AlertRule] = (),
        sinks: Sequence[Sink] = (),
        source: Source | None = None,
    ) -> None:
        pace = update_frequency_ms
        if (
            isinstance(pace, bool)
            or not isinstance(pace, int | float)
            or not math.isfinite(pace)
            or pace < 10
        ):
            raise MonitorError(f"update_frequency_ms: got {pace!r}, expected milliseconds, at least 10")
        self._pace = pace / 1000
        self._states = [RuleState(rule) for rule in rules_of(alert_thresholds, tuple(rules))]
        self._sinks = tuple(sinks)
        self._source: Source = MachineSource() if source is None else source
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.history: deque[Alert] = deque(maxlen=_HISTORY)
        self.problems: dict[str, str] = {}

    def start_monitoring(self) -> None:
        """Read in a thread from now on; nothing if it does already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self.update()
        self._thread = threading.Thread(target=self._run, name="capibara-monitor", daemon=True)
        self._thread.start()

    def stop_monitoring(self) -> None:
        """End the thread; metrics and alerts stay as they were last."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def get_current_metrics(self) -> dict[str, Any]:
        """The newest reading: each metric (None where it is not reported), ``time`` (seconds since 1970) and
        ``reasons`` (why a metric is None). Before the first one, a reading is taken."""
        with self._lock:
            reading = self._reading
        if reading is None:
            reading = self.update()
        return {"time": reading.time, **reading.values, "reasons": dict(reading.reasons)}

    def has_alerts(self) -> bool:
        """Whether an alert lasts."""
        with self._lock:
            return any(state.active is not None for state in self._states)

    def get_alerts(self) -> list[Alert]:
        """The alerts that last. :attr:`history` has the last thousand events, those that ended twice."""
        with self._lock:
            return [state.active for state in self._states if state.active is not None]

    def update(self) -> Reading:
        """Take one reading now, and compare it with the rules."""
        reading = self._source.read()
        with self._lock:
            self._reading = reading
            changed = [alert for state in self._states if (alert := state.update(reading)) is not None]
            self.history.extend(changed)
        for sink in self._sinks:
            try:
                sink.reading(reading)
                for alert in changed:
                    sink.alert(alert)
            except Exception as error:
                # A broken sink must end neither the program that is watched nor the other sinks.
                self._problem(type(sink).__name__, error)
        return reading

    def _problem(self, name: str, error: Exception) -> None:
        if name not in self.problems:
            logging.getLogger("capibara.monitor").warning("%s: %s: %s", name, type(error).__name__, error)
        self.problems[name] = f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due += self._pace
            late = time.monotonic() - due
            if late > 0:  # after a pause of the machine, go on from now
                due += late
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            try:
                self.update()
            except Exception as error:
                # The same of a source: what cannot be read now may be there the next time.
                self._problem(type(self._source).__name__, error)

    def __enter__(self) -> TpuRealTimeMonitor:
        self.start_monitoring()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_monitoring()
