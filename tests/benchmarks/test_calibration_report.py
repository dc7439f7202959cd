"""The calibration's table, its fit and what it says of kernels, on predictions made up for the purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks._maxtext.kernels import state_kernels, visible_share
from benchmarks._maxtext.rows import load_rows, load_several
from benchmarks.plan_calibration import (
    CONSTANTS,
    GRADIENT_BYTES,
    MARKS,
    SEVERAL_MARKS,
    Prediction,
    calibrate,
    exchange_of,
    several_markdown,
    write_page,
)
from capibara.plan.program import Kernel, ProgramFacts

ROWS = load_rows()
TRUE = np.array([0.9, 1.6, 1.2])


def made_up() -> list[Prediction]:
    """Predictions that three constants make exact."""
    rng = np.random.default_rng(0)
    found = []
    for row in ROWS:
        parts = rng.uniform(0.2, 1.0, 3)
        parts *= row.seconds / (parts @ TRUE)
        found.append(
            Prediction(
                row=row,
                seconds=float(parts.sum()),
                low=1.0,
                high=2.0,
                parts=(float(parts[0]), float(parts[1]), float(parts[2])),
                hidden=0.0,
                hbm_bytes=20 << 30,
                usable_bytes=15 << 30 if row is ROWS[0] else 30 << 30,
            )
        )
    return found


def test_the_table_has_every_row_and_says_what_does_not_fit():
    result = calibrate(made_up())
    lines = result.to_markdown().splitlines()
    for row in ROWS:
        (line,) = [line for line in lines if line.startswith(f"| {row.name} |")]
        assert f"| {row.seconds:.2f} s |" in line
        assert ("does not fit" in line) == (row is ROWS[0])
    assert lines[-1].endswith("left out 0.0%.")
    assert (
        calibrate(made_up()[2:]).to_markdown().endswith(f"Not compiled yet: {ROWS[0].name}, {ROWS[1].name}.")
    )


def test_several_slices_are_one_and_an_exchange():
    predictions = made_up()
    lines = several_markdown(predictions).splitlines()
    for one in load_several():
        (line,) = [line for line in lines if line.startswith(f"| {one.name} |")]
        base = next(p for p in predictions if p.row == one.row)
        # Each chip sends twice (S - 1) / S of its share of the gradients.
        share = GRADIENT_BYTES * one.row.decoder.num_parameters / one.row.num_devices
        seconds = 2 * share * (one.slices - 1) / one.slices / exchange_of(one).bandwidth
        assert exchange_of(one).seconds == pytest.approx(seconds)
        cells = [cell.strip() for cell in line.split("|")]
        assert float(cells[4].removesuffix(" s")) == pytest.approx(base.seconds + seconds, abs=0.006)
        assert cells[2] == f"{one.seconds:.2f} s"
    # The tables of one slice do not change with it.
    assert calibrate(predictions).errors == calibrate(made_up()).errors
    assert "Not compiled yet: 2 × 22B v4-128" in several_markdown(predictions[1:])


def test_constants_that_are_there_are_found():
    result = calibrate(made_up())
    assert list(result.constants) == list(CONSTANTS)
    np.testing.assert_allclose(list(result.constants.values()), TRUE, rtol=1e-6)
    np.testing.assert_allclose(result.left_out_three, result.published, rtol=1e-6)
    assert result.errors["raw"] > 0.02


def test_one_constant_is_that_of_the_least_squares_of_relative_errors():
    result = calibrate(made_up())
    ratios = np.array([p.seconds for p in result.predictions]) / result.published
    assert result.scale == pytest.approx(ratios.sum() / (ratios**2).sum())
    np.testing.assert_allclose(result.fitted, result.scale * ratios * result.published)
    others = ratios[1:]
    first = result.predictions[0].seconds * others.sum() / (others**2).sum()
    assert result.left_out[0] == pytest.approx(first)


def test_a_wrong_prediction_shows_in_its_own_row_only_when_it_is_left_out():
    predictions = made_up()
    wrong = predictions[3]
    predictions[3] = replace(wrong, parts=(wrong.parts[0] * 3, *wrong.parts[1:]))
    result = calibrate(predictions)
    error = np.abs(np.array(result.left_out_three) / result.published - 1)
    assert error.argmax() == 3
    assert error[3] == pytest.approx(2 * TRUE[0] * wrong.parts[0] / wrong.row.seconds, rel=1e-6)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match=r"3 predictions.*at least 4"):
        calibrate(made_up()[:3])


def test_pages_get_the_table_between_their_marks(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", MARKS[0], "old", MARKS[1], "between", *SEVERAL_MARKS, "after\n"]))
    for _ in range(2):
        write_page(calibrate(made_up()), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "\nbetween\n" in text
    assert text.count("| 8 × 22B v4-128 |") == 1
    assert text.count("| 22B v4-128 |") == 1
    assert page.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        write_page(calibrate(made_up()), page)
    assert page.read_text() == "no marks"


def facts(*kernels: Kernel) -> ProgramFacts:
    return ProgramFacts("m", 1, 0, 0, 0, (), (), kernels, (), ())


def call(name: str, flops: int | None = None) -> Kernel:
    return Kernel("tpu_custom_call", 1, flops, 8, "", name)


def test_causal_blocks_are_counted_one_by_one():
    for length in (512, 1024, 2048, 4096, 2000):
        blocks = -(-length // 512)
        seen = sum(512 * j < 512 * (i + 1) for i in range(blocks) for j in range(blocks))
        assert visible_share(length) == seen / blocks**2


def test_kernels_are_given_the_products_they_do():
    model = next(row for row in ROWS if row.generation == "v5e").decoder
    names = ("capibara_attention_output.3", "capibara_attention_query.1", "capibara_attention_key_value.1")
    counted = [k.flops for k in state_kernels(facts(*map(call, names)), model).kernels]
    scores = 2 * model.batch * model.heads * model.length**2 * model.head_dim
    assert counted == [2 * scores, 3 * scores, 4 * scores]
    causal = state_kernels(facts(call(names[0])), replace(model, causal=True)).kernels[0].flops
    assert causal == pytest.approx(2 * scores * 10 / 16)


def test_what_kernels_state_themselves_stands_and_strangers_are_refused():
    model = ROWS[0].decoder
    assert state_kernels(facts(call("anything", 7)), model).kernels[0].flops == 7
    with pytest.raises(ValueError, match="'stranger' states no operations"):
        state_kernels(facts(call("stranger")), model)


def test_the_page_has_the_marks():
    page = Path(__file__).parents[2] / "docs" / "calibration.md"
    text = page.read_text()
    assert all(text.count(mark) == 1 for mark in (*MARKS, *SEVERAL_MARKS))
    for several in load_several():
        assert f"| {several.name} |" in text or several.name in text.rpartition("Not compiled yet: ")[2]
    for row in ROWS:
        assert f"| {row.name} |" in text or row.name in text.partition("Not compiled yet: ")[2]
