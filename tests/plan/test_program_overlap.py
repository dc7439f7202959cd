"""What runs beside collectives, on texts of the compilers and on programs small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.compilation.collectives import collectives_of
from capibara.plan.program import ProgramFacts, overlap_by_kind, overlaps, read_program

HLO = Path(__file__).parent / "hlo"
DOT = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 64 * 64 * 64


def facts_of(lines: str, before: str = "") -> ProgramFacts:
    head = "HloModule test, is_scheduled=true, num_partitions=8"
    arrays = "  %a = f32[64,64] parameter(0)\n  %b = f32[64,64] parameter(1)\n  %s = f32[8,64] parameter(2)\n"
    return read_program(f"{head}\n\n{before}\nENTRY %main {{\n{arrays}{lines}\n}}\n")


START = (
    "  %g = (f32[8,64], f32[64,64]) all-gather-start(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, "
    "channel_id=1, use_global_device_ids=true\n"
)
DONE = "  %d = f32[64,64] all-gather-done(%g)\n"


@pytest.mark.parametrize(
    ("lines", "operations", "flops"),
    [
        (START + DONE + f"  %x = f32[64,64] {DOT}\n", 0, 0),
        (START + f"  %x = f32[64,64] {DOT}\n" + DONE, 1, FLOPS),
        (START + "  %x = f32[64,64] negate(%a)\n" + DONE, 1, 0),
        (
            f"  %w = f32[64,64] {DOT}\n"
            + START
            + f"  %x = f32[64,64] {DOT}\n  %y = f32[64,64] {DOT}\n"
            + DONE,
            2,
            2 * FLOPS,
        ),
    ],
    ids=["nothing between", "one product", "no product", "a product before, two between"],
)
def test_work_between_start_and_done(lines: str, operations: int, flops: int) -> None:
    facts = facts_of(lines + "  ROOT %r = f32[64,64] add(%d, %d)")
    (found,) = overlaps(facts)
    assert found.collective is facts.collectives[0]
    assert (found.operations, found.flops, found.hidden) == (operations, flops, flops > 0)
    sums = overlap_by_kind([found])["all-gather"]
    assert (sums.collectives, sums.asynchronous, sums.bytes) == (1, 1, 64 * 64 * 4)
    assert sums.hidden == (1.0 if flops else 0.0)


def test_a_synchronous_collective_hides_nothing() -> None:
    whole = (
        "  %d = f32[64,64] all-gather(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, channel_id=1, "
        "use_global_device_ids=true\n"
    )
    found = overlaps(facts_of(whole + f"  ROOT %x = f32[64,64] {DOT}"))
    assert [(each.operations, each.flops) for each in found] == [(0, 0)]
    sums = overlap_by_kind(found)["all-gather"]
    assert (sums.collectives, sums.asynchronous, sums.hidden) == (1, 0, 0.0)


def test_a_loop_beside_a_collective_counts_as_often_as_it_runs() -> None:
    body = f"""%body (p: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %p = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = f32[64,64] get-tuple-element(%p), index=1
  %b = f32[64,64] copy(%a)
  %x = f32[64,64] {DOT}
  %one = s32[] constant(1)
  %n = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[64,64]) tuple(%n, %x)
}}

%condition (p: (s32[], f32[64,64])) -> pred[] {{
  %p = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}}
"""
    loop = (
        "  %zero = s32[] constant(0)\n  %init = (s32[], f32[64,64]) tuple(%zero, %a)\n"
        "  %w = (s32[], f32[64,64]) while(%init), condition=%condition, body=%body\n"
    )
    (found,) = overlaps(facts_of(START + loop + DONE + "  ROOT %r = f32[64,64] add(%d, %d)", body))
    assert (found.operations, found.flops) == (10, 5 * FLOPS)  # a copy and a product in each turn


def test_gathers_of_a_scanned_layer_on_v4() -> None:
    """Two gathers, of which the first is waited for beside the second; counted here from the schedule."""
    facts = read_program((HLO / "v4_async_gather.txt").read_text())
    (loop,) = [event for event in facts.schedule if event[0] == "loop"]
    for index, found in enumerate(overlaps(facts)):
        between = loop[2][loop[2].index(("start", index)) : loop[2].index(("done", index))]
        pieces = [facts.pieces[at] for kind, at in between if kind == "piece"]
        assert (found.operations, found.flops) == (len(pieces), sum(piece.flops for piece in pieces))
        assert bool(found.collective.cycles_hidden) == (sum(piece.cycles or 0 for piece in pieces) > 0)
    sums = overlap_by_kind(overlaps(facts))
    assert list(sums) == ["all-gather"]
    assert sums["all-gather"].bytes == 2 * 3 * 1024 * 4096 * 2


def test_collectives_that_are_fused_with_products_on_v5e() -> None:
    found = overlaps(read_program((HLO / "v5e_async_fusions.txt").read_text()))
    assert [each.hidden for each in found] == [each.collective.asynchronous for each in found]
    sums = overlap_by_kind(found)["all-gather"]
    assert (sums.collectives, sums.asynchronous) == (7, 2)
    assert 0 < sums.hidden < 1


@pytest.mark.parametrize("path", sorted(HLO.glob("*.txt")), ids=lambda path: path.stem)
def test_explain_counts_what_the_whole_reading_finds(path: Path) -> None:
    """``OptimizedJit.explain()`` counts from the text alone, in all three forms of asynchronous collectives."""
    found = read_program(path.read_text()).collectives
    begun = sum(each.asynchronous for each in found)
    want = f"{begun} of {len(found)} collectives asynchronous" if found else "no collectives"
    assert collectives_of(path.read_text()) == want
