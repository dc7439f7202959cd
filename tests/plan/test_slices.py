"""Slices: what a topology's text means, checked against the vendor's pages and the compiler's own devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.errors import CapibaraError
from capibara.plan import PlanError, parse_slice
from capibara.plan.slices import GENERATIONS


@pytest.mark.parametrize(
    ("text", "shape", "chips", "name"),
    [
        ("v4-32", (2, 2, 4), 16, "v4-32"),
        ("v4:2x2x4", (2, 2, 4), 16, "v4-32"),
        ("v4:2x2", (2, 2, 1), 4, "v4-8"),
        ("v5p-128", (4, 4, 4), 64, "v5p-128"),
        ("v5e-16", (4, 4), 16, "v5litepod-16"),
        ("v6e:2x4", (2, 4), 8, "v6e-8"),
        ("v4-384", (4, 4, 12), 192, "v4-384"),
    ],
)
def test_names_and_grids(text, shape, chips, name):
    found = parse_slice(text)
    assert found.shape == shape
    assert found.num_chips == chips
    assert found.slice_name == name
    assert parse_slice(found.text) == found


def test_v4_has_two_views():
    chip, core = parse_slice("v4-32"), parse_slice("v4-32", "core")
    assert (chip.num_devices, core.num_devices) == (16, 32)
    # What libtpu says a program may have on each.
    assert chip.usable_hbm_bytes == round(30.75 * 2**30)
    assert core.usable_hbm_bytes == round(15.25 * 2**30)
    assert core.chip.peak("bfloat16") * 2 == chip.chip.peak("bfloat16")
    assert chip.topology_options == {"chip_config_name": "megacore"}
    assert core.topology_options == {}


def test_tpu7x_shows_cores():
    found = parse_slice("v7x:2x2x1")
    assert found.view == "core"
    assert found.num_devices == 8
    with pytest.raises(PlanError, match="one device a core only"):
        parse_slice("v7x:2x2x1", "chip")


@pytest.mark.parametrize(("text", "ghz"), [("v4-8", 1.05), ("v5p-8", 1.75), ("v5e-4", 1.50), ("v6e-4", 1.75)])
def test_clocks(text, ghz):
    assert parse_slice(text).clock_hz / 1e9 == pytest.approx(ghz, rel=0.005)


def test_rings_close_in_whole_cubes_and_pods():
    assert parse_slice("v4:4x4x8").wrap == (True, True, True)
    assert parse_slice("v4:2x4x4").wrap == (False, False, False)
    assert parse_slice("v5e:16x16").wrap == (True, True)
    assert parse_slice("v5e:8x16").wrap == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", "names no TPU generation"),
        ("v4-6", "no usual grid"),
        ("v4:2x2x2x2", "expected 3"),
        ("v5e:2x2x2", "expected 2"),
        ("v5e:32x32", "a v5e pod has 256"),
        ("v3:2x2", "plans are made for v4"),
        ("h100", "expected numbers separated by 'x'"),
        ("v9:2x2", "unknown TPU generation"),
        ("v4-7", "multiple of 2"),
    ],
)
def test_bad_topologies_are_refused_by_name(text, message):
    with pytest.raises(CapibaraError, match=message) as error:
        parse_slice(text)
    assert isinstance(error.value, ValueError)


def test_bad_views():
    with pytest.raises(PlanError, match="Did you mean 'core'"):
        parse_slice("v4-8", "cores")
    with pytest.raises(PlanError, match="one device a chip only"):
        parse_slice("v5e-4", "core")


@given(st.sampled_from(GENERATIONS), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_grid_is_read_back_or_refused(generation, grid):
    text = f"{generation}:{'x'.join(map(str, grid))}"
    dimensions = 2 if generation in ("v5e", "v6e") else 3
    # One number is a count of chips, whose grid is known for the usual slices.
    if grid not in ([1], [2], [4]) and (len(grid) == 1 or len(grid) not in (dimensions, dimensions - 1)):
        with pytest.raises(CapibaraError, match=generation):
            parse_slice(text)
        return
    found = parse_slice(text)
    assert parse_slice(found.text) == found
    assert found.num_devices == found.num_chips * found.devices_per_chip
    assert found.link_bandwidth > 1e9
    assert found.usable_hbm_bytes > 2**30
