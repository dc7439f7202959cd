"""Which slots of a group have a process, over random lives of failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.launch.slots import Slots


def slots(**options: Any) -> Slots:
    return Slots(**{"count": 4, "fewest": 1, "replacements": 1, "soon": 60.0, "retry": 100.0, **options})


def test_a_slot_that_fails_twice_soon_is_left_out_for_a_while() -> None:
    made = slots()
    assert made.chosen(0.0) == (0, 1, 2, 3)
    assert not made.failed(2, after=5.0, now=10.0)
    assert made.grows_at(10.0) is None
    assert made.failed(2, after=5.0, now=20.0)
    assert made.chosen(20.0) == (0, 1)  # of the three that are good, as many as divide what four share
    assert made.grows_at(20.0) == 120.0
    assert made.chosen(120.0) == (0, 1, 2, 3)
    # The next failure that comes soon is enough, and the wait is twice as long.
    assert made.failed(2, after=5.0, now=130.0)
    assert made.grows_at(130.0) == 330.0


def test_failures_that_come_late_or_elsewhere_do_not_add_up() -> None:
    made = slots()
    for now in range(100, 1000, 100):
        assert not made.failed(1, after=60.0, now=float(now))
    assert not made.failed(0, after=1.0, now=1000.0)
    assert made.failed(1, after=1.0, now=1001.0)


@pytest.mark.parametrize(
    ("count", "fewest", "out", "left"),
    [
        (6, 1, (5,), 3),
        (6, 4, (5,), 0),
        (6, 2, (1, 3, 5), 3),
        (6, 1, (1, 2, 3, 5), 2),
        (5, 1, (0,), 1),
        (4, 4, (1,), 0),
    ],
)
def test_the_rest_is_a_divisor(count: int, fewest: int, out: tuple[int, ...], left: int) -> None:
    made = slots(count=count, fewest=fewest, replacements=0)
    for slot in out:
        assert made.failed(slot, after=0.0, now=0.0)
    chosen = made.chosen(1.0)
    assert len(chosen) == left
    assert not set(chosen) & set(out)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.data())
def test_a_broken_group_does_not_go_on_for_ever(sizes: tuple[int, int], data: st.DataObject) -> None:
    """Between two times that all are taken back, at least one failure counts: it is not that of a trial."""
    made, now, counted = (
        slots(count=sizes[0], fewest=sizes[1], replacements=data.draw(st.integers(0, 2))),
        0.0,
        0,
    )
    for _ in range(30):
        chosen = made.chosen(now)
        slot = data.draw(st.sampled_from(chosen))
        counted += not made.on_trial(slot, after=1.0)
        now += 1.0
        made.failed(slot, after=1.0, now=now)
        if not made.chosen(now):
            assert counted > 0
            counted = 0
            made.all_again()
            assert made.chosen(now) == tuple(range(sizes[0]))
            assert made.grows_at(now) is None


@given(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 11), st.floats(0.0, 200.0)), max_size=40),
)
def test_any_life(sizes: tuple[int, int], replacements: int, life: list[tuple[int, float]]) -> None:
    count, fewest = sizes
    made = slots(count=count, fewest=fewest, replacements=replacements)
    now = 0.0
    for which, ran in life:
        chosen = made.chosen(now)
        assert len(set(chosen)) == len(chosen)
        assert not chosen or (len(chosen) >= fewest and count % len(chosen) == 0)
        grows = made.grows_at(now)
        if len(chosen) < count:
            assert grows is not None
            assert grows > now
            assert len(made.chosen(grows)) > len(chosen)
        else:
            assert grows is None
        if not chosen:
            return
        now += ran
        slot = chosen[which % len(chosen)]
        if made.failed(slot, after=ran, now=now):
            assert slot not in made.chosen(now)
        else:
            assert replacements
