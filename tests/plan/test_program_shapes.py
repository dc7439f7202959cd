"""Shapes, layouts, padding and memory spaces in HLO text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan.errors import PlanError
from capibara.plan.program.shapes import parse_shape


def test_a_tpu_layout_is_read_whole() -> None:
    (shape,) = parse_shape("bf16[4,64,3,100]{3,1,2,0:T(8,128)(2,1)S(3)}")
    assert shape.dims == (4, 64, 3, 100)
    assert shape.order == (3, 1, 2, 0)
    assert shape.tile == (8, 128)
    assert shape.space == 3
    assert not shape.in_hbm
    assert shape.size == 4 * 64 * 3 * 100 * 2
    # The fastest dimension (100) fills 128 lanes, the next one in memory is the second (64), a multiple of 8.
    assert shape.padded_size == 4 * 64 * 3 * 128 * 2


@pytest.mark.parametrize(
    ("text", "size", "padded"),
    [
        ("f32[]", 4, 4),
        ("f32[5]", 20, 20),
        ("f32[5]{0:T(128)}", 20, 512),
        ("s32[2,257]{1,0:T(2,128)}", 2 * 257 * 4, 2 * 384 * 4),
        ("pred[256,256]{0,1:T(8,128)(4,1)}", 65536, 65536),
        ("s4[16,256]{1,0:T(8,128)(8,1)E(4)}", 2048, 2048),
        ("f8e4m3fn[3,5]{1,0}", 15, 15),
        ("c64[7]{0}", 56, 56),
        ("f32[3,5]{0,1:T(8,128)}", 60, 8 * 128 * 4),
        ("bf16[0,5]{1,0}", 0, 0),
    ],
)
def test_bytes_with_and_without_padding(text: str, size: int, padded: int) -> None:
    (shape,) = parse_shape(text)
    assert (shape.size, shape.padded_size) == (size, padded)


def test_tuples_are_flattened_and_tokens_left_out() -> None:
    shapes = parse_shape("((f32[2]{0}, u32[]{:S(2)}), token[], /*index=5*/bf16[3,4]{1,0:T(8,128)(2,1)S(1)})")
    assert [(s.dtype, s.space) for s in shapes] == [("f32", 0), ("u32", 2), ("bf16", 1)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=4),
    st.sampled_from([(8, 128), (2, 128), (4, 128), (16, 128)]),
    st.randoms(use_true_random=False),
)
def test_padding_is_that_of_an_array_padded_to_whole_tiles(
    dims: list[int], tile: tuple[int, int], random
) -> None:
    order = list(range(len(dims)))
    random.shuffle(order)
    text = f"f32[{','.join(map(str, dims))}]{{{','.join(map(str, order))}:T({tile[0]},{tile[1]})}}"
    (shape,) = parse_shape(text)
    memory = np.asarray(dims)[order[::-1]]  # slowest first, as it lies in memory
    memory[-2:] = -(-memory[-2:] // tile) * tile
    assert shape.padded_size == int(memory.prod()) * 4


@pytest.mark.parametrize(
    "text", ["q99[3]", "f32[a,b]", "f32[-3]", f"f32[{10**19}]", f"f32[{10**18},{10**18}]", "f999[2]{0}"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="the program's text has"):
        for shape in parse_shape(text):
            assert shape.size


def test_a_layout_that_orders_other_dimensions_is_refused():
    for layout in ("{2,0:T(8,128)}", "{0,0}", "{7,1:T(8,128)(2,1)}"):
        with pytest.raises(PlanError, match="not an order of its dimensions"):
            parse_shape(f"bf16[8,128]{layout}")
