"""``capibara tune``: measure which parameters and implementations of the operations are fast on this device.

Results are saved to a file that later processes read (:mod:`capibara.ops.tuning_cache`). Exit code 0 if the measurement
completed, even if every heuristic was confirmed; 1 if an implementation disagrees with the oracle.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from capibara.ops.tuner import Case, Outcome

HELP = """Measure block sizes, chunk sizes and implementations of operations on this device, and save those that are
measurably faster than the default, for this version of Capibara and this type of device. key=value changes the
measured sizes, for instance: capibara tune flash_attention q_len=4096 batch=1 dtype=bfloat16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="OP|key=value",
        help="operations (default: all tunable ones); dtype=…, implementation=…, or a size of their specs",
    )
    parser.add_argument(
        "--specs",
        choices=("small", "large"),
        default="large",
        help="which shapes of the operations to measure",
    )
    parser.add_argument(
        "--max-seconds", type=float, default=600.0, metavar="S", help="total time limit (default: 600)"
    )
    parser.add_argument("--cache", metavar="DIR", help="folder of measurements (default: the user's cache)")
    parser.add_argument("--dry-run", action="store_true", help="measure without writing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Tune; return the exit code."""
    cases, implementation = _cases(args.what, args.specs)
    if not 0 < args.max_seconds < float("inf"):
        raise ConfigError(f"--max-seconds must be above 0 and finite, got {args.max_seconds}")
    path = _file(args.cache)
    if path is None and not args.dry_run:
        raise ConfigError(
            "there is no folder for measurements: CAPIBARA_TUNING=0 switches them off, or there is no home directory. "
            "Remedy: --cache DIR, or --dry-run."
        )
    outcomes: list[Outcome] = []
    end = time.perf_counter() + args.max_seconds
    with _progress(sum(1 for _ in cases), quiet=args.json) as step:
        for done, case in enumerate(cases):
            share = (end - time.perf_counter()) / (len(cases) - done)
            if share <= 0:
                break
            outcomes.append(_measure(case, share, implementation, step))
            if not args.dry_run:
                # At once: what was measured stays when the command is interrupted.
                _keep(args.cache, outcomes[-1], implementation)
    facts = _facts(outcomes, cases, None if args.dry_run else path)
    if args.json:
        print_json(facts)
    else:
        _show(facts)
    return 1 if any(outcome.wrong_results for outcome in outcomes) else 0


def _cases(what: list[str], tag: str) -> tuple[list[Case], str | None]:
    from capibara.ops import list_ops
    from capibara.ops.tuner import cases

    ops = {name: op for name, op in list_ops().items() if op.tuning is not None}
    names: list[str] = []
    changes: dict[str, str] = {}
    for word in what:
        name, equals, value = word.partition("=")
        if equals:
            if name in changes:
                raise ConfigError(f"{name} was given twice")
            changes[name] = value
        elif name not in ops:
            raise ConfigError(
                f"there is no operation {name!r} that can be tuned.{did_you_mean(name, ops)} There are: "
                f"{', '.join(sorted(ops))}"
            )
        elif name not in names:
            names.append(name)
    dtype, implementation = changes.pop("dtype", "float32"), changes.pop("implementation", None)
    if changes and not names:
        raise ConfigError(
            f"{', '.join(changes)}: sizes are those of an operation; name it, as in: tune OP size=N"
        )
    sizes = {name: _number(name, value) for name, value in changes.items()}
    found = [case for name in names or sorted(ops) for case in cases(ops[name], tag, dtype, sizes)]
    if not found:
        raise ConfigError(f"{', '.join(names) or 'the operations'}: no specs are tagged {tag}")
    if implementation is not None:
        for case in found:
            case.op.check_name(implementation)
    return found, implementation


def _number(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None
    if not 0 <= number < 1 << 31:
        raise ConfigError(f"{name} must be at least 0 and below 2**31, got {value}")
    return number


def _file(cache: str | None) -> Path | None:
    from capibara.ops.tuning import tuning_file

    return tuning_file(cache)[0]


def _measure(case: Case, seconds: float, implementation: str | None, step: Callable[..., None]) -> Outcome:
    from capibara.ops.tuner import tune_case

    step(case.name)
    outcome = tune_case(
        case,
        max_seconds=seconds,
        implementation=implementation,
        note=lambda text: step(f"{case.name}: {text}"),
    )
    step(case.name, done=True)
    return outcome


def _keep(cache: str | None, outcome: Outcome, implementation: str | None) -> None:
    from capibara.ops import tuning_cache
    from capibara.ops.tuning import tuning_file

    path, device = tuning_file(cache)
    if outcome.key is not None and path is not None and outcome.candidates > 1:
        before = tuning_cache.read(path, device).get(outcome.key)
        entry = outcome.entry if before is None else outcome.merged(before, implementation)
        tuning_cache.write(path, device, {outcome.key: entry})


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on standard error; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def step(text: str, *, done: bool = False) -> None:
            bar.update(task, description=escape(text), advance=1 if done else 0)

        yield step


def _facts(outcomes: list[Outcome], cases: list[Case], path: Path | None) -> dict[str, Any]:
    from capibara.measure.machine import machine_description
    from capibara.ops.tuning import local_device

    return {
        "device": vars(local_device()),
        "file": None if path is None else str(path),
        "machine": machine_description(),
        "not_reached": [case.name for case in cases[len(outcomes) :]],
        "cases": [
            {
                "op": outcome.case.op.name,
                "spec": outcome.case.spec.name,
                "dtype": outcome.case.dtype,
                "key": outcome.key,
                "default": outcome.default,
                "fastest": outcome.entry.fastest,
                "parameters": {name: dict(found) for name, found in outcome.entry.parameters.items()},
                "gains": dict(outcome.entry.gains),
                "gain": outcome.gain,
                "seconds": outcome.seconds,
                "candidates": outcome.candidates,
                "wrong": outcome.wrong_results,
                "failed": outcome.failed,
                "complete": outcome.complete,
            }
            for outcome in outcomes
        ],
    }


def _show(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, highlight=False)
    table = Table(box=box.SIMPLE, header_style="bold")
    for column in ("operation", "spec", "dtype", "built in", "faster here", "gain", "variants"):
        table.add_column(column, overflow="fold", no_wrap=column in ("operation", "dtype", "gain"))
    for case in facts["cases"]:
        chosen = [] if case["fastest"] is None else [case["fastest"]]
        for name, parameters in case["parameters"].items():
            values = ", ".join(f"{parameter}={value}" for parameter, value in parameters.items())
            chosen.append(f"{name}: {values} ({case['gains'][name]:.2f}×)")
        gain = f"{case['gain']:.2f}×" if case["fastest"] or case["default"] in case["parameters"] else ""
        variants = str(case["candidates"]) + ("" if case["complete"] else ", time ran out")
        cells = (
            case["op"],
            case["spec"],
            case["dtype"],
            case["default"],
            "\n".join(chosen) or "-",
            gain,
            variants,
        )
        table.add_row(*map(Text, cells))
    console.print(table)
    for case in facts["cases"]:
        for kind, found in (("WRONG", case["wrong"]), ("failed", case["failed"])):
            for variant, why in found.items():
                console.print(f"{kind}: {case['op']}, {case['spec']}, {variant}: {why}")
    for name in facts["not_reached"]:
        console.print(f"not reached in the time given: {name}")
    where = "written to " + facts["file"] if facts["file"] else "nothing was written"
    console.print(f"{facts['device']['kind']}: {where}")
