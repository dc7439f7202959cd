"""Published rows: what they say is what their own counting says; a fit finds constants that are there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._maxtext.fit import fit, leave_one_out, median_error
from benchmarks._maxtext.rows import COUNTED, load_rows, load_several

ROWS = load_rows()
IDS = [row.name for row in ROWS]


def test_there_are_rows_enough_and_each_says_where_it_was_read():
    assert len(ROWS) >= 10
    assert len(set(IDS)) == len(ROWS)
    for row in ROWS:
        for source in (row.results, row.settings, row.base):
            commit, path = source.split(" ", 1)
            assert re.fullmatch("[0-9a-f]{40}", commit)
            assert Path(path).suffix


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_models_have_the_size_they_are_named_for(row):
    named = float(re.findall(r"(\d+)B", row.name)[0]) * 1e9
    assert row.decoder.num_parameters == pytest.approx(named, rel=0.025)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_meshes_have_the_chips_of_their_slices(row):
    chips = math.prod(map(int, row.topology.partition(":")[2].split("x")))
    number = int(row.name.rpartition("-")[2])
    # v4 and v5p slices are named for their cores, two a chip; v5e slices for their chips.
    assert chips == row.num_devices == (number if row.generation == "v5e" else number // 2)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_parameters_are_counted_as_by_hand(row):
    m = row.model
    e, h, d = m["width"], m["heads"], m["head_dim"]
    layer = 2 * e * h * d + 2 * e * m["kv_heads"] * d + (3 if m["gated"] else 2) * e * m["hidden"]
    weights = m["layers"] * layer + (1 if m["tied"] else 2) * m["vocab"] * e
    # Norms and biases by distance are the rest.
    assert weights <= row.decoder.num_parameters <= weights * 1.0001


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_step_time_gives_back_the_rate_that_was_published(row):
    if row.tokens_per_second is not None:
        assert row.tokens / row.seconds == pytest.approx(row.tokens_per_second)
        return
    m = row.model
    rate = 6 * row.decoder.num_parameters * row.tokens
    share = {"weights": 0, "half scores": 1, "all scores": 2}[row.counted]
    # Scores and their use: 2 products of 2·S·D a query and head, forward once and backward twice.
    rate += share / 2 * 3 * 4 * m["batch"] * m["length"] ** 2 * m["heads"] * m["head_dim"] * m["layers"]
    assert rate / row.seconds / 1e12 == pytest.approx(row.tflops, rel=0.005)


@pytest.mark.parametrize("several", load_several(), ids=lambda several: several.name)
def test_rates_of_several_slices_give_back_what_was_published(several):
    counted = several.row.flops(several.row.counted)
    assert counted / several.seconds / 1e12 == pytest.approx(several.tflops, rel=0.006)
    assert several.slices in (2, 4, 8, 16, 32)
    # More slices are slower, but for one that says so itself.
    assert several.seconds > several.row.seconds or several.row.name == "52B v4-384"


def test_every_row_of_those_tables_has_its_runs_on_several_slices():
    assert {several.row.name for several in load_several()} == set(IDS) - {"Llama2-70B v5p-1024"}
    assert len(load_several()) == 32


def test_operations_grow_with_what_is_counted():
    for row in ROWS:
        counts = [row.flops(counted) for counted in COUNTED[:3]]
        assert counts == sorted(counts)
        assert counts[2] < 1.1 * counts[0]
    with pytest.raises(ValueError, match=r"counted='twice'.*weights"):
        ROWS[0].flops("twice")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('like = "v4"', 'like = "v9"', "has no defaults"),
        ("mfu = 56.7\n", "", "mfu"),
        ("mfu = 56.7\n", "mfu = 66.7\n", "156.0 TFLOP/s are not 66.7 %"),
        ('counted = "weights"', 'counted = "tokens"', "does not go with"),
        ('counted = "weights"', 'counted = "all"', "does not go with"),
        ("mfu = 56.7\n", "mfu = 56.7\nspeed = 3\n", "speed"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, old, new, words):
    source = Path(load_rows.__globals__["_FILE"]).read_text()
    assert old in source
    path = tmp_path / "rows.toml"
    path.write_text(source.replace(old, new))
    with pytest.raises(ValueError, match=words):
        load_rows(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('of = "22B v4-128"', 'of = "23B v4-128"', "'23B v4-128', which is not a row"),
        ("2 = [152.0, 55.2]", "2 = [152.0, 45.2]", "152.0 TFLOP/s are not 45.2 %"),
    ],
)
def test_several_slices_that_contradict_themselves_are_refused(tmp_path, old, new, words):
    source = Path(load_rows.__globals__["_FILE"]).read_text()
    assert old in source
    path = tmp_path / "rows.toml"
    path.write_text(source.replace(old, new))
    with pytest.raises(ValueError, match=words):
        load_several(path)


@given(
    constants=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50, deadline=None)
def test_a_fit_finds_constants_that_are_there(constants, seed):
    parts = np.random.default_rng(seed).uniform(0.1, 10, (8, len(constants)))
    seconds = parts @ constants
    np.testing.assert_allclose(fit(parts, seconds), constants, rtol=1e-5)
    np.testing.assert_allclose(leave_one_out(parts, seconds), seconds, rtol=1e-5)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_no_constant_is_below_zero_and_none_nearby_is_better(seed):
    rng = np.random.default_rng(seed)
    parts, seconds = rng.uniform(0, 1, (6, 3)), rng.uniform(0.5, 1, 6)

    def error(constants):
        return np.sum((parts @ constants / seconds - 1) ** 2)

    found = fit(parts, seconds)
    assert (found >= 0).all()
    for step in rng.normal(size=(50, 3)) * 1e-3:
        assert error(np.maximum(found + step, 0)) >= error(found) - 1e-12


def test_a_row_left_out_has_no_part_in_its_own_prediction():
    parts, seconds = np.ones((4, 1)), np.array([1.0, 1.0, 1.0, 9.0])
    found = leave_one_out(parts, seconds)
    assert found[3] == pytest.approx(1.0)
    assert found[0] > 1.0


def test_errors_are_relative_and_have_no_sign():
    assert median_error([1.1, 0.5, 2.0], [1.0, 1.0, 1.0]) == pytest.approx(0.5)


def test_fits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="n ≥ k"):
        fit([[1.0, 2.0]], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        fit([[1.0], [2.0]], [1.0, 0.0])
