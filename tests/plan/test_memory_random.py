"""The estimate against what the TPU compiler said of programs drawn at random, and that they are those of the seed."""

from __future__ import annotations

import json
import statistics

import pytest
from tpu_compiler import needs_libtpu

from benchmarks.plan_memory_random import BASE, RANDOM, SEED, compare, draw_step, load_programs, summary
from capibara.config import ModularModelConfig
from capibara.plan import parse_slice
from capibara.plan.compiler import find_compiler
from capibara.plan.memory.arguments import step_arguments
from capibara.plan.work import TrainWork

PROGRAMS, VERSIONS = load_programs()
ROWS = json.loads(RANDOM.read_bytes())["programs"]
ACCEPTED = [program for program in PROGRAMS if program.total is not None]


def name_of(program) -> str:
    return program.name.replace(" ", "-")


def test_they_are_the_seeds_programs():
    """Models, rows and slices are drawn again; layouts depend on the search as it was."""
    assert SEED == 26
    numbers = [row["number"] for row in ROWS]
    assert numbers == sorted(set(numbers))
    for row in ROWS:
        assert draw_step(row["number"]) == (row["settings"], row["slice"]), row["number"]


def test_they_are_many_and_of_all_kinds():
    assert len(PROGRAMS) >= 60
    assert sum(program.held_out for program in ACCEPTED) >= 30
    assert {program.target.generation for program in ACCEPTED} == {"v4", "v5e", "v5p", "v6e"}
    assert {program.layout.remat for program in ACCEPTED} == {"none", "dots", "full"}
    assert {program.layout.parameters for program in ACCEPTED} == {"sharded", "replicated"}
    models = [program.config.model for program in ACCEPTED]
    assert sum(bool(m.experts.count) for m in models) >= 8
    assert sum("ssm" in m.pattern for m in models) >= 8
    assert sum(m.vocab_size > 100_000 for m in models) >= 20
    assert sum(program.config.train.sequence_length >= 16384 for program in ACCEPTED) >= 8
    assert {len([size for _, size in program.layout.mesh if size > 1]) for program in ACCEPTED} >= {1, 2, 3}
    one_row = [p for p in ACCEPTED if p.config.train.batch_size <= p.target.num_devices]
    assert len(one_row) >= 20


@pytest.mark.parametrize("program", ACCEPTED, ids=name_of)
def test_arguments_are_exact(program):
    """Up to a few dozen of the smallest buffers, of 512 bytes."""
    assert program.estimate.arguments == pytest.approx(program.arguments, rel=0.002, abs=64 * 512)
