"""Unification of symbolic shapes, against NumPy's own broadcasting and against brute force."""

from __future__ import annotations

import itertools
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.compose.errors import ShapeError
from capibara.compose.logical.broadcasting import broadcast_rule
from capibara.compose.logical.shapes import Constraint, Dim, Rest, Shape, as_shape, set_size, settle, unify
from capibara.compose.logical.trail import transaction, what_if

sizes = st.lists(st.sampled_from([1, 2, 3]), max_size=4)


def fixed(shape: list[int]) -> Shape:
    return Shape(Dim(n) for n in shape)


def test_equal_names_are_equal_sizes() -> None:
    symbols: dict[str, Dim | Rest] = {}
    a, b = as_shape("batch embed", symbols), as_shape(("embed", 4), symbols)
    unify(b, fixed([7, 4]))
    assert a.known == (None, 7)


@given(sizes, sizes)
def test_unify_fixed_shapes_iff_equal(a: list[int], b: list[int]) -> None:
    if a == b:
        unify(fixed(a), fixed(b))
    else:
        with pytest.raises(ShapeError):
            unify(fixed(a), fixed(b))


@given(sizes, st.integers(0, 4), st.integers(0, 4))
def test_rest_takes_what_stands_opposite(shape: list[int], head: int, tail: int) -> None:
    rest = Rest("r")
    pattern = Shape([*(Dim() for _ in range(head)), rest, *(Dim() for _ in range(tail))])
    if head + tail > len(shape):
        with pytest.raises(ShapeError):
            unify(pattern, fixed(shape))
        return
    unify(pattern, fixed(shape))
    assert pattern.known == tuple(shape)
    assert rest.value is not None
    assert rest.value.known == tuple(shape[head : len(shape) - tail])


@given(sizes, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_two_open_shapes_agree_once_one_is_known(
    shape: list[int], h1: int, t1: int, h2: int, t2: int
) -> None:
    a = Shape([*(Dim() for _ in range(h1)), Rest(), *(Dim() for _ in range(t1))])
    b = Shape([*(Dim() for _ in range(h2)), Rest(), *(Dim() for _ in range(t2))])
    unify(a, b)
    settle()
    if len(shape) < max(h1 + t1, h2 + t2):
        with pytest.raises(ShapeError):
            unify(a, fixed(shape))
            settle()
        return
    unify(a, fixed(shape))
    settle()
    assert a.known == b.known == tuple(shape)


@given(sizes, sizes, st.booleans())
def test_broadcast_equals_numpy(left: list[int], right: list[int], later: bool) -> None:
    out = Shape([Rest()])
    a, b = (Shape([Rest()]), Shape([Rest()])) if later else (fixed(left), fixed(right))
    try:
        expected = np.broadcast_shapes(tuple(left), tuple(right))
    except ValueError:
        with pytest.raises(ShapeError):
            Constraint(broadcast_rule, (a, b, out)).post()
            settle()
            unify(a, fixed(left))
            unify(b, fixed(right))
            settle()
        return
    Constraint(broadcast_rule, (a, b, out)).post()
    settle()
    if later:
        unify(a, fixed(left))
        settle()
        unify(b, fixed(right))
        settle()
    assert out.known == expected


@given(sizes, sizes, st.randoms(use_true_random=False))
def test_broadcast_of_sizes_learned_one_by_one(left: list[int], right: list[int], random) -> None:
    dims = [Dim() for _ in left], [Dim() for _ in right]
    a, b, out = Shape(dims[0]), Shape(dims[1]), Shape([Rest()])
    learn = list(zip(dims[0] + dims[1], left + right, strict=True))
    random.shuffle(learn)
    try:
        expected = np.broadcast_shapes(tuple(left), tuple(right))
    except ValueError:
        expected = None

    def run() -> None:
        Constraint(broadcast_rule, (a, b, out)).post()
        settle()
        for dim, size in learn:
            set_size(dim, size)
            settle()

    if expected is None:
        with pytest.raises(ShapeError):
            run()
    else:
        run()
        assert out.known == expected


def test_failed_transaction_leaves_no_trace() -> None:
    a, b, c = Dim(name="a"), Dim(), Dim()
    with pytest.raises(ShapeError), transaction():
        unify(Shape([a, b]), Shape([c, Dim(3)]))
        set_size(a, 4)
        set_size(c, 5)
    assert (a.find().size, b.find().size, c.find().size) == (None, None, None)
    assert a.find() is not c.find()


def test_what_if_is_undone() -> None:
    a = Dim()
    with what_if():
        set_size(a, 4)
        assert a.find().size == 4
    assert a.find().size is None


def test_axis_names_travel() -> None:
    a = as_shape("b d", {}, ("batch", "embed"))
    b = Shape([Dim(), Dim(8)])
    unify(a, b)
    assert [d.axis for d in b.dims() or ()] == ["batch", "embed"]


@pytest.mark.parametrize("spec", [(-1,), ("*a", "*b"), (2.5,), ([],)])
def test_bad_shapes(spec) -> None:
    with pytest.raises(ShapeError):
        as_shape(spec, {})


def test_one_rest_on_both_sides_is_checked_once_it_is_known() -> None:
    rest = Rest("r")
    unify(Shape([Dim(2), rest]), Shape([rest, Dim(3)]))
    with pytest.raises(ShapeError, match="is not"):
        unify(Shape([rest]), Shape([]))
        settle()


def test_threads_build_models_of_their_own() -> None:
    """One thread's refused connections take back nothing of another's."""
    broken: list[BaseException] = []
    stop = threading.Event()

    def refuse() -> None:
        while not stop.is_set():
            a, b = Shape([Dim(2), Dim()]), Shape([Dim(), Dim(3)])
            try:
                with transaction():
                    unify(a, b)
                    unify(a, fixed([2, 4]))
            except ShapeError:
                pass
            if a.known != (2, None) or b.known != (None, 3):
                broken.append(AssertionError((a, b)))

    def build() -> None:
        try:
            for _ in range(300):
                shapes = [Shape([Dim(), Dim()]) for _ in range(20)]
                with transaction():
                    for one, other in itertools.pairwise(shapes):
                        unify(one, other)
                    unify(shapes[0], fixed([5, 6]))
                assert all(s.known == (5, 6) for s in shapes)
        except BaseException as error:
            broken.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    refusing = threading.Thread(target=refuse)
    try:
        builders = [threading.Thread(target=build) for _ in range(2)]
        for thread in (refusing, *builders):
            thread.start()
        for thread in builders:
            thread.join()
    finally:
        stop.set()
        refusing.join()
        sys.setswitchinterval(interval)
    assert not broken
