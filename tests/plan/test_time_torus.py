"""Places of devices on the grid, rings of groups, routes of permutes."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.slices import parse_slice
from capibara.plan.time import Torus, places_on_grid


# What jax.make_mesh (mesh_utils.create_device_mesh) gives for described slices, read off once.
@pytest.mark.parametrize(
    ("slice", "mesh", "first"),
    [
        (
            "v4:2x2x4",
            (("a", 2), ("b", 8)),
            [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 0, 0), (1, 0, 1)],
        ),
        ("v4:2x2x4", (("a", 16),), [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1)]),
        ("v4:2x2x4", (("a", 4), ("b", 2), ("c", 2)), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1)]),
    ],
)
def test_places_are_those_of_make_mesh(slice: str, mesh: tuple[tuple[str, int], ...], first: list) -> None:
    places = places_on_grid(parse_slice(slice), mesh)
    if len(mesh) == 2:
        # An axis of 8 over 2 × 4 chips: which of the two axes of 2 it takes is as good either way.
        assert len(set(places)) == 16
        assert [p[2] for p in places[:6]] == [p[2] for p in first]
    elif len(mesh) == 1:
        assert list(places[: len(first)]) == first
    else:
        assert {p[2] for p in places[:4]} == {0}
        assert [p[2] for p in places[::4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("slice", "view"), [("v4:2x2x4", "chip"), ("v4:2x2x4", "core"), ("v5e:4x8", None), ("v7x:2x2x2", None)]
)
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_every_device_has_one_place(slice: str, view: str | None, split: int) -> None:
    target = parse_slice(slice, view)
    places = places_on_grid(target, (("a", split), ("b", target.num_devices // split)))
    assert len(set(places)) == target.num_devices
    assert all(0 <= x < size for place in places for x, size in zip(place, target.shape, strict=False))


def test_rings_of_a_cube() -> None:
    torus = Torus(parse_slice("v4:4x4x4"), (("data", 4), ("model", 16)))
    everyone = torus.rings((tuple(range(64)),))
    assert [(ring.size, ring.closed) for ring in everyone] == [(4, True)] * 3
    model = torus.rings(tuple(tuple(range(i, i + 16)) for i in range(0, 64, 16)))
    assert len(model) == 2
    data = torus.rings(tuple(tuple(range(i, 64, 16)) for i in range(16)))
    assert [ring.size for ring in data] == [4]
    assert {ring.axis for ring in data} | {ring.axis for ring in model} == {0, 1, 2}


def test_lines_where_a_slice_does_not_close() -> None:
    torus = Torus(parse_slice("v5e:4x4"), (("data", 4), ("model", 4)))
    (ring,) = torus.rings(((0, 1, 2, 3),))
    assert (ring.size, ring.closed, ring.hops) == (4, False, 3)


def test_members_apart_share_the_links_between() -> None:
    torus = Torus(parse_slice("v4:4x4x4"), (("a", 64),))
    (ring,) = torus.rings(((0, 2), (1, 3)))
    assert (ring.size, ring.spacing, ring.closed) == (2, 2, False)


def test_cores_of_a_chip_are_an_axis_of_their_own() -> None:
    target = parse_slice("v4:2x2x1", "core")
    (ring,) = Torus(target, (("a", 4), ("b", 2))).rings(((0, 1), (2, 3)))
    assert ring.axis == 3


def _distance(target, here: tuple[int, ...], there: tuple[int, ...]) -> int:
    """Breadth-first over the links, as an oracle."""
    seen, queue = {here: 0}, deque([here])
    while queue:
        at = queue.popleft()
        if at == there:
            return seen[at]
        for axis, size in enumerate(target.shape):
            for step in (1, -1):
                x = at[axis] + step
                if not 0 <= x < size:
                    if not target.wrap[axis]:
                        continue
                    x %= size
                near = (*at[:axis], x, *at[axis + 1 :])
                if near not in seen:
                    seen[near] = seen[at] + 1
                    queue.append(near)
    raise AssertionError


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["v4:4x4x4", "v4:2x2x4", "v5e:4x8"]), st.data())
def test_routes_are_shortest(name: str, data: st.DataObject) -> None:
    target = parse_slice(name)
    torus = Torus(target, (("a", target.num_devices),))
    pair = tuple(data.draw(st.lists(st.integers(0, target.num_devices - 1), min_size=2, max_size=2)))
    here, there = (tuple(map(int, torus.places[device])) for device in pair)
    route = torus.route((pair,))
    assert route.hops == _distance(target, here, there)
    assert route.load == (1 if route.hops else 0)


def test_a_shift_around_a_ring_uses_every_link_once() -> None:
    torus = Torus(parse_slice("v4:4x4x4"), (("a", 16), ("b", 4)))
    pairs = tuple((i, i // 4 * 4 + (i + 1) % 4) for i in range(64))
    route = torus.route(pairs)
    assert (route.load, route.hops, len(route.links)) == (1, 1, 1)


def test_a_shift_along_a_line_comes_back_the_other_way() -> None:
    torus = Torus(parse_slice("v5e:4x4"), (("a", 4), ("b", 4)))
    route = torus.route(tuple((i, i // 4 * 4 + (i + 1) % 4) for i in range(16)))
    assert (route.load, route.hops, len(route.links)) == (1, 3, 2)


def test_places_of_flat_pods_may_have_a_third_number() -> None:
    target = parse_slice("v5e:4x4")
    places = tuple((x, y, 0) for x in range(4) for y in range(4))
    assert Torus(target, (("a", 16),), places).places.shape == (16, 2)


@pytest.mark.parametrize(
    ("places", "mesh", "what"),
    [
        (None, (("a", 7),), "7 devices"),
        (((0, 0, 0),) * 16, (("a", 16),), "places must be"),
        (tuple((i, 0, 0) for i in range(16)), (("a", 16),), "places must be"),
        (((0, 0),) * 3, (("a", 16),), "places must be"),
        ((), (("a", 16),), "places must be"),
    ],
)
def test_what_does_not_fit_the_slice_is_refused(places, mesh, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Torus(parse_slice("v4:2x2x4"), mesh, places)


def test_devices_beyond_the_mesh_are_named() -> None:
    torus = Torus(parse_slice("v4:2x2x4"), (("a", 16),))
    with pytest.raises(PlanError, match="reach device 16"):
        torus.rings(((0, 16),))
    assert math.prod(torus.slice.shape) == 16
    assert np.asarray(torus.places).shape == (16, 3)
