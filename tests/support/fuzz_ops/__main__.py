"""``python -m fuzz_ops``: random problems for every operation, and what was wrong with them.

Each category runs in a process of its own, with eight emulated devices. Ends with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulation import emulated
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["CATEGORIES", "WAYS", "run"]

CATEGORIES = ("attention", "collective", "conv", "fft", "linalg", "loss", "rotary", "scan", "tropical", "vq")
WAYS = ("value", "jit", "vmap", "grad", "grad2", "explicit", "shard_map", "unchecked")


def start(what: dict[str, Any], errors: Any) -> subprocess.Popen[str]:
    """A process that runs some operations and prints a line for each family."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CAPIBARA_TUNING": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": emulated(8, quick=True),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fuzz_ops.worker", json.dumps(what)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def rows(what: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a process of its own says of each family."""
    with tempfile.TemporaryFile("w+") as errors:
        process = start(what, errors)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ROW"):
                    yield json.loads(line[3:])
            if process.wait() != 0:
                errors.seek(0)
                raise RuntimeError(
                    f"the process of {what} ended with {process.returncode}:\n{errors.read()[-4000:]}"
                )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def run(
    operations: dict[str, list[str]],
    *,
    problems: int,
    seed: int,
    seconds: float | None = None,
    numbers: list[int] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fuzz operations, given by category; what was counted and what was found."""
    counts: dict[str, dict[str, list[int]]] = {}
    findings: list[dict[str, Any]] = []
    refusals: dict[str, int] = {}
    for category, names in operations.items():
        task = None if progress is None else progress.add_task(category, total=problems * len(names))
        what = {
            "operations": names,
            "problems": problems,
            "seed": seed,
            "seconds": seconds,
            "numbers": numbers,
        }
        for row in rows(what):
            table = counts.setdefault(row["op"], {way: [0, 0, 0] for way in WAYS})
            for way in row["ways"]:
                cell = table[way["way"]]
                cell[0] += way["problems"]
                cell[1] += len(way["wrong"])
                cell[2] += way["refused"]
                if way["refused"]:
                    key = f"{row['op']}: {way['why']}"
                    refusals[key] = refusals.get(key, 0) + way["refused"]
                for wrong in way["wrong"][:1]:
                    finding = {
                        "again": f"python -m fuzz_ops --op {row['op']} --seed {seed} --family {row['family']}",
                        "op": row["op"],
                        "way": way["way"],
                        "call": row["label"],
                        "wrong": wrong,
                        "times": len(way["wrong"]),
                    }
                    findings.append(finding)
                    if progress is not None:
                        progress.console.print(
                            f"{finding['again']}\n  {row['label']}\n  {way['way']} × {finding['times']}: {wrong}",
                            markup=False,
                            highlight=False,
                            soft_wrap=True,
                        )
            if progress is not None and task is not None:
                done = sum(
                    min(problems, counts[name]["value"][0] or counts[name]["explicit"][0])
                    for name in names
                    if name in counts
                )
                progress.update(task, completed=done)
        if progress is not None and task is not None:
            progress.update(task, completed=problems * len(names))
    return {"counts": counts, "findings": findings, "refusals": refusals}


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="problems run; where some were wrong / wrong; refused in brackets")
    table.add_column("operation", no_wrap=True)
    for way in WAYS:
        table.add_column(way, justify="right", no_wrap=True)
    for name, ways in sorted(found["counts"].items()):
        cells = []
        for way in WAYS:
            count, wrong, refused = ways[way]
            text = "–" if not count else str(count)
            text += f" / {wrong}" if wrong else ""
            cells.append(text + (f" ({refused})" if refused else ""))
        table.add_row(name, *cells)
    console.print(table)
    for why, count in sorted(found["refusals"].items()):
        console.print(f"refused {count}: {why}", markup=False, highlight=False)
    total = sum(cell[0] for ways in found["counts"].values() for cell in ways.values())
    wrong = sum(cell[1] for ways in found["counts"].values() for cell in ways.values())
    console.print(f"{len(found['counts'])} operations, {total} problems, {wrong} wrong")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz_ops", description=__doc__)
    parser.add_argument(
        "--op", action="append", metavar="NAME", help="an operation or a category; may be repeated"
    )
    parser.add_argument("--problems", type=int, default=300, help="of each operation in each way (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="at most this long for an operation")
    parser.add_argument("--family", type=int, action="append", help="only the families of these numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and findings to a file")
    args = parser.parse_args()
    with tempfile.TemporaryFile("w+") as errors:
        process = start({"operations": []}, errors)
        listed, _ = process.communicate()
        if process.returncode != 0:
            errors.seek(0)
            print(errors.read(), file=sys.stderr)
            return 2
    every = json.loads(listed.rpartition("OPERATIONS")[2])
    wanted = args.op or list(CATEGORIES)
    unknown = [name for name in wanted if name not in every and name not in CATEGORIES]
    if unknown:
        parser.error(f"--op: got {', '.join(unknown)}, expected one of {', '.join((*CATEGORIES, *every))}")
    chosen = [name for name in every if name in wanted or name.partition(".")[0] in wanted]
    operations = {c: mine for c in CATEGORIES if (mine := [n for n in chosen if n.startswith(f"{c}.")])}
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.monotonic()
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        found = run(
            operations,
            problems=args.problems,
            seed=args.seed,
            seconds=args.seconds,
            numbers=args.family,
            progress=progress,
        )
    show(console, found)
    console.print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
