"""Programs whose fingerprints are tracked in ``tests/plan/fingerprints.json``: ``make fingerprints`` writes them anew.

Training steps are those of ``capibara train``: the shipped decoder, narrower and with 4 layers (a scan compiles one),
for the 32 cores of a v4-32 and for other chips. Each takes a minute or two to compile, without a TPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan import Fingerprint, check_fingerprints, parse_slice, record_fingerprints
from capibara.plan.compiler import CompiledProgram, Job, ProgramCache, compile_programs
from capibara.plan.slices import Slice
from capibara.plan.work import TrainWork
from capibara.sharding import WHOLE_PRODUCTS, Layout

__all__ = ["CONFIG", "FILE", "LAYOUTS", "PROGRAMS", "compiled"]

FILE = Path(__file__).parents[1] / "plan" / "fingerprints.json"

CONFIG = ModularModelConfig.from_toml(
    "production/tpu_v4",
    {
        "model.vocab_size": 8192,
        "model.embed_dim": 1024,
        "model.num_layers": 4,
        "model.num_heads": 8,
        "model.num_kv_heads": 8,
        "model.head_dim": 128,
        "model.mlp_dim": 2816,
        "model.max_sequence_length": 1024,
        "train.batch_size": 256,
        "train.sequence_length": 1024,
    },
)
V4_32 = parse_slice("v4-32", "core")
_FLAGS = tuple(WHOLE_PRODUCTS.items())


def _layout(*mesh: tuple[str, int], flags: tuple[tuple[str, str], ...] = _FLAGS, **more: Any) -> Layout:
    return Layout(mesh=mesh, flags=flags, **more)


LAYOUTS: dict[str, tuple[Slice, Layout]] = {
    "train on v4-32, fsdp 32": (V4_32, _layout(("data", 32))),
    "train on v4-32, fsdp 32, without options": (V4_32, _layout(("data", 32), flags=())),
    "train on v4-32, data 4, fsdp 8": (V4_32, _layout(("data", 4), ("fsdp", 8))),
    "train on v4-32, data 4, model 8": (V4_32, _layout(("data", 4), ("model", 8))),
    "train on v4-32, data 32, replicated, optimizer sharded": (
        V4_32,
        _layout(("data", 32), parameters="replicated", optimizer="sharded"),
    ),
    "train on v5e:4x4, fsdp 16": (parse_slice("v5e:4x4"), _layout(("data", 16))),
}


def _train(name: str) -> Job:
    target, layout = LAYOUTS[name]
    return TrainWork(CONFIG).job(layout, target)


PROGRAMS: dict[str, Job] = {
    **{name: _train(name) for name in LAYOUTS},
    "decode on v4:2x2x1, data 4": Job(
        builder="capibara.plan.workloads.decoding:lower_decode",
        params={"config": CONFIG.to_dict(), "dtype": "bfloat16", "rows": 32, "cache_length": 1024},
        slice=parse_slice("v4:2x2x1"),
        mesh=(("data", 4), ("model", 1)),
    ),
}


def compiled(names: Iterable[str], cache: ProgramCache | None = None) -> dict[str, CompiledProgram]:
    """Compile some of the programs, two at a time.

    Raises:
      AssertionError: one does not compile.
    """
    names = list(names)
    found: dict[str, CompiledProgram] = {}
    for number, program in compile_programs([PROGRAMS[name] for name in names], cache=cache, workers=2):
        assert program.status == "ok", f"{names[number]}: {program.message}"
        found[names[number]] = program
    return found


def main() -> int:
    """Compile all, say what changed, and write it down."""
    with tempfile.TemporaryDirectory() as folder:
        programs = compiled(PROGRAMS, ProgramCache(folder))
        found = {name: Fingerprint.of(programs[name]) for name in PROGRAMS}
    if FILE.exists():
        print(check_fingerprints(FILE, found))
    record_fingerprints(FILE, found)
    print(f"{len(found)} fingerprints in {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
