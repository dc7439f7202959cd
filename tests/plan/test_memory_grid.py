"""The estimate against what the TPU compiler said, case by case."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.plan_memory import GRID, compare, load_cases, summary
from capibara.plan.compiler import find_compiler
from capibara.plan.errors import CompilerMissingError, DoesNotFitError
from capibara.plan.memory.arguments import step_arguments

CASES, VERSIONS = load_cases()


def test_the_grid_is_as_wide_as_it_has_to_be():
    fitted = [case for case in CASES if case.config.model.pattern == ("attention",)]
    assert len(fitted) >= 40
    sizes = [
        sum(b.bytes for b in step_arguments(c.config, c.layout) if b.kind == "parameters") for c in fitted
    ]
    assert min(sizes) > 0
    generations = {case.target.generation for case in CASES}
    assert {"v4", "v5p", "v5e", "v6e"} <= generations
    assert {case.layout.remat for case in CASES} == {"none", "dots", "full"}
    assert {case.layout.parameters for case in CASES} == {"sharded", "replicated"}
    assert sum(case.held_out for case in CASES) >= 10
    assert len({case.name for case in CASES}) == len(CASES)
    assert VERSIONS["libtpu"]


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_is_within_a_tenth_of_the_compiler(case):
    assert case.estimate.total == pytest.approx(case.total, rel=0.10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_are_exact(case):
    # Up to a few dozen of the smallest buffers, of 512 bytes.
    assert case.estimate.arguments == pytest.approx(case.arguments, abs=64 * 512)


def test_errors_lean_to_neither_side():
    ratios = [case.estimate.total / case.total for case in CASES]
    assert 0.99 < statistics.median(ratios) < 1.03


def test_the_benchmark_says_so(capsys):
    rows = compare()
    text, worst = summary(rows)
    assert len(rows) == len(CASES)
    assert worst <= 0.10
    assert f"all: {len(CASES)} programs" in text
    assert "held out" in text


def test_the_record_holds_nothing_else():
    data = json.loads(GRID.read_bytes())
    assert data.keys() == {"versions", "flags", "models", "cases"}
    assert {row["size"] for row in data["cases"]} == set(data["models"])


@pytest.fixture(scope="module")
def compiler():
    try:
        return find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 19, 40])
def test_the_compiler_still_says_so(compiler, number):
    case = CASES[number]
    found = case.measure()
    assert found.arguments == pytest.approx(case.arguments, rel=0.001)
    if compiler.version == VERSIONS["libtpu"]:
        assert found.total == pytest.approx(case.total, rel=0.05)
    assert case.estimate.total == pytest.approx(found.total, rel=0.12)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_a_reason(compiler):
    import dataclasses

    case = next(c for c in CASES if c.target.text == "v5e:2x4")
    config = case.config.replace(train=case.config.train.replace(batch_size=4096))
    too_large = dataclasses.replace(
        case, config=config, layout=dataclasses.replace(case.layout, microbatches=1)
    )
    assert too_large.estimate.fits(case.target) is False
    with pytest.raises(DoesNotFitError, match="RESOURCE_EXHAUSTED"):
        too_large.measure()
