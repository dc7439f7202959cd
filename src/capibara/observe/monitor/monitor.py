"""The monitor: a thread that reads metrics at a steady pace, and says when one is beyond its bound for too long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.observe.monitor.rules import (
    DEFAULT_THRESHOLDS,
    Alert,
    AlertRule,
    MonitorError,
    RuleState,
    rules_of,
)
from capibara.observe.monitor.sinks import Sink
from capibara.observe.monitor.sources import METRICS, MachineSource, Reading, Source

__all__ = ["TpuRealTimeMonitor", "next_due"]

_HISTORY = 1000  # alerts that are kept
_PATIENCE = 5.0  # seconds


def next_due(due: float, now: float, period: float) -> float:
    """When the next reading is due: a whole number of periods after the last one, and not in the past.

    Readings that were missed are not made up for.
    """
    due += period
    return due if now <= due else due + period * math.ceil((now - due) / period)


class TpuRealTimeMonitor:
    """Watch devices and machine while a program works; also a context manager.

    Metrics are those of :data:`capibara.observe.monitor.sources.METRICS`. On TPUs they come from libtpu's monitoring,
    on NVIDIA's GPUs from NVML, on CPUs from the operating system. JAX is not started for it: before the program uses
    its devices, only the machine is watched.

    Args:
      update_frequency_ms: milliseconds between two readings, at least 10.
      alert_thresholds: bounds by metric; None or an empty dictionary: no thresholds. ``utilization`` must not stay
        below its bound for 10 s, the others not above theirs for 2 s.
      rules: further :class:`~capibara.observe.monitor.rules.AlertRule`, with durations and ends of their own.
      sinks: told of every reading and alert. One that raises is named in the log and in :attr:`problems`, and goes on
        being told.
      source: what is read; by default this machine and its devices.
      clock: monotonic seconds, by which the durations of rules are counted.

    Attributes:
      history: the last thousand events; an alert that ended is there twice, when it began and when it ended.
      problems: the last error of each source and sink that raised, by name.

    Raises:
      MonitorError: a frequency, a threshold or a rule that makes no sense.
    """

    def __init__(
        self,
        update_frequency_ms: float = 100,
        alert_thresholds: Mapping[str, float] | None = DEFAULT_THRESHOLDS,
        *,
        rules: Sequence[AlertRule] = (),
        sinks: Sequence[Sink] = (),
        source: Source | None = None,
        clock: Callable[[], float] = time.monotonic,
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
        self._sinks = _named(sinks)
        self._source: Source = MachineSource() if source is None else source
        self._clock = clock
        self._lock = threading.Lock()
        self._update_lock = threading.Lock()
        self._control = threading.Lock()
        self._reading: Reading | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.history: deque[Alert] = deque(maxlen=_HISTORY)
        self.problems: dict[str, str] = {}

    def start_monitoring(self) -> None:
        """Read in a thread from now on; nothing if it does already."""
        with self._control:
            if self._thread is not None and self._thread.is_alive():
                return
            # Of this thread alone: an earlier one that has not ended yet is not called back.
            self._stop = threading.Event()
            self._try_update()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="capibara-monitor", daemon=True
            )
            self._thread.start()

    def stop_monitoring(self) -> None:
        """End the thread; metrics and alerts stay as they were last. A reading that hangs is waited for 5 s."""
        with self._control:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._problem(type(self._source).__name__, TimeoutError("a reading has not ended"))

    def get_current_metrics(self) -> dict[str, Any]:
        """The newest reading: each metric (None where it is not reported), ``time`` (seconds since 1970), ``reasons``
        (why a metric is None) and ``devices`` (the accelerators). Before the first one, a reading is taken."""
        with self._lock:
            reading = self._reading
        if reading is None:
            reading = self._try_update()
        if reading is None:
            why = self.problems.get(type(self._source).__name__, "")
            reading = Reading(time.time(), dict.fromkeys(METRICS), dict.fromkeys(METRICS, why))
        return reading.to_dict()

    def has_alerts(self) -> bool:
        """Whether an alert lasts."""
        with self._lock:
            return any(state.active is not None for state in self._states)

    def get_alerts(self) -> list[Alert]:
        """The alerts that last; :attr:`history` also has those that ended."""
        with self._lock:
            return [state.active for state in self._states if state.active is not None]

    def update(self) -> Reading:
        """Take one reading now, and compare it with the rules.

        Raises:
          Exception: whatever the source raises.
        """
        with self._update_lock:  # a source need not bear two threads
            reading = self._source.read()
            now = self._clock()
            with self._lock:
                self._reading = reading
                changed = [
                    alert for state in self._states if (alert := state.update(reading, now)) is not None
                ]
                self.history.extend(changed)
        for name, sink in self._sinks:
            self._tell(name, sink.reading, reading)
            for alert in changed:
                self._tell(name, sink.alert, alert)
        return reading

    def _tell(self, name: str, function: Callable[[Any], None], what: Reading | Alert) -> None:
        try:
            function(what)
        except Exception as error:
            # A broken sink must end neither the program that is watched nor the other sinks.
            self._problem(name, error)

    def _try_update(self) -> Reading | None:
        try:
            return self.update()
        except Exception as error:
            # The same of a source: what cannot be read now may be there the next time.
            self._problem(type(self._source).__name__, error)
            return None

    def _problem(self, name: str, error: Exception) -> None:
        if name not in self.problems:
            logging.getLogger("capibara.monitor").warning("%s: %s: %s", name, type(error).__name__, error)
        self.problems[name] = f"{type(error).__name__}: {error}"

    def _run(self, stop: threading.Event) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = next_due(due, now, self._pace)
            if stop.wait(max(0.0, due - now)):
                return
            self._try_update()

    def __enter__(self) -> TpuRealTimeMonitor:
        self.start_monitoring()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_monitoring()


def _named(sinks: Sequence[Sink]) -> list[tuple[str, Sink]]:
    """Sinks by the names of their classes; the second of a class has a number."""
    seen: Counter[str] = Counter()
    named = []
    for sink in sinks:
        name = type(sink).__name__
        seen[name] += 1
        named.append((name if seen[name] == 1 else f"{name} {seen[name]}", sink))
    return named
