"""Plants faults in a copy of the package, one at a time, and runs the tests that should find them.

    python tests/support/mutations.py --count 100 --seed 0 --against REVISION

Each fault is one operator, comparison or constant changed in one place, chosen at random over the lines of the package.
For each, the test files that mention the module's names most run first, then the others that mention it. A fault that
these tests do not find is tried once more with those tests of ``--against`` that ran in minutes then and do not now,
which says whether a change of the tests has lost anything. Not a test itself: it takes minutes for every ten faults.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
FIRST, SECONDS = 5, 300  # test files that run first; for the files of one step


@dataclass(frozen=True)
class Fault:
    """One node of one file, and what stands there instead."""

    file: str
    line: int
    start: int  # in bytes from the beginning of the file
    end: int
    before: str
    after: str


def _changed(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if any(
            isinstance(n, ast.Constant | ast.JoinedStr)
            and not isinstance(getattr(n, "value", ""), int | float)
            for n in (node.left, node.right)
        ):
            return None  # of texts
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    return None


def _skipped(tree: ast.AST) -> Iterator[ast.AST]:
    """What does not run: annotations, and what is said where an error is raised."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if isinstance(part := getattr(node, name, None), ast.AST):
                yield from ast.walk(part)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            yield from ast.walk(node)


def faults(file: Path) -> list[Fault]:
    """Every fault that can be planted in a file."""
    text = file.read_bytes()
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    skipped = {id(node) for node in _skipped(tree)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped or (changed := _changed(node)) is None:
            continue
        assert isinstance(node, ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        after = f"({ast.unparse(changed)})"
        found.append(Fault(str(file), node.lineno, start, end, text[start:end].decode(), after))
    return found


def _names(file: Path) -> set[str]:
    tree = ast.parse(file.read_bytes())
    found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return {n for n in found if not n.startswith("_") and len(n) > 3}


def tests_for(module: Path, root: Path, package: Path) -> list[Path]:
    """Test files that mention a module or its names, those that do it most often first."""
    names, dotted = _names(module), ".".join(module.relative_to(package.parent).with_suffix("").parts)
    room = module.relative_to(package).parts[0]
    pattern = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in sorted({dotted, *names})) or "$^")
    ranked = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        hits = len(set(pattern.findall(file.read_text(encoding="utf-8"))))
        alike = len(set(module.stem.split("_")) & set(file.stem.split("_")))
        here = file.relative_to(root / "tests").parts[0] == room
        if (
            score := 3 * alike * here
            + hits
            + here * (hits > 0)
            + (dotted in file.read_text(encoding="utf-8"))
        ):
            ranked.append((-score, file.stat().st_size, file))
    return [file for _, _, file in sorted(ranked)]


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'compat'}", "JAX_PLATFORMS": "cpu"}


def _quick(root: Path) -> set[str]:
    """The names of the tests that `make test` runs."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "tests",
        ],
        cwd=root,
        env=_environment(root),
        capture_output=True,
        text=True,
        check=False,
    )
    return {line for line in done.stdout.splitlines() if "::" in line}


def _run(files: list[Path] | list[str], root: Path, seconds: float) -> str:
    """ "found", "not found" or "too long"."""
    if not files:
        return "not found"
    environment = _environment(root)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *map(str, files)],
            cwd=root,
            env=environment,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "too long"
    return "not found" if done.returncode in (0, 5) else "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="faults of the count that were tried before")
    parser.add_argument("--against", help="a revision whose tests are tried with what these do not find")
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    given = parser.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory(prefix="capibara-mutations-") as folder:
        now, old = Path(folder) / "now", Path(folder) / "old"
        for root, revision in ((now, "HEAD"), (old, given.against)):
            if revision is None:
                continue
            root.mkdir()
            packed = subprocess.run(
                ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
            ).stdout
            subprocess.run(["tar", "x"], cwd=root, input=packed, check=True)
        if given.against:  # the old tests meet today's package
            for part in ("src", "compat"):
                shutil.rmtree(old / part)
                (old / part).symlink_to(now / part)
        for root in (now, old):
            if root.exists() and (ROOT / ".venv").exists():
                (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        for file in ROOT.glob("src/capibara/native/*.so*"):
            shutil.copy(file, now / "src/capibara/native" / file.name)
        lost: set[str] = _quick(old) - _quick(now) if given.against else set()
        print(f"{len(lost)} tests of {given.against} do not run in minutes now", flush=True)
        package = now / "src" / "capibara"
        everything = [f for file in sorted(package.rglob("*.py")) for f in faults(file)]
        counts = {"found": 0, "not found": 0, "too long": 0, "found by the old tests alone": 0}
        for number, fault in list(enumerate(random.sample(everything, given.count), 1))[given.skip :]:
            path, began = Path(fault.file), time.monotonic()
            whole = path.read_bytes()
            path.write_bytes(whole[: fault.start] + fault.after.encode() + whole[fault.end :])
            try:
                files = tests_for(path, now, package)
                said = _run(files[:FIRST], now, SECONDS)
                if said == "not found":
                    said = _run(files[FIRST : 3 * FIRST], now, SECONDS)
                if said == "not found" and given.against:
                    files = {str(f.relative_to(old)) for f in tests_for(path, old, package)[: 3 * FIRST]}
                    older = sorted(name for name in lost if name.partition("::")[0] in files)
                    if _run(older, old, SECONDS) == "found":
                        # Names may have changed since: they must pass without the fault.
                        path.write_bytes(whole)
                        if _run(older, old, SECONDS) == "not found":
                            said = "found by the old tests alone"
            finally:
                path.write_bytes(whole)
            counts[said] += 1
            row = {
                "fault": f"{path.relative_to(package)}:{fault.line}",
                "before": fault.before,
                "after": fault.after,
                "result": said,
                "seconds": round(time.monotonic() - began),
            }
            with given.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(
                f"{number}/{given.count} {said}: {row['fault']} {fault.before!r} -> {fault.after!r}",
                flush=True,
            )
    print(counts)


if __name__ == "__main__":
    main()
