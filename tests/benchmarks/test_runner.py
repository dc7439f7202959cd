"""Which benchmarks a plain run takes, and what their rows have to be."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import FOLDER, check_rows, find_benchmarks, long_benchmarks


def test_long_ones_are_told_from_the_others(tmp_path):
    (tmp_path / "quick.py").write_text('"""Quick."""\ndef run(): ...\n')
    (tmp_path / "slow.py").write_text('"""Slow."""\nLONG = "an hour"\ndef run(): ...\n')
    (tmp_path / "part.py").write_text('"""No benchmark."""\nLONG = "never"\n')
    (tmp_path / "_shared.py").write_text("def run(): ...\n")
    assert find_benchmarks(tmp_path) == {"quick": "Quick.", "slow": "Slow."}
    assert long_benchmarks(tmp_path) == {"slow": "an hour"}


def test_those_here():
    known = find_benchmarks(FOLDER)
    assert set(long_benchmarks(FOLDER)) == {"plan_calibration", "plan_search"}
    assert {"attention", "compression", "plan_memory", "train_step"} <= set(known)
    assert all(known.values())


@pytest.mark.parametrize(
    "rows", [[], None, [{"what": "x", "peer": "y"}], [{"what": "x", "peer": "y", "ratio": 0}]]
)
def test_rows_that_are_none(rows):
    with pytest.raises(ValueError, match=r"expected a|lacks"):
        check_rows(rows)
