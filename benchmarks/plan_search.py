"""Whether the planner finds the best layout: small train steps of which the compiler sees every layout.

The peer is exhaustive search: all layouts are scheduled by the compiler, and all those compiled whose schedule, with
every operation at its roofline, takes no more than a quarter longer than the best of them. A ratio of 1 means that the
plan's step takes as long as the best of these, both predicted from the compiled programs; ``looked at`` says how few
of the layouts the compiler saw for the plan. Needs the TPU compiler.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.plan.slices import Slice
    from capibara.plan.work import TrainWork
    from capibara.sharding import Layout

LONG = "several hundred schedules of some seconds, and 100 compilations of ten seconds each, unless cached"

__all__ = ["CASES", "run"]

# Cycles take between 1.1 and 1.3 times the roofline of a step as a whole.
_NEAR = 1.25
_SMALL = (
    "model.num_layers=4",
    "model.scan_layers=scan",
    "model.vocab_size=4096",
    "precision.compute_dtype=bfloat16",
)
# Name, slice, settings, GiB a device may use: from what is bound by arithmetic to what hardly fits.
CASES: tuple[tuple[str, str, tuple[str, ...], float | None], ...] = (
    ("wide", "v4:2x2x1", ("model.embed_dim=1024", "model.num_heads=8", "train.batch_size=8"), None),
    ("narrow", "v5e:2x2", ("model.embed_dim=256", "model.num_heads=4", "train.batch_size=4"), None),
    ("few rows", "v5p:2x2x1", ("model.embed_dim=2048", "model.num_heads=8", "train.batch_size=2"), None),
    ("little memory", "v5e:1x1", ("model.embed_dim=512", "model.num_heads=4", "train.batch_size=16"), 0.5),
    ("two chips", "v6e:1x2", ("model.embed_dim=1024", "model.num_heads=8", "train.batch_size=2"), None),
    (
        "large vocabulary",
        "v5e:2x2",
        ("model.embed_dim=1024", "model.num_heads=8", "model.vocab_size=131072", "train.batch_size=16"),
        None,
    ),
    (
        "long rows",
        "v5e:2x4",
        ("model.embed_dim=1024", "model.num_heads=8", "train.sequence_length=8192", "train.batch_size=8"),
        None,
    ),
    (
        "attention and ssm",
        "v4:2x2x1",
        ("model.embed_dim=1024", "model.num_heads=8", "model.pattern=[ssm,attention]", "train.batch_size=16"),
        None,
    ),
    ("three rows", "v4:2x2x1", ("model.embed_dim=2048", "model.num_heads=8", "train.batch_size=12"), None),
)


def run(names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows of ratios: the best step time of all layouts / that of the plan."""
    from capibara.config import ModularModelConfig
    from capibara.plan import parse_slice, plan
    from capibara.plan.work import TrainWork

    rows: list[dict[str, Any]] = []
    for name, topology, settings, limit in CASES:
        if names and name not in names:
            continue
        given = dict(setting.split("=") for setting in settings)
        more = (
            f"model.num_kv_heads={given['model.num_heads']}",
            f"model.max_sequence_length={given.get('train.sequence_length', 256)}",
            "optimizer.warmup_steps=10",
        )
        config = ModularModelConfig.from_toml("demo", [*_SMALL, *settings, *more])
        target = parse_slice(topology)
        work = TrainWork(config)
        found = plan(config, target, memory_limit_gb=limit)
        every = [layout for layout in work.layouts(target) if layout.offload == "none"]

        glances = _times(work, every, target, found.limit_bytes, schedule=True)
        near = [k for k, seconds in glances.items() if seconds <= _NEAR * min(glances.values())]
        times = _times(work, near, target, found.limit_bytes, schedule=False)
        times.setdefault(found.best.layout, found.step_seconds)
        best = min(times, key=lambda layout: times[layout])
        print(
            f"{name}: planned {found.best.layout}, {found.step_seconds:.4g} s; best {best}, {times[best]:.4g} s"
        )
        rows.append(
            {
                "what": f"step time of the plan: {name}",
                "shape": f"{topology}, {' '.join(settings)}",
                "peer": "every layout scheduled, the near ones compiled",
                "ratio": times[best] / found.step_seconds,
                "compiled": found.compiled,
                "looked at": found.compiled + found.scheduled,
                "layouts": len(every),
                "fitting": len(glances),
                "near": len(near),
            }
        )
    return rows


def _times(
    work: TrainWork, layouts: list[Layout], target: Slice, limit: int, *, schedule: bool
) -> dict[Layout, float]:
    """Predicted seconds of the layouts that fit: by their schedules at the roofline, or compiled with cycles."""
    from capibara.plan.compiler import compile_programs
    from capibara.plan.program import read_program
    from capibara.plan.time import predict_step

    found = {}
    jobs = [work.job(layout, target) for layout in layouts]
    for number, program in compile_programs(jobs, schedule=schedule):
        if program.memory is None or program.memory.total > limit:
            continue
        layout, facts = layouts[number], read_program(program.text)
        found[layout] = predict_step(
            facts, target, layout.mesh, places=program.coordinates, cycles=not schedule
        ).seconds
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    for row in run(tuple(parser.parse_args().names)):
        print(row)
