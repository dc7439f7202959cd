"""The estimate against what the TPU compiler said of programs drawn at random, and that they are those of the seed."""

from __future__ import annotations

import json
import statistics

import pytest
from tpu_compiler import needs_libtpu

from benchmarks.plan_memory import summary
from benchmarks.plan_memory_random import BLIND_SEED, RANDOM, SEED, compare, draw_step, load_programs
from capibara.plan.compiler import find_compiler

PROGRAMS, VERSIONS = load_programs()
ROWS = json.loads(RANDOM.read_bytes())["programs"]
ACCEPTED = [program for program in PROGRAMS if program.total is not None]


def name_of(program) -> str:
    return program.name.replace(" ", "-")


def test_they_are_the_seeds_programs():
    """Models, rows and slices are drawn again; layouts depend on the search as it was."""
    assert (SEED, BLIND_SEED) == (26, 27)
    numbers = [(row["seed"], row["number"]) for row in ROWS]
    assert numbers == sorted(set(numbers))
    assert {seed for seed, _ in numbers} == {SEED, BLIND_SEED}
    for row in ROWS:
        drawn = draw_step(row["number"], row["seed"])
        assert drawn == (row["settings"], row["slice"]), (row["seed"], row["number"])


def test_they_are_many_and_of_all_kinds():
    assert len(PROGRAMS) >= 100
    assert sum(program.held_out for program in ACCEPTED) >= 30
    assert sum(program.layout.stages > 1 for program in ACCEPTED) >= 8
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


@pytest.mark.thin(2)
@pytest.mark.parametrize("program", ACCEPTED, ids=name_of)
def test_arguments_are_exact(program):
    """Up to a few dozen of the smallest buffers, of 512 bytes."""
    assert program.estimate.arguments == pytest.approx(program.arguments, rel=0.002, abs=64 * 512)


@pytest.mark.thin(2)
@pytest.mark.parametrize("program", ACCEPTED, ids=name_of)
def test_the_estimate_is_within_a_tenth_of_the_compiler(program):
    assert program.estimate.total == pytest.approx(program.total, rel=0.10)


def test_errors_lean_to_neither_side():
    ratios = [row["ratio"] for row in compare()]
    assert 0.97 < statistics.median(ratios) < 1.03


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.total is None], ids=name_of)
def test_what_the_compiler_refuses_is_near_the_limit_or_above(program):
    assert program.estimate.total > 0.9 * program.target.usable_hbm_bytes


def test_the_benchmark_says_so():
    rows = compare()
    text, worst = summary(rows)
    assert len(rows) == len(ACCEPTED)
    assert worst <= 0.10
    assert f"all: {len(rows)} programs" in text
    assert "held out" in text


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 12, 60])
def test_the_compiler_still_says_so(number):
    program = next(p for p in ACCEPTED if (p.seed, p.number) == (SEED, number))
    found = program.measure()
    assert found.arguments == pytest.approx(program.arguments, rel=0.001)
    if find_compiler().version == VERSIONS["libtpu"]:
        assert found.total == pytest.approx(program.total, rel=0.05)
