"""Topologies: grids, generations, slice names, and both ways of counting."""

from __future__ import annotations

import contextlib
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from capibara.errors import CapibaraError
from capibara.hardware import Topology, TopologyError, get_chip, parse_topology


@pytest.mark.parametrize(
    ("text", "shape", "generation", "chips", "cores", "slice_name"),
    [
        ("4x8", (4, 8), None, 32, None, None),
        ("2x2x4", (2, 2, 4), None, 16, None, None),
        ("1", (1,), None, 1, None, None),
        (" 4X8 ", (4, 8), None, 32, None, None),
        ("v4:2x2x4", (2, 2, 4), "v4", 16, 32, "v4-32"),
        ("v4:2x4x4", (2, 4, 4), "v4", 32, 64, "v4-64"),
        ("v4-32", (16,), "v4", 16, 32, "v4-32"),
        ("v2-8", (4,), "v2", 4, 8, "v2-8"),
        ("v3-8", (4,), "v3", 4, 8, "v3-8"),
        ("v5p-8", (4,), "v5p", 4, 8, "v5p-8"),
        ("v5e:4x8", (4, 8), "v5e", 32, 32, "v5litepod-32"),
        ("v5litepod-16", (16,), "v5e", 16, 16, "v5litepod-16"),
        ("v6e-8", (8,), "v6e", 8, 8, "v6e-8"),
        ("tpu7x-8", (4,), "v7x", 4, 8, "tpu7x-8"),
        ("tpu7x:2x2x1", (2, 2, 1), "v7x", 4, 8, "tpu7x-8"),
    ],
)
def test_parse(text, shape, generation, chips, cores, slice_name):
    topology = parse_topology(text)
    assert topology.shape == shape
    assert topology.generation == generation
    assert topology.num_chips == topology.size == chips
    assert topology.num_cores == cores
    assert topology.slice_name == slice_name


def test_the_documents_v4_32_and_googles_are_not_the_same():
    assert parse_topology("4x8").num_chips == 32
    assert parse_topology("v4-32").num_chips == 16


def test_str_says_both_counts():
    assert str(parse_topology("v4:2x2x4")) == "v4:2x2x4 (16 chips, 32 cores, v4-32)"
    assert str(parse_topology("4x8")) == "4x8 (32 chips)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected numbers separated by 'x'"),
        ("4x", "4x"),
        ("x8", "x8"),
        ("4*8", "4*8"),
        ("4x8x", "4x8x"),
        ("4x-8", "4x-8"),
        ("4.0x8", "4.0x8"),
        ("0x8", "at least 1"),
        ("v4:", "v4:"),
        ("v4-0", "at least 1"),
        ("v9:2x2", "unknown TPU generation 'v9'"),
        ("v5-8", "Known: "),
        ("v4-33", "multiple of 2"),
        ("100000x100000", "more than"),
        ("1x1x1x1x1x1x1x1x1", "9 axes"),
        ("4x" + "9" * 5000, "got"),
        (None, "None"),
        ((4, 8), "(4, 8)"),
    ],
)
def test_bad_topologies(text, expected):
    with pytest.raises(TopologyError) as caught:
        parse_topology(text)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, CapibaraError)
    assert isinstance(caught.value, ValueError)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from([None, "v2", "v4", "v5e", "v6e"])
)
def test_any_grid_parses_to_itself(shape, generation):
    text = "x".join(map(str, shape))
    topology = parse_topology(f"{generation}:{text}" if generation else text)
    assert topology.shape == tuple(shape)
    assert topology.size == math.prod(shape)
    if topology.slice_name is not None:
        # The name of a slice leads back to the same number of chips.
        assert parse_topology(topology.slice_name).num_chips == topology.num_chips


@given(st.text(max_size=12))
def test_any_text_is_a_topology_or_a_topology_error(text):
    with contextlib.suppress(TopologyError):
        assert isinstance(parse_topology(text), Topology)


@pytest.mark.parametrize("generation", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x"])
def test_cores_a_chip_agree_with_the_catalogue(generation):
    assert parse_topology(f"{generation}:2x2").cores_per_chip == get_chip(generation).cores_per_chip
