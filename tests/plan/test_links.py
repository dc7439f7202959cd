"""How long collectives take over the links of a mesh, against pieces that are sent one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.hardware import get_chip
from capibara.sharding import Links, links_of

LINK = 45e9


def rounds_of_a_ring(devices: int) -> int:
    """Rounds in which every device of a ring has every part: in each, it sends one part over each link that it has."""
    have = [{n} for n in range(devices)]
    ways = (1,) if devices == 2 else (1, -1)  # two neighbours share one link
    rounds = 0
    while any(len(parts) < devices for parts in have):
        sent = []
        for device in range(devices):
            for way in ways:
                to = (device + way) % devices
                # The part from farthest away on this side that the neighbour does not have.
                part = (device - way * rounds) % devices
                if part in have[device]:
                    sent.append((to, part))
        for to, part in sent:
            have[to].add(part)
        rounds += 1
    return rounds


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 8, 16])
def test_a_gather_takes_the_rounds_of_its_ring(devices: int) -> None:
    links = Links({"data": devices}, 2 * LINK, hop_seconds=0.0)
    size = 1e9
    found = links.gather(size, ("data",))
    rounds = rounds_of_a_ring(devices)
    # In the last round of a ring of even size both neighbours send the same part: half of it would do.
    halves = 0.5 if devices > 2 and devices % 2 == 0 else 0.0
    assert found == pytest.approx((rounds - halves) * size / devices / LINK)
    assert links.reduce(size, ("data",)) == pytest.approx(2 * found)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1, 1e12))
def test_two_axes_use_the_links_of_both(first: int, second: int, size: float) -> None:
    links = Links({"a": first, "b": second, "c": 1}, 2 * LINK, hop_seconds=0.0)
    sent = size * (first * second - 1) / (first * second)
    ways = sum(min(n - 1, 2) for n in (first, second))
    assert links.gather(size, ("a", "b", "c")) == pytest.approx(sent / (ways * LINK) if ways else 0.0)


def test_a_switch_has_no_more_links_for_two_axes() -> None:
    chip = get_chip("h100")
    links = links_of(chip, {"data": 2, "model": 4})
    assert links.switched
    assert chip.interconnect_bandwidth is not None
    for axes in (("data",), ("model",), ("data", "model")):
        assert links.over(axes).bandwidth == chip.interconnect_bandwidth / 2
    assert not links_of(get_chip("tpu-v4"), {"data": 2}).switched
