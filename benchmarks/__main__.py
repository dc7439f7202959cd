"""``python -m benchmarks [NAME…]``: run the benchmarks, print a table, write it to ``bench-results/``.

Each module runs in a process of its own: compiled programs, thread pools and memory of one do not disturb the
next. A module that fails is reported, the others still run, and the exit code is 1. These processes keep freed memory,
as ``capibara train`` does: what returns large arrays would otherwise be timed with the page faults of both sides.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capibara.errors import did_you_mean

FOLDER = Path(__file__).resolve().parent
COLUMNS = ("what", "shape", "peer", "ratio")
# What keep_freed_memory sets in a process that runs already, as glibc reads it when one starts.
KEPT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def find_benchmarks(folder: Path = FOLDER) -> dict[str, str]:
    """Name → first line of its docstring, of every module that defines ``run``; nothing is imported."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def long_benchmarks(folder: Path = FOLDER) -> dict[str, str]:
    """Name → how long, of the modules that say so (``LONG = "…"``): these run when named, or with ``--all``."""
    found = {}
    for name in find_benchmarks(folder):
        for node in ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LONG":
                found[name] = ast.literal_eval(node.value)
    return found


def check_rows(rows: Any) -> list[dict[str, Any]]:
    """The rows, if they are what a benchmark has to return.

    Raises:
      ValueError: no list of dicts with ``what``, ``peer`` and a finite, positive ``ratio``.
    """
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"run() returned {rows!r}, expected a list of at least one row")
    for row in rows:
        missing = [key for key in ("what", "peer", "ratio") if key not in row]
        if missing:
            raise ValueError(f"a row lacks {', '.join(missing)}: {row!r}")
        ratio = row["ratio"]
        if not isinstance(ratio, int | float) or not math.isfinite(ratio) or ratio <= 0:
            raise ValueError(f"ratio: got {ratio!r}, expected a finite number above 0, in {row!r}")
    return rows


def run_here(name: str, output: Path) -> None:
    """Run one benchmark in this process and leave its rows and the machine in ``output``."""
    from capibara.measure import machine_description
    from capibara.train.memory import keep_freed_memory

    keep_freed_memory()  # before JAX starts threads, whose heaps it does not reach
    os.environ.update(KEPT)  # for peers that run in processes of their own
    start = time.perf_counter()
    rows = check_rows(importlib.import_module(f"benchmarks.{name}").run())
    result = {"rows": rows, "seconds": time.perf_counter() - start, "machine": machine_description()}
    output.write_text(json.dumps(result), encoding="utf-8")


def run_apart(name: str, *, quiet: bool) -> dict[str, Any]:
    """Run one benchmark in a new process; its result, or ``{"error": …}``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", "--in-this-process", str(output), name]
        # What a benchmark prints while it runs must not mix with JSON on standard output.
        done = subprocess.run(command, cwd=FOLDER.parent, check=False, stdout=sys.stderr if quiet else None)
        if done.returncode:
            return {"error": f"exit code {done.returncode}"}
        return json.loads(output.read_text(encoding="utf-8"))


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is written and printed: rows with their benchmark's name, failures, the machine."""
    good = {name: result for name, result in results.items() if "error" not in result}
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": next((result["machine"] for result in good.values()), None),
        "rows": [{"benchmark": name, **row} for name, result in good.items() for row in result["rows"]],
        "seconds": {name: round(result["seconds"], 1) for name, result in good.items()},
        "failed": {name: result["error"] for name, result in results.items() if "error" in result},
    }


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    from capibara.measure import format_machine

    def cells(*values: str) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    lines = ["# Benchmarks", "", f"Taken {report['taken']} with `python -m benchmarks`.", ""]
    if report["machine"]:
        lines += [format_machine(report["machine"]), ""]
    lines += [cells("benchmark", *COLUMNS, "other figures"), cells(*["---"] * (len(COLUMNS) + 2))]
    for row in report["rows"]:
        lines.append(cells(row["benchmark"], *(_text(row.get(key, "")) for key in COLUMNS), _others(row)))
    lines += [f"\nFailed: `{name}` ({error})" for name, error in report["failed"].items()]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _others(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {_text(value)}" for key, value in row.items() if key not in (*COLUMNS, "benchmark")
    )


def write(report: dict[str, Any], folder: Path) -> None:
    """Write ``benchmarks.json`` and ``benchmarks.md``, each whole or not at all."""
    from capibara.files import replace_file

    folder.mkdir(parents=True, exist_ok=True)
    texts = {"benchmarks.json": json.dumps(report, indent=1) + "\n", "benchmarks.md": to_markdown(report)}
    for name, text in texts.items():
        replace_file(folder / name, text)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from capibara.measure import format_machine

    table = Table(box=box.SIMPLE, header_style="bold", title="Benchmarks", title_justify="left")
    for column in ("benchmark", *COLUMNS):
        table.add_column(column, justify="right" if column == "ratio" else "left", overflow="fold")
    for row in report["rows"]:
        table.add_row(row["benchmark"], *(_text(row.get(key, "")) for key in COLUMNS))
    console = Console(markup=False, highlight=False)
    console.print(table)
    for name, error in report["failed"].items():
        console.print(f"{name} failed: {error}", style="bold red")
    if report["machine"]:
        console.print(format_machine(report["machine"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0, or 1 if one failed, or 2 for a name that there is not."""
    known = find_benchmarks()
    listing = "\n".join(f"  {name:<16} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run measured comparisons, each in a process of its own.",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all but long ones)")
    parser.add_argument("--all", action="store_true", help="also those that take long")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on standard output")
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "bench-results", metavar="FOLDER")
    parser.add_argument("--in-this-process", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in known:
            parser.error(f"there is no benchmark {name!r}.{did_you_mean(name, known)} See --help")
    if args.in_this_process is not None:
        run_here(args.names[0], args.in_this_process)
        return 0
    long = {} if args.names or args.all else long_benchmarks()
    results = {}
    for name in args.names or [name for name in known if name not in long]:
        print(f"— {name}: {known[name]}", file=sys.stderr, flush=True)
        results[name] = run_apart(name, quiet=args.json)
    report = summary(results)
    write(report, args.output)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
        for name, why in long.items():
            print(f"not run: {name} ({why}); python -m benchmarks {name}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
