"""Slices: what a topology's text means, checked against the vendor's pages and the compiler's own devices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.errors import CapibaraError
from capibara.plan import PlanError, parse_slice
from capibara.plan.grids import MOST_CHIPS, at_least, is_part_of_host, is_rented, nearest
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
        ("v4-6", "no slice of v4 has 3 chips. The nearest: v4:2x2x1"),
        ("v4-192", r"no slice of v4 has 96 chips. The nearest: .*v4:4x4x8 \(128 chips, v4-256\)"),
        ("v4:5x5x5", "no slice of v4 has this grid .*multiples of 4"),
        ("v5e:4x6", r"no slice of v5e has this grid \(24 chips\). The nearest: v5e:4x4 .*v5e:4x8"),
        ("v5e:1x4", "no slice of v5e has this grid"),
        ("v5p:4x4x1", "no slice of v5p has this grid"),
        ("", "expected numbers separated by 'x'"),
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
    shape = tuple(grid) if len(grid) == dimensions or len(grid) == 1 else (*grid, 1)
    if len(shape) > 1 and not (is_rented(generation, shape) or is_part_of_host(generation, shape)):
        with pytest.raises(CapibaraError, match=f"no slice of {generation}"):
            parse_slice(text)
        return
    found = parse_slice(text)
    assert parse_slice(found.text) == found
    assert found.num_devices == found.num_chips * found.devices_per_chip
    assert found.link_bandwidth > 1e9
    assert found.usable_hbm_bytes > 2**30


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("chips", [1, 3, 4, 15, 96, 100, 129, 256])
def test_the_next_slice_and_the_nearest_can_be_named(generation, chips):
    for shape in filter(None, (at_least(generation, chips), *nearest(generation, chips))):
        assert is_rented(generation, shape)
        name = parse_slice(f"{generation}:{'x'.join(map(str, shape))}").slice_name
        assert parse_slice(name.replace("v5litepod", "v5e").replace("tpu7x", "v7x")).num_chips == math.prod(
            shape
        )
    assert at_least(generation, MOST_CHIPS[generation] + 1) is None
    assert math.prod(at_least(generation, 4) or ()) == 4


def test_parts_of_hosts_are_used_and_not_rented():
    for text in ("v4:1x1x1", "v4:1x1x2", "v5p:1x2x1", "v5e:1x2"):
        found = parse_slice(text)
        assert is_part_of_host(found.generation, found.shape)
        assert not is_rented(found.generation, found.shape)
    assert is_rented("v5e", (1, 1))
    assert is_rented("v4", (4, 4, 20))
    assert is_rented("v4", (4, 2, 2))


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("v5p-768", (4, 8, 12)),
        ("v5p-640", (4, 4, 20)),
        ("v5p-1152", (4, 12, 12)),
        ("v5p-1536", (8, 8, 12)),
        ("v5p-8960", (8, 20, 28)),
    ],
)
def test_names_of_slices_of_whole_cubes(name: str, grid: tuple[int, ...]):
    """Of several grids the one whose longest axis is shortest; and it has the name that was asked for."""
    found = parse_slice(name)
    assert found.shape == grid
    assert found.slice_name == name
    assert parse_slice(found.text) == found


def test_files_that_were_written_once_name_any_grid():
    with pytest.raises(PlanError, match="no slice of v5e has this grid"):
        parse_slice("v5e:2x8")
    assert parse_slice("v5e:2x8", rented=False).shape == (2, 8)
    with pytest.raises(PlanError, match="or give the grid"):
        parse_slice("v5p-700")


def test_a_plan_for_tpu7x_says_that_it_has_no_price():
    from capibara.plan import plan

    found = plan("demo", "v7x:2x2x1", compile=False)
    assert found.best.usd_per_step is None
    assert any("no price: the on-demand price of tpu-v7x is not known" in note for note in found.notes)
