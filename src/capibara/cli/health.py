"""``capibara health``: exercise every device and the links between them, and say what failed.

Exit code 0 when nothing failed, 1 when something did. What cannot be known here is shown, and is not a failure.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.cli._leaving import leave

if TYPE_CHECKING:
    from capibara.observe.health import DeviceHealth, HealthReport

HELP = """Check the health of all devices: each answers in time, multiplies matrices whose product is known, keeps
patterns in its memory, and exchanges data with its neighbours, all compared bit by bit. Exit code: 0 nothing failed,
1 something did, 2 invalid arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("--quick", action="store_true", help="less memory, smaller and fewer products")
    parser.add_argument(
        "--expected", type=int, metavar="N", help="number of devices that there should be, over all processes"
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        metavar="F",
        help="share of each device's free memory to test, up to 0.9 (default: a quarter, but at most 1 GiB)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that one piece of work on a device may take (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Check; return the exit code."""
    from capibara.observe.diagnostics import TpuDiagnostics
    from capibara.train.processes import join_processes

    first = join_processes().first
    with _progress(quiet=not first) as progress:
        report = TpuDiagnostics().run_full_health_check(
            expected_devices=args.expected,
            memory_fraction=args.memory_fraction,
            timeout=args.timeout,
            quick=args.quick,
            progress=progress,
        )
    # Of several processes one shows the devices of all; what another one has not got through, it says itself.
    if first or report.unfinished:
        if args.json:
            print_json(report.to_dict(), indent=2)
        else:
            _show(report)
    code = 0 if report.healthy else 1
    if report.unfinished:
        # JAX waits for its devices when Python exits: for one that hangs, forever.
        atexit.register(leave, SystemExit(code))
    return code


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def step(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield step


def _show(report: HealthReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, highlight=False)

    def table(title: str, *columns: str) -> Table:
        made = Table(
            title=title, title_justify="left", box=box.SIMPLE, header_style="bold", title_style="bold cyan"
        )
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    checks = table("Checks", "", "check", "found")
    for name, ok in report.items():
        mark = {None: ("unknown", "yellow"), True: ("ok", "green"), False: ("FAILED", "bold red")}[ok]
        checks.add_row(Text(*mark), name, Text(report.reason(name)))
    console.print(checks)
    if report.devices:
        kinds = ", ".join(sorted({device.kind for device in report.devices}))
        columns = ("device", "answer", "products", "TFLOP/s bf16", "f32", "memory", "GB/s", "°C")
        devices = table(f"Devices: {len(report.devices)} × {kinds}", *columns)
        for device in report.devices:
            devices.add_row(*map(Text, _cells(device)))
        console.print(devices)
    if report.axes:
        axes = table("Links", "axis", "devices", "all-reduce", "GB/s", "neighbours", "GB/s")
        for axis in report.axes:
            cells = (
                axis.name,
                str(axis.size),
                _mark(axis.all_reduce),
                _with_share(axis.all_reduce_bandwidth, None, 1e9),
                _mark(axis.permute),
                _with_share(axis.link_bandwidth, axis.peak_link, 1e9),
            )
            axes.add_row(*map(Text, cells))
        console.print(axes)
    for fault in report.faults:
        console.print(Text(f"{fault.check}: {fault}", style="bold red"), soft_wrap=True)
    count = len(report.faults)
    if report.healthy:
        console.print(Text(f"Nothing failed ({report.seconds:.1f} s).", style="bold green"))
    else:
        console.print(Text(f"{count} fault{'s' * (count != 1)} ({report.seconds:.1f} s).", style="bold red"))


def _cells(device: DeviceHealth) -> tuple[str, ...]:
    from capibara.measure.sizes import size_text

    products, memory, temperature = device.products, device.memory, device.temperature
    rates = device.rates()
    answer = f"{device.seconds * 1e3:.0f} ms" if device.online and device.seconds is not None else "FAILED"
    checked = "-"
    if products is not None:
        checked = f"{products.checked} exact" if not products.wrong else f"{products.wrong:,} wrong"
        checked = "FAILED" if products.failed else checked
    tested = "-"
    if memory is not None:
        tested = size_text(memory.tested) if not memory.wrong else f"{memory.wrong:,} wrong words"
        tested = "FAILED" if memory.failed else tested
    celsius = "-" if temperature is None or temperature.celsius is None else f"{temperature.celsius:.0f}"
    shown = [
        _with_share(*rates.get(name, (None, None)), unit)
        for name, unit in (("bfloat16", 1e12), ("float32", 1e12), ("memory", 1e9))
    ]
    return device.name, answer, checked, shown[0], shown[1], tested, shown[2], celsius


def _with_share(value: float | None, peak: float | None, unit: float) -> str:
    """A rate in a unit, and its share of the catalogue's."""
    if value is None:
        return "-"
    share = "" if peak is None else f" ({value / peak:.0%})".replace("%", " %")
    return f"{value / unit:,.3g}{share}"


def _mark(ok: Any) -> str:
    return "-" if ok is None else "exact" if ok else "FAILED"
