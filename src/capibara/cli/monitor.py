"""``capibara monitor``: this machine and its devices, now and until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from rich.console import Group

    from capibara.config import TPUConfig
    from capibara.observe.monitor import AlertRule, Reading, Sink, TpuRealTimeMonitor
    from capibara.observe.resharding import ReshardingAdvice

HELP = """Watch this machine and its devices until Ctrl-C: memory, utilisation, temperature, and alerts. JAX is not
started, so that a program may have the accelerators. Exit code: 0; 1 with --fail-on-alert if there was an alert; 2
invalid input."""

_RULE = re.compile(r"\s*(\w+)\s*([<>])\s*([\d.eE+-]+)(?:\s+for\s+([\d.]+)\s*s?)?\s*")
_SETTLING = 0.25  # seconds between the two readings that the utilisation of CPUs needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add = parser.add_argument
    add(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between readings, at least 0.01 (default: 1)",
    )
    add("--duration", type=float, metavar="SECONDS", help="end after this time")
    add("--once", action="store_true", help="print one reading")
    add("--json", action="store_true", help="print one JSON object a line, or one with --once")
    add(
        "--alert",
        action="append",
        default=[],
        metavar="RULE",
        help="such as 'memory_usage>0.9 for 5s'; may be given again",
    )
    add("--fail-on-alert", action="store_true", help="exit with 1 if a rule of --alert was broken")
    add(
        "--topology",
        metavar="AxB",
        help="arrange the accelerators, in their order, as rows and columns of a mesh (2x4), and show hotspots",
    )
    add(
        "--load-threshold",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="load of a hotspot, from 0 to 1 (default: 0.8)",
    )
    add("--jsonl", metavar="FILE", help="append readings and alerts to a file")
    add("--prometheus", type=int, metavar="PORT", help="answer Prometheus on this port")


def run(args: argparse.Namespace) -> int:
    """Watch; return the exit code."""
    from capibara.observe.monitor import MachineSource, MonitorError, TpuRealTimeMonitor

    if not (math.isfinite(args.interval) and args.interval >= 0.01):
        raise MonitorError(f"--interval: got {args.interval!r}, expected seconds, at least 0.01")
    if args.duration is not None and not args.duration >= 0:
        raise MonitorError(f"--duration: got {args.duration!r}, expected seconds, at least 0")
    if args.fail_on_alert and not args.alert:
        raise MonitorError(
            "--fail-on-alert: got no rule, expected one. Add --alert 'memory_usage>0.9 for 5s'"
        )
    rules = [_rule(text) for text in args.alert]
    config = _mesh(args)
    with _sinks(args) as sinks:
        monitor = TpuRealTimeMonitor(
            1000 * args.interval, {}, rules=rules, sinks=sinks, source=MachineSource(machine_wide=True)
        )
        with contextlib.suppress(KeyboardInterrupt):
            _watch(monitor, args, config)
    return 1 if args.fail_on_alert and monitor.history else 0


def _mesh(args: argparse.Namespace) -> TPUConfig | None:
    from capibara.observe.monitor import MonitorError

    if not 0 <= args.load_threshold <= 1:
        raise MonitorError(f"--load-threshold: got {args.load_threshold!r}, expected a share from 0 to 1")
    if args.topology is None:
        return None
    from capibara.config import TPUConfig
    from capibara.config.tpu_config import ScalingConfig
    from capibara.hardware import TopologyError, parse_topology

    try:
        shape = parse_topology(args.topology)
    except TopologyError as error:
        raise MonitorError(f"--topology: {error}") from None
    rank = len(shape.shape)
    return TPUConfig(
        num_chips=shape.size,
        topology=args.topology,
        mesh_axes=None if rank <= 3 else tuple(f"axis {number}" for number in range(rank)),
        scaling_config=ScalingConfig(args.load_threshold),
    )


def _advice(monitor: TpuRealTimeMonitor, config: TPUConfig | None) -> ReshardingAdvice | None:
    from capibara.observe.monitor import MonitorError

    if config is None:
        return None
    from capibara.observe.resharding import advise_resharding

    try:
        return advise_resharding(monitor.load(config), config)
    except MonitorError as error:
        raise MonitorError(f"--topology: {error}") from None


def _watch(monitor: TpuRealTimeMonitor, args: argparse.Namespace, config: TPUConfig | None) -> None:
    if args.once:
        monitor.update()
        time.sleep(_SETTLING)
        reading = monitor.update()
        advice = _advice(monitor, config)
        if args.json:
            print_json(_object(monitor, reading, advice), indent=2)
        else:
            _print(monitor, reading, advice)
        return
    readings = _readings(monitor, args.interval, args.duration)
    if not args.json:
        _live(monitor, readings, config)
        return
    from capibara.observe.monitor.sinks import json_line

    for reading in readings:
        sys.stdout.write(f"{json_line(_object(monitor, reading, _advice(monitor, config)))}\n")
        sys.stdout.flush()  # a pipe's reader waits for it


def _readings(monitor: TpuRealTimeMonitor, interval: float, duration: float | None) -> Iterator[Reading]:
    from capibara.observe.monitor.monitor import next_due

    due = time.monotonic()
    end = math.inf if duration is None else due + duration
    while True:
        yield monitor.update()
        now = time.monotonic()
        due = next_due(due, now, interval)
        if due > end:
            return
        time.sleep(max(0.0, due - now))


@contextlib.contextmanager
def _sinks(args: argparse.Namespace) -> Iterator[list[Sink]]:
    from capibara.observe.monitor import JsonLinesSink, MonitorError, PrometheusSink

    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if args.jsonl:
            try:
                sinks.append(JsonLinesSink(args.jsonl))
            except OSError as error:
                raise MonitorError(f"--jsonl: cannot write {args.jsonl!r}: {error.strerror}") from None
        if args.prometheus is not None:
            try:
                sink = PrometheusSink(args.prometheus)
            except MonitorError as error:
                raise MonitorError(f"--prometheus: {error}") from None
            except OSError as error:
                raise MonitorError(
                    f"--prometheus: cannot answer on port {args.prometheus}: {error.strerror}. Choose another one"
                ) from None
            stack.callback(sink.close)
            sinks.append(sink)
        yield sinks


def _rule(text: str) -> AlertRule:
    from capibara.observe.monitor import METRICS, PROCESS_METRICS, AlertRule, MonitorError

    found = _RULE.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        bound, lasts = float(found[3]), float(found[4] or 0)
    except ValueError:
        raise MonitorError(
            f"--alert: got {text!r}, expected a rule such as 'memory_usage>0.9 for 5s'"
        ) from None
    if found[1] in PROCESS_METRICS:
        known = ", ".join(name for name in METRICS if name not in PROCESS_METRICS)
        raise MonitorError(f"--alert: got {text!r}, expected a metric of the machine: {known}")
    try:
        return AlertRule(found[1], bound, below=found[2] == "<", for_seconds=lasts)
    except MonitorError as error:
        raise MonitorError(f"--alert {text!r}: {error}") from None


def _object(monitor: TpuRealTimeMonitor, reading: Reading, advice: ReshardingAdvice | None) -> dict[str, Any]:
    found = {**reading.to_dict(), "alerts": [str(alert) for alert in monitor.get_alerts()]}
    return found if advice is None else {**found, "resharding": advice.to_dict()}


def _view(monitor: TpuRealTimeMonitor, reading: Reading, advice: ReshardingAdvice | None) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from capibara.observe.monitor import PROCESS_METRICS

    def cell(name: str, value: float | None, reasons: Any) -> Text:
        if value is None:
            return Text(f"not reported: {reasons.get(name, '')}", style="dim")
        return Text(_shown(name, value))

    clock = time.strftime("%H:%M:%S", time.localtime(reading.time))
    title = f"capibara monitor, {clock}"
    machine = Table(box=box.SIMPLE, title=title, title_justify="left", show_header=False)
    for name, value in reading.values.items():
        if name not in PROCESS_METRICS:
            machine.add_row(name, cell(name, value, reading.reasons))
    parts: list[Any] = [machine]
    if reading.devices:
        metrics = ("memory_usage", "utilization", "temperature")
        devices = Table(box=box.SIMPLE, header_style="bold")
        for column in ("device", "kind", *metrics):
            devices.add_column(column, overflow="fold")
        for device in reading.devices:
            cells = [cell(name, getattr(device, name), device.reasons) for name in metrics]
            devices.add_row(Text(device.name), Text(device.kind), *cells)
        parts.append(devices)
    if advice is not None:
        parts.append(Text(str(advice)))
    parts += [Text(f"ALERT {alert}", style="bold red") for alert in monitor.get_alerts()]
    parts += [Text(f"{name}: {problem}", style="yellow") for name, problem in monitor.problems.items()]
    return Group(*parts)


def _shown(name: str, value: float) -> str:
    if name == "temperature":
        return f"{value:.1f} °C"
    filled = round(20 * min(1.0, max(0.0, value)))
    return f"{'█' * filled}{'░' * (20 - filled)} {100 * value:.1f} %"


def _print(monitor: TpuRealTimeMonitor, reading: Reading, advice: ReshardingAdvice | None) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(_view(monitor, reading, advice))


def _live(monitor: TpuRealTimeMonitor, readings: Iterator[Reading], config: TPUConfig | None) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(markup=False, highlight=False), auto_refresh=False) as live:
        for reading in readings:
            live.update(_view(monitor, reading, _advice(monitor, config)), refresh=True)
