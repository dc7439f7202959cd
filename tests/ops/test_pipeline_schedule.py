"""One forward, one backward: the gradients of the same layers one after another, in memory that stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pipeline_schedule
import pytest
from emulation import emulated
from other_process import run_apart

CODE = Path(pipeline_schedule.__file__).read_text()


def found(*problems: tuple[int, int, int]) -> Any:
    return run_apart(CODE, json.dumps(problems), XLA_FLAGS=emulated(4, quick=True))


def test_fewer_microbatches_than_stages_and_the_memory_of_many() -> None:
    seen = found((4, 3, 4))
    assert max(seen["gaps"].values()) < 1e-6
    few, many = seen["memory"]["bytes"]
    # 56 microbatches more, and not the input of one is kept more.
    assert abs(many - few) < seen["memory"]["input"]
    assert few > 7 * seen["memory"]["input"]
    assert seen["memory"]["permutes"] >= 2


@pytest.mark.slow
def test_numbers_of_stages_microbatches_and_positions() -> None:
    # Positions that the stages divide among them, and some that they do not.
    seen = found((2, 1, 4), (2, 5, 3), (4, 9, 8), (4, 7, 4), (4, 4, 6), (3, 5, 6))
    assert len(seen["gaps"]) == 12
    assert max(seen["gaps"].values()) < 1e-6
