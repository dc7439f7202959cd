"""``capibara monitor``: this machine and its devices, now and until Ctrl-C."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from rich.console import Group

    from capibara.observe.monitor import AlertRule, TpuRealTimeMonitor

HELP = """Watch this machine and its devices until Ctrl-C: memory, utilisation, temperature, and alerts. JAX is not
started, so that a program may have the accelerators. Exit code: 0; 1 with --fail-on-alert if there was an alert; 2
invalid input."""

_RULE = re.compile(r"^\s*(\w+)\s*([<>])\s*([\d.eE+-]+)(?:\s+for\s+([\d.]+)\s*s?)?\s*$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add = parser.add_argument
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between readings (default: 1)")
    add("--duration", type=float, metavar="S", help="end after so many seconds")
    add("--once", action="store_true", help="print one reading")
    add("--json", action="store_true", help="print one JSON object for each reading")
    add(
        "--alert",
        action="append",
        default=[],
        metavar="RULE",
        help="such as 'memory_usage>0.9 for 5s'; may be given again",
    )
    add("--fail-on-alert", action="store_true", help="exit with 1 if there was an alert")
    add("--jsonl", metavar="FILE", help="append readings and alerts to a file")
    add("--prometheus", type=int, metavar="PORT", help="answer Prometheus on this port")


def run(args: argparse.Namespace) -> int:
    """Watch; return the exit code."""
    from capibara.observe.monitor import JsonLinesSink, PrometheusSink, Sink, TpuRealTimeMonitor

    sinks: list[Sink] = []
    if args.jsonl:
        sinks.append(JsonLinesSink(args.jsonl))
    if args.prometheus is not None:
        sinks.append(PrometheusSink(args.prometheus))
    monitor = TpuRealTimeMonitor(
        1000 * args.interval, rules=[_rule(text) for text in args.alert], sinks=sinks
    )
    end = None if args.duration is None else time.monotonic() + args.duration
    try:
        if args.once:
            # CPUs' utilisation is that between two readings.
            monitor.update()
            time.sleep(min(args.interval, 0.25))
            monitor.update()
            print_json(_object(monitor), indent=2) if args.json else _print(monitor)
        elif args.json:
            while end is None or time.monotonic() < end:
                monitor.update()
                print_json(_object(monitor), indent=0)
                time.sleep(args.interval)
        else:
            _live(monitor, end)
    except KeyboardInterrupt:
        pass
    return 1 if args.fail_on_alert and monitor.history else 0


def _rule(text: str) -> AlertRule:
    from capibara.observe.monitor import AlertRule, MonitorError

    found = _RULE.match(text)
    try:
        if found is None:
            raise ValueError
        bound, lasts = float(found[3]), float(found[4] or 0)
    except ValueError:
        raise MonitorError(
            f"--alert: got {text!r}, expected a rule such as 'memory_usage>0.9 for 5s'"
        ) from None
    return AlertRule(found[1], bound, below=found[2] == "<", for_seconds=lasts)


def _object(monitor: TpuRealTimeMonitor) -> dict[str, object]:
    return {**monitor.get_current_metrics(), "alerts": [str(alert) for alert in monitor.get_alerts()]}


def _table(monitor: TpuRealTimeMonitor) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    metrics = monitor.get_current_metrics()
    reasons = metrics.pop("reasons")
    clock = time.strftime("%H:%M:%S", time.localtime(metrics.pop("time")))
    table = Table(box=box.SIMPLE, title=f"capibara monitor, {clock}", title_justify="left", show_header=False)
    for name, value in metrics.items():
        shown = (
            Text(f"not reported: {reasons.get(name, '')}", style="dim")
            if value is None
            else Text(_shown(name, value))
        )
        table.add_row(name, shown)
    alerts = [Text(f"ALERT {alert}", style="bold red") for alert in monitor.get_alerts()]
    return Group(table, *alerts)


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name == "temperature":
        return f"{value:.1f} °C"
    filled = round(30 * min(1.0, max(0.0, value)))
    return f"{'█' * filled}{'░' * (30 - filled)} {100 * value:.1f} %"


def _print(monitor: TpuRealTimeMonitor) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(_table(monitor))


def _live(monitor: TpuRealTimeMonitor, end: float | None) -> None:
    from rich.console import Console
    from rich.live import Live

    with (
        monitor,
        Live(console=Console(markup=False, highlight=False), auto_refresh=False, transient=False) as live,
    ):
        while end is None or time.monotonic() < end:
            live.update(_table(monitor), refresh=True)
            time.sleep(0.25)
