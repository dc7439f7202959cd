"""The monitor: a thread that reads metrics at a steady pace, and says when one is beyond its bound for too long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.config import TPUConfig
from capibara.hardware import build_mesh
from capibara.hardware.accelerators import DeviceReading
from capibara.observe.monitor.load import MeasuredLoad, check_load_arguments, load_of
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

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["TpuRealTimeMonitor", "next_due"]

_HISTORY = 1000  # alerts that are kept
_SAMPLES = 300  # readings of devices that are kept, of which there is at most one a second
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
        self._samples: deque[tuple[float, Sequence[DeviceReading]]] = deque(maxlen=_SAMPLES)
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

    def load(
        self,
        config: TPUConfig,
        *,
        mesh: Mesh | None = None,
        metric: str | None = None,
        seconds: float = 60.0,
    ) -> MeasuredLoad:
        """The measured load of the devices in the rows and columns of a mesh: what ``config.detect_hotspots`` takes.

        Rows are the first axis of ``config.topology``, columns the others together. A process measures its own devices;
        those of other processes are NaN, and so are CPUs, whose devices share the machine's cores.

        Args:
          config: whose ``topology`` the devices are arranged in.
          mesh: which device stands where. None: as :func:`capibara.hardware.build_mesh` arranges all of JAX's devices;
            the accelerators of the machine in their order, if the machine is watched or JAX has not started.
          metric: ``"utilization"`` or ``"memory_usage"``. None: utilization, or memory use if no device reports it;
            ``load.metric`` says which.
          seconds: over which the mean is taken, until now. The last 300 readings of devices are kept.

        Raises:
          MonitorError: an invalid argument, or ``config`` has another number of devices than there are.
        """
        check_load_arguments(config, metric, seconds)
        if self._reading is None:
            self._try_update()
        with self._lock:
            newest = self._reading
            since = self._clock() - seconds
            samples = [one for one in self._samples if one[0] >= since]
        names, otherwise = self._names(config, mesh, () if newest is None else newest.devices)
        problem = self.problems.get(type(self._source).__name__)
        return load_of(samples, config, names, metric, otherwise if samples else problem or otherwise)

    def _names(
        self, config: TPUConfig, mesh: Mesh | None, present: Sequence[DeviceReading]
    ) -> tuple[list[str], str]:
        """Names of devices, row by row, and why one of them is not measured."""
        grid = "x".join(map(str, config.mesh_shape))
        if mesh is None and isinstance(self._source, MachineSource) and self._source.of_jax:
            import jax

            devices = jax.devices()
            if len(devices) != config.num_chips:
                raise MonitorError(
                    f"config: got the topology {grid}, which is {config.num_chips} devices, but JAX has "
                    f"{len(devices)}. Give a TPUConfig of their number, or mesh="
                )
            mesh = build_mesh(config.mesh_shape, config.mesh_axes or (), devices)
        if mesh is None:
            if len(present) != config.num_chips:
                raise MonitorError(
                    f"config: got the topology {grid}, which is {config.num_chips} devices, but {len(present)} "
                    "accelerators are watched. Give a TPUConfig of their number; in a program, let JAX start its "
                    "devices first"
                )
            return [one.name for one in present], ""
        if tuple(mesh.devices.shape) != config.mesh_shape:
            found = "x".join(map(str, mesh.devices.shape))
            raise MonitorError(
                f"mesh: got a mesh of {found} devices, expected {grid}, as the topology of config"
            )
        ordered = list(mesh.devices.flat)
        if ordered[0].platform == "cpu":
            otherwise = "devices that are CPUs share the machine's cores: the load of one is not known"
        else:
            otherwise = "it was not read in this time: it is another process's, or the monitor does not run"
        return [f"{device.platform.upper()}_{device.id}" for device in ordered], otherwise

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
                # A source that reads devices less often gives the same ones again.
                if reading.devices and (not self._samples or self._samples[-1][1] is not reading.devices):
                    self._samples.append((now, reading.devices))
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
