"""Replica groups in every form that HLO writes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.program import mesh_axes_of
from capibara.plan.program.groups import groups_text, parse_groups, parse_pairs


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[8]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=8,'b'=1] {'a'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (
            "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a','c'}",
            ((0, 4, 1, 5, 2, 6, 3, 7),),
        ),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_each_form(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups
    head = f", channel_id=3, replica_groups={text}, dimensions={{1}}, use_global_device_ids=true"
    assert groups_text(head, head.find("replica_groups=") + len("replica_groups=")) == text


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_an_iota_is_numpys_transposition(dims: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(dims))))
    total = math.prod(dims)
    size = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    text = f"[{total // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    wanted = np.arange(total).reshape(dims).transpose(order).reshape(-1, size)
    assert parse_groups(text, total) == tuple(map(tuple, wanted.tolist()))


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_groups_along_mesh_axes_are_found_again(sizes: list[int], data: st.DataObject) -> None:
    mesh = tuple((f"axis{i}", size) for i, size in enumerate(sizes))
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    if not chosen:
        return
    text = "mesh[{}] {{{}}}".format(
        ",".join(f"'{name}'={size}" for name, size in mesh), ",".join(f"'axis{i}'" for i in sorted(chosen))
    )
    groups = parse_groups(text, math.prod(sizes))
    assert sorted(itertools.chain(*groups)) == list(range(math.prod(sizes)))
    assert mesh_axes_of(groups, mesh) == tuple(f"axis{i}" for i in sorted(chosen) if sizes[i] > 1)


def test_pairs() -> None:
    assert parse_pairs("{{0,1},{1,0}}") == ((0, 1), (1, 0))
    assert mesh_axes_of(((0, 4), (1, 5)), (("a", 2), ("b", 4))) == ("a",)


@pytest.mark.parametrize(
    "text",
    [
        "[3,4]<=[8]",
        "[2,4]<=[8]T(1)",
        "[2,4]<=[2,4]T(0,0)",
        "mesh['a'=2] {'z'}",
        "mesh[] {'a'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=2,'b'=2], device_ids=(1,2) {'b'}",
        "mesh['a'=2,'b'=2], device_ids=(what) {'b'}",
        "[99999999,99999999]",
        "{{0,x}}",
        "anything",
    ],
)
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="replica groups"):
        parse_groups(text, 8)


def test_a_device_beyond_the_mesh_is_named() -> None:
    with pytest.raises(PlanError, match="has 4 devices, but the program's collectives reach device 5"):
        mesh_axes_of(((0, 5),), (("a", 4),))


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(PlanError, match="must be pairs"):
        parse_pairs("{{0,1,2}}")
