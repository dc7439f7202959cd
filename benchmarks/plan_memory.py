"""The planner's estimate of a train step's memory, against the real TPU compiler's figure.

The cases stand in ``tests/plan/memory_grid.json`` with what the compiler said: decoders from 110 million to 70 billion
parameters on v4, v5e, v5p and v6e slices, all meshes and ways of sharding, rematerialisation and microbatches, with
products cut into windows (the compiler's habit) and whole. The counts of :mod:`capibara.plan.memory.working_set` were
fitted to them, but for the rows marked *held out*, which were compiled afterwards and changed nothing.

By itself it compares the recorded figures, in seconds. ``--compile N`` has the compiler lay N cases out anew
(no TPU is needed; 10 to 60 seconds each; spread over the table); ``--record`` writes what it says into the file.
Run in the repository's root.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.files import replace_file
from capibara.plan import Slice, parse_slice
from capibara.plan.memory import MemoryEstimate, estimate_memory
from capibara.sharding import Layout

__all__ = ["GRID", "Case", "compare", "load_cases", "run", "summary"]

ROOT = Path(__file__).parents[1]
GRID = ROOT / "tests" / "plan" / "memory_grid.json"
BASE = ROOT / "src" / "capibara" / "config" / "configs_toml" / "production" / "tpu_v4.toml"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
      config, layout, target: the step.
      arguments, total: bytes a device, as the compiler had them when the row was recorded.
      held_out: whether the model's counts were fixed before this row was compiled.
    """

    name: str
    config: ModularModelConfig
    layout: Layout
    target: Slice
    arguments: int
    total: int
    held_out: bool

    @property
    def estimate(self) -> MemoryEstimate:
        """Of the planner."""
        return estimate_memory(self.config, self.layout, self.target)

    def measure(self) -> Any:
        """The compiler's figure, anew."""
        from capibara.plan.compiler import Job
        from capibara.plan.memory.measured import measure_memory

        return measure_memory(
            Job(
                builder="capibara.plan.workloads.training:lower_train_step",
                params={"config": self.config.to_dict(), "layout": self.layout.to_json()},
                slice=self.target,
                mesh=self.layout.mesh,
                compiler_options=self.layout.compiler_options,
            )
        )


def load_cases(path: Path = GRID) -> tuple[tuple[Case, ...], Mapping[str, str]]:
    """The recorded cases, and the versions that they were recorded with."""
    data = json.loads(path.read_bytes())
    base = ModularModelConfig.from_toml(BASE)
    cases = []
    for row in data["cases"]:
        model = base.model.replace(
            **_tuples(data["models"][row["size"]]), max_sequence_length=row["sequence"]
        )
        train = base.train.replace(batch_size=row["batch"], sequence_length=row["sequence"])
        cases.append(
            Case(
                name=row["name"],
                config=base.replace(model=model, train=train),
                layout=Layout.from_json({**row["layout"], "flags": data["flags"][row["flags"]]}),
                target=parse_slice(row["slice"], row.get("view")),
                arguments=row["arguments"],
                total=row["total"],
                held_out=row["held_out"],
            )
        )
    return tuple(cases), data["versions"]


def _tuples(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in model.items()}


def compare(anew: int = 0) -> list[dict[str, Any]]:
    """A row a case; ``anew`` of them, spread over the table, with the compiler's figure of today."""
    cases, _ = load_cases()
    chosen = set(range(0, len(cases), max(1, len(cases) // anew))[:anew]) if anew else set()
    rows = []
    for number, case in enumerate(cases):
        begin = time.perf_counter()
        estimate = case.estimate.total
        seconds = time.perf_counter() - begin
        total = case.measure().total if number in chosen else case.total
        rows.append(
            {
                "what": case.name,
                "shape": f"{case.target.num_devices} devices",
                "peer": "libtpu, compiled now" if number in chosen else "libtpu, recorded",
                "ratio": estimate / total,
                "estimate": estimate,
                "compiler": total,
                "recorded": case.total,
                "held_out": case.held_out,
                "seconds": seconds,
            }
        )
        print(
            f"{case.name:60s} {estimate / 2**30:9.2f} {total / 2**30:9.2f} {estimate / total:7.3f}"
            f"{' held out' * case.held_out}{' compiled' * (number in chosen)}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def run() -> list[dict[str, Any]]:
    """Rows whose ratio is the estimate over the recorded figure of the compiler."""
    return compare()


def summary(rows: Sequence[Mapping[str, Any]], seen: str = "fitted") -> tuple[str, float]:
    """Median and worst error of all rows, of those that were ``seen`` while the estimate was made, and of the others;
    and the worst of all."""
    lines = []
    for title, chosen in (
        ("all", list(rows)),
        (seen, [row for row in rows if not row["held_out"]]),
        ("held out", [row for row in rows if row["held_out"]]),
    ):
        errors = [abs(row["ratio"] - 1) for row in chosen]
        if errors:
            median, over = statistics.median(errors), sum(error > 0.10 for error in errors)
            lines.append(
                f"{title}: {len(errors)} programs, median error {median:.1%}, worst {max(errors):.1%}, "
                f"{over} above 10 %"
            )
    return "\n".join(lines), max(abs(row["ratio"] - 1) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if a row is off by more than 10 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile N of the cases anew")
    parser.add_argument("--record", action="store_true", help="write the compiler's figures into the file")
    options = parser.parse_args(arguments)
    rows = compare(options.compile)
    text, worst = summary(rows)
    print(text)
    if options.record:
        _record(rows)
    return int(worst > 0.10)


def _record(rows: Sequence[Mapping[str, Any]]) -> None:
    from capibara.plan.compiler import find_compiler

    data = json.loads(GRID.read_bytes())
    for kept, row in zip(data["cases"], rows, strict=True):
        kept["total"] = row["compiler"]
    data["versions"] = {"jax": importlib.metadata.version("jax"), "libtpu": find_compiler().version}
    # A line a case, so that a change of figures can be read.
    cases = ",\n".join(f"  {json.dumps(case)}" for case in data.pop("cases"))
    head = json.dumps(data, indent=1)
    replace_file(GRID, f'{head[: head.rindex("}")].rstrip()},\n "cases": [\n{cases}\n ]\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
