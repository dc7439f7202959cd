"""Whether the planner finds the best layout: five small train steps of which every layout is compiled.

The peer is exhaustive search. A ratio of 1 means that the plan's step takes as long as the best of all layouts, both
predicted from the compiled programs; ``compiled`` says how few of them the plan looked at. Needs the TPU compiler.
"""

from __future__ import annotations

import argparse
from typing import Any

LONG = "about 200 compilations of ten seconds each, unless cached"

__all__ = ["CASES", "run"]

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
)


def run(names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows of ratios: the best step time of all layouts / that of the plan."""
    from capibara.config import ModularModelConfig
    from capibara.plan import parse_slice, plan
    from capibara.plan.compiler import compile_programs
    from capibara.plan.program import read_program
    from capibara.plan.time import predict_step
    from capibara.plan.work import TrainWork

    rows: list[dict[str, Any]] = []
    for name, topology, settings, limit in CASES:
        if names and name not in names:
            continue
        heads = dict(s.split("=") for s in settings)["model.num_heads"]
        more = (f"model.num_kv_heads={heads}", "model.max_sequence_length=256", "optimizer.warmup_steps=10")
        config = ModularModelConfig.from_toml("demo", [*_SMALL, *settings, *more])
        target = parse_slice(topology)
        work = TrainWork(config)
        found = plan(config, target, memory_limit_gb=limit)
        every = [layout for layout in work.layouts(target) if layout.offload == "none"]
        times: dict[Any, float] = {}
        for number, program in compile_programs([work.job(layout, target) for layout in every]):
            if program.memory is None or program.memory.total > found.limit_bytes:
                continue
            facts = read_program(program.text)
            layout = every[number]
            times[layout] = predict_step(facts, target, layout.mesh, places=program.coordinates).seconds
        best = min(times, key=lambda layout: times[layout])
        print(
            f"{name}: planned {found.best.layout}, {found.step_seconds:.4g} s; best {best}, {times[best]:.4g} s"
        )
        rows.append(
            {
                "what": f"step time of the plan: {name}",
                "shape": f"{topology}, {' '.join(settings)}",
                "peer": "every layout compiled",
                "ratio": times[best] / found.step_seconds,
                "compiled": found.compiled,
                "layouts": len(every),
                "fitting": len(times),
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    for row in run(tuple(parser.parse_args().names)):
        print(row)
