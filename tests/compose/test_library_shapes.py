"""Shapes are those of NumPy for any arguments, whether sizes are known at once or one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capibara import compose as ml

p: Any = ml.primitives
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
AXES = st.one_of(
    st.none(), st.integers(-5, 4), st.lists(st.integers(-4, 3), min_size=1, max_size=3).map(tuple)
)
INDEX = st.lists(
    st.one_of(
        st.integers(-4, 3),
        st.none(),
        st.just(...),
        st.builds(
            slice,
            st.one_of(st.none(), st.integers(-5, 5)),
            st.one_of(st.none(), st.integers(-5, 5)),
            st.one_of(st.none(), st.integers(-3, -1), st.integers(1, 3)),
        ),
    ),
    max_size=4,
).map(tuple)


def check(make: Any, want: Any, **shapes: tuple[int, ...]) -> None:
    """The same shape or a refusal on both sides; known before, after, or bit by bit."""
    try:
        expected = want(**{k: np.zeros(v) for k, v in shapes.items()})
        expected = [np.shape(e) for e in expected] if isinstance(expected, list) else [np.shape(expected)]
    except (ValueError, IndexError, TypeError):
        expected = None
    for order in ("first", "last", "sizes"):
        try:
            block = make()
            model = ml.Model()
            names = {k: k for k in block.input_keys}
            if order == "first":
                for key, shape in shapes.items():
                    model.add_input(key, shape)
            model.add(block, "block", **names)
            if order == "sizes":
                for key, shape in shapes.items():
                    model.set_shapes(**{key: (None,) * len(shape)})
                    model.set_shapes(**{key: shape})
            elif order == "last":
                model.set_shapes(**shapes)
            found = [block.shape_of(k).known for k in block.output_keys]
        except ml.ComposeError:
            found = None
        assert found == expected, order


@settings(max_examples=60, deadline=None)
@given(SHAPES, AXES, st.booleans())
def test_reductions(shape: Any, axis: Any, keep: bool) -> None:
    assume(shape or axis is None)  # NumPy takes axis=0 of a scalar, for old times' sake
    check(lambda: p.Sum(axis, keep), lambda input: np.sum(input, axis=axis, keepdims=keep), input=shape)


@settings(max_examples=150, deadline=None)
@given(SHAPES, INDEX)
def test_indices(shape: Any, index: Any) -> None:
    check(lambda: p.Indexer(index), lambda input: input[index], input=shape)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.lists(st.integers(-4, 3), max_size=4).map(tuple), st.integers(-4, 3), st.integers(-4, 3))
def test_orders(shape: Any, axes: Any, first: int, second: int) -> None:
    check(lambda: p.Transpose(axes), lambda input: input.transpose(axes), input=shape)
    check(lambda: p.SwapAxes(first, second), lambda input: input.swapaxes(first, second), input=shape)
    if shape:
        check(lambda: p.Squeeze(first), lambda input: input.squeeze(first), input=shape)
    check(lambda: p.ExpandDims(first), lambda input: np.expand_dims(input, first), input=shape)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.lists(st.integers(-1, 6), max_size=3).map(tuple))
def test_reshapes(shape: Any, wanted: Any) -> None:
    check(lambda: p.Reshape(wanted), lambda input: input.reshape(wanted), input=shape)
    check(lambda: p.BroadcastTo(wanted), lambda input: np.broadcast_to(input, wanted), input=shape)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, st.one_of(st.none(), st.integers(-3, 3)))
def test_joins(left: Any, right: Any, axis: Any) -> None:
    check(
        lambda: p.Concat(2, axis),
        lambda input_0, input_1: np.concatenate([input_0, input_1], axis),
        input_0=left,
        input_1=right,
    )
    if axis is not None:
        check(
            lambda: p.Stack(2, axis),
            lambda input_0, input_1: np.stack([input_0, input_1], axis),
            input_0=left,
            input_1=right,
        )
        check(lambda: p.Split(2, axis), lambda input: np.split(input, 2, axis), input=left)


@settings(max_examples=80, deadline=None)
@given(SHAPES, SHAPES)
def test_products(left: Any, right: Any) -> None:
    if (
        min(len(left), len(right)) >= 2
    ):  # NumPy gives vectors a meaning of their own, this library refuses them
        check(p.MatrixMultiply, lambda left, right: left @ right, left=left, right=right)
    check(p.Maximum, lambda left, right: np.maximum(left, right), left=left, right=right)
    check(
        p.Where,
        lambda cond, input1, input2: np.where(cond, input1, input2),
        cond=left,
        input1=right,
        input2=left[1:],
    )
