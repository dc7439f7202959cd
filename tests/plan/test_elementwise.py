"""Element-wise time: the compiler's cycles against a closed form, and the planner's reading against both."""

from __future__ import annotations

import json
import statistics

import pytest
from tpu_compiler import needs_libtpu

from benchmarks.plan_elementwise import PROGRAMS, RECORD, compare, count_cycles, least_bytes, measure, summary
from capibara.plan import parse_slice
from capibara.plan.compiler import find_compiler

DATA = json.loads(RECORD.read_bytes())
ROWS = {(row["what"], row["shape"]): row for row in compare()}
# Cycles over the closed form: the median of a chip's programs is less than the one, all but these less than the other.
MEDIAN, FAR = 4.5, 6.0
KNOWN_SLOW = {"LayerNorm", "RoPE", "logsumexp"}
CHIPS = list(dict.fromkeys(row["chip"] for row in DATA["programs"]))


def test_they_are_many():
    assert len(PROGRAMS) >= 10
    assert len(CHIPS) >= 2
    for chip in CHIPS:
        assert {name for name, shape in ROWS if shape == chip} == set(PROGRAMS)


def test_bytes_of_the_closed_form():
    """Of two programs, by hand."""
    assert least_bytes(PROGRAMS["AdamW"]) == 7 * 4096 * 14336 * 4
    assert least_bytes(PROGRAMS["SwiGLU"]) == 3 * 16384 * 14336 * 2


@pytest.mark.parametrize("key", ROWS, ids="-".join)
def test_nothing_is_faster_than_the_memory(key):
    """The compiler's cycles are never fewer than the bytes take, within the roundness of published bandwidths."""
    assert ROWS[key]["ratio"] > 0.95


@pytest.mark.parametrize("chip", CHIPS)
def test_cycles_are_near_the_closed_form(chip):
    ratios = {name: row["ratio"] for (name, shape), row in ROWS.items() if shape == chip}
    assert statistics.median(ratios.values()) < MEDIAN
    assert {name for name, ratio in ratios.items() if ratio > FAR} <= KNOWN_SLOW


@pytest.mark.parametrize("key", ROWS, ids="-".join)
def test_the_prediction_is_the_cycles(key):
    """What the planner predicts is the sum of the cycles, counted here by another reader; it may add the copies between
    memories that have none."""
    assert 0.98 < ROWS[key]["predicted"] < 1.2


@pytest.mark.parametrize("key", ROWS, ids="-".join)
def test_the_planner_reads_the_bytes(key):
    """At least those of arguments and results, but for what a program keeps on the chip."""
    assert ROWS[key]["read"] > 0.4


def test_cycles_in_a_loop_count_by_turns():
    text = (
        "HloModule m\n\n%body.1 (p: f32[8]) -> f32[8] {\n"
        '  %a = f32[8] add(), backend_config={"estimated_cycles":"10"}\n}\n\n'
        '%fused (p: f32[8]) -> f32[8] {\n  %x = f32[8] add(), backend_config={"estimated_cycles":"7"}\n}\n\n'
        'ENTRY %main (p: f32[8]) -> f32[8] {\n  %b = f32[8] add(), backend_config={"estimated_cycles":"5"}\n'
        "  %w = f32[8] while(%b), condition=%cond, body=%body.1\n}\n"
    )
    assert count_cycles(text, 4) == 45


def test_the_summary_says_so():
    text = summary(list(ROWS.values()))
    assert all(chip in text for chip in CHIPS)


@needs_libtpu
@pytest.mark.slow
def test_the_compiler_still_says_so():
    chip = CHIPS[0]
    names = ["residual", "RMSNorm", "AdamW", "loop over layers"]
    recorded = {row["name"]: row for row in DATA["programs"] if row["chip"] == chip}
    for found in measure(chip, names):
        if find_compiler().version == DATA["versions"]["libtpu"]:
            assert found["cycles"] == pytest.approx(recorded[found["name"]]["cycles"], rel=0.02)
        assert found["seconds"] >= found["cycles"] / parse_slice(chip).clock_hz * 0.98
