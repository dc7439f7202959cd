"""How often loops run: read from conditions, states and constants as compilers write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.program import read_program

BODY = """  %p = (s32[], f32[8,8]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
"""


def program(
    *,
    start: str = "constant(0)",
    limit: str = "constant(5)",
    step: str = "%one = s32[] constant(1)\n  %j = s32[] add(%i, %one)",
    test: str = "%n = s32[] get-tuple-element(%p), index=2\n  ROOT %c = pred[] compare(%i, %n), direction=LT",
    inner: str = "",
    extra: str = "",
    attributes: str = "",
) -> str:
    """A loop with one product of 8 × 8 in its body; the limit travels in the state."""
    return f"""HloModule test, is_scheduled=true

{extra}
%body {{
{BODY}  %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
{inner}  {step}
  ROOT %t = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%j, %d, %n)
}}

%condition {{
  %p = (s32[], f32[8,8]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  {test}
}}

ENTRY %main {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %k = s32[] parameter(1)
  %s = s32[] {start}
  %l = s32[] {limit}
  %init = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%s, %a, %l)
  %w = (s32[], f32[8,8]{{1,0}}, s32[]) while(%init), condition=%condition, body=%body{attributes}
  ROOT %r = f32[8,8]{{1,0}} get-tuple-element(%w), index=1
}}
"""


ONE = 2 * 8 * 8 * 8


def trips(text: str) -> int:
    facts = read_program(text)
    assert facts.unknown == ()
    turns, rest = divmod(facts.flops, ONE)
    assert rest == 0
    return turns


def against(direction: str, limit: int) -> str:
    return f"%n = s32[] constant({limit})\n  ROOT %c = pred[] compare(%i, %n), direction={direction}"


@settings(deadline=None)
@given(st.integers(-50, 50), st.integers(1, 9), st.integers(-200, 5000), st.sampled_from(["LT", "LE"]))
def test_counting_up(start: int, step: int, limit: int, direction: str) -> None:
    text = program(
        start=f"constant({start})",
        step=f"%one = s32[] constant({step})\n  %j = s32[] add(%i, %one)",
        test=against(direction, limit),
    )
    assert trips(text) == len(range(start, limit + (direction == "LE"), step))


@settings(deadline=None)
@given(st.integers(-50, 5000), st.integers(1, 9), st.integers(-50, 50), st.sampled_from(["GT", "GE"]))
def test_counting_down(start: int, step: int, limit: int, direction: str) -> None:
    text = program(
        start=f"constant({start})",
        step=f"%one = s32[] constant({step})\n  %j = s32[] subtract(%i, %one)",
        test=against(direction, limit),
    )
    assert trips(text) == len(range(start, limit - (direction == "GE"), -step))


def test_until_equal() -> None:
    assert trips(program(test=against("NE", 7))) == 7


def test_the_limit_travels_in_the_state() -> None:
    assert trips(program()) == 5


def test_counters_inside_fusions_and_behind_copies() -> None:
    fused = (
        "%fused_add {\n  %p0 = s32[] parameter(0)\n  %c0 = s32[] constant(2)\n  ROOT %s0 = s32[] add(%p0, %c0)\n}\n\n"
        "%fused_lt {\n  %p1 = s32[] parameter(0)\n  %c1 = s32[] constant(9)\n"
        "  ROOT %s1 = pred[] compare(%p1, %c1), direction=LT\n}\n"
    )
    text = program(
        extra=fused,
        step="%q = s32[]{:S(6)} copy(%i)\n  %j = s32[] fusion(%q), kind=kLoop, calls=%fused_add",
        test="ROOT %c = pred[] fusion(%i), kind=kLoop, calls=%fused_lt",
    )
    assert trips(text) == 5  # 0, 2, 4, 6, 8


def test_what_the_compiler_states_is_believed() -> None:
    text = program(limit="copy(%k)", attributes=', backend_config={"known_trip_count":{"n":"12"}}')
    assert trips(text) == 12


def test_nested_loops_multiply_and_inherit_limits() -> None:
    """The inner loop's limit is an element of the outer loop's state."""
    inner = """  %zero = s32[] constant(0)
  %init2 = (s32[], f32[8,8]{1,0}, s32[]) tuple(%zero, %d, %n)
  %w2 = (s32[], f32[8,8]{1,0}, s32[]) while(%init2), condition=%condition2, body=%body2
"""
    extra = f"""%body2 {{
{BODY}  %d2 = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %one2 = s32[] constant(1)
  %j2 = s32[] add(%i, %one2)
  ROOT %t2 = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%j2, %d2, %n)
}}

%condition2 {{
  %p = (s32[], f32[8,8]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %c2 = pred[] compare(%i, %n), direction=LT
}}
"""
    assert trips(program(inner=inner, extra=extra, limit="constant(4)")) == 4 + 4 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"limit": "copy(%k)"},  # an argument of the program
        {"start": "copy(%k)"},
        {"step": "%one = s32[] constant(2)\n  %j = s32[] multiply(%i, %one)", "start": "constant(1)"},
        {"test": 'ROOT %c = pred[] custom-call(%i), custom_call_target="Sharding"'},
        {"test": against("GE", 0)},  # never ends
    ],
)
def test_what_the_text_does_not_tell_is_said(changes: dict[str, str]) -> None:
    facts = read_program(program(**changes))
    assert facts.flops == ONE
    assert any("the loop w" in words and "counted once" in words for words in facts.unknown)


def test_a_body_that_never_runs_counts_nothing() -> None:
    assert read_program(program(limit="constant(0)")).flops == 0


def test_conditionals_count_the_dearest_branch_and_say_so() -> None:
    text = """HloModule test, is_scheduled=true

%cheap {
  ROOT %p = f32[8,8]{1,0} parameter(0)
}

%dear {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main {
  %a = f32[8,8]{1,0} parameter(0)
  %b = pred[] parameter(1)
  ROOT %r = f32[8,8]{1,0} conditional(%b, %a, %a), true_computation=%cheap, false_computation=%dear
}
"""
    facts = read_program(text)
    assert facts.flops == ONE
    assert any("conditional r" in words for words in facts.unknown)


def test_loops_beyond_reason_are_refused() -> None:
    with pytest.raises(PlanError, match="beyond reason"):
        read_program(_nested_forever())


def _nested_forever() -> str:
    inner = (
        "  %w2 = (s32[], f32[8,8]{1,0}, s32[]) while(%p), condition=%condition, body=%body2, "
        'backend_config={"known_trip_count":{"n":"999999999"}}\n'
    )
    extra = f"""%body2 {{
{BODY}  ROOT %d2 = (s32[], f32[8,8]{{1,0}}, s32[]) tuple(%i, %x, %n)
}}
"""
    return program(
        inner=inner, extra=extra, attributes=', backend_config={"known_trip_count":{"n":"999999999"}}'
    )


def test_computations_that_call_themselves_are_refused() -> None:
    text = """HloModule test, is_scheduled=true

%again {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} call(%p), to_apply=%again
}

ENTRY %main {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[8,8]{1,0} call(%a), to_apply=%again
}
"""
    with pytest.raises(PlanError, match="64 deep"):
        read_program(text)


def test_programs_that_multiply_by_calling_are_refused() -> None:
    """Thirty computations that each call the next one twice: a thousand million calls."""
    parts = [
        f"%f{n} {{\n  %p = f32[8]{{0}} parameter(0)\n  %c = f32[8]{{0}} call(%p), to_apply=%f{n + 1}\n"
        f"  ROOT %d = f32[8]{{0}} call(%c), to_apply=%f{n + 1}\n}}\n"
        for n in range(30)
    ]
    text = (
        "HloModule test, is_scheduled=true\n\n%f30 {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n\n"
        + "\n".join(parts)
        + "\nENTRY %main {\n  %a = f32[8]{0} parameter(0)\n  ROOT %r = f32[8]{0} call(%a), to_apply=%f0\n}\n"
    )
    with pytest.raises(PlanError, match="more than"):
        read_program(text)


def test_a_state_that_refers_to_itself_in_a_long_chain_is_no_crash():
    """Each element of the state takes the place of the one before it: looking for the end takes all of the stack."""
    count = 400
    state = f"({', '.join(['s32[]'] * count)})"
    elements = "\n".join(f"  %g{i} = s32[] get-tuple-element(%p), index={i}" for i in range(count))
    shifted = ", ".join(f"%g{min(i + 1, count - 1)}" for i in range(count))
    text = f"""HloModule m, is_scheduled=true

%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
{elements}
  ROOT %t = {state} tuple({shifted})
}}

%cond (q: {state}) -> pred[] {{
  %q = {state} parameter(0)
  %x = s32[] get-tuple-element(%q), index=0
  %k = s32[] constant(5)
  ROOT %lt = pred[] compare(%x, %k), direction=LT
}}

ENTRY %main () -> s32[] {{
  %z = s32[] constant(0)
  %i = {state} tuple({", ".join(["%z"] * count)})
  %w = {state} while(%i), condition=%cond, body=%body
  ROOT %r = s32[] get-tuple-element(%w), index=0
}}
"""
    facts = read_program(text)
    assert "counted once" in facts.unknown[0]
