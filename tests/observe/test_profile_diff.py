"""Which argument made JAX compile a program again, and profiles beside a plan: against changes made on purpose."""

from __future__ import annotations

import dataclasses
import json
import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import run_apart

from capibara.jax_versions import call_being_compiled
from capibara.observe.bottlenecks import find_bottlenecks
from capibara.observe.profile import (
    Argument,
    Operation,
    Profile,
    ProfileError,
    ProgramRuns,
    TpuPerformanceProfiler,
    compare_with_plan,
    diff_profiles,
    read_planned_step,
)
from capibara.observe.profile import capture as capture_module
from capibara.observe.profile.arguments import (
    MOST_ARGUMENTS,
    _sharding_text,
    changes_between,
    pack_arguments,
    program_arguments,
    unpack_arguments,
)
from capibara.observe.profile.lines import edited_lines, same_lines

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "_measured", lambda dtype: (1e11, 1e10))


def profiled(work: Any) -> Profile:
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("work"):
        jax.block_until_ready(work())
    return profiler.profile()


def step_of(**options: Any) -> Any:
    def step(params, x, n=1):
        return x @ params["w"] * n

    return jax.jit(step, **options)


PARAMS = {"b": jnp.ones(3), "w": jnp.ones((8, 8))}  # b is not used: XLA's program does not have it
X = jnp.ones((4, 8))


class Kind:
    """A static value without a text of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and other.number == self.number

    def __mul__(self, other: Any) -> Any:
        return other * self.number

    __rmul__ = __mul__


# What is changed between two calls, and what must be said of it: argument, what, before, after.
CHANGES: dict[str, tuple[Any, Any, tuple[str, str, str, str]]] = {
    "shape": ((PARAMS, X), (PARAMS, jnp.ones((5, 8))), ("x", "shape", "(4, 8)", "(5, 8)")),
    "dtype within a tree": (
        (PARAMS, X),
        ({**PARAMS, "w": jnp.ones((8, 8), jnp.bfloat16)}, X),
        ("params['w']", "dtype", "float32", "bfloat16"),
    ),
    "an argument that is not used": (
        (PARAMS, X),
        ({**PARAMS, "b": jnp.ones(4)}, X),
        ("params['b']", "shape", "(3,)", "(4,)"),
    ),
    "structure": (
        (PARAMS, X),
        ({"w": PARAMS["w"]}, X),
        ("params['b']", "structure", "float32[3]", "absent"),
    ),
    "weak type": ((PARAMS, X, 2.0), (PARAMS, X, jnp.float32(2.0)), ("n", "weak type", "True", "False")),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_argument_that_changed(case: str):
    first, second, expected = CHANGES[case]
    step = step_of()
    found = profiled(lambda: (step(*first), step(*second)))
    (again,) = [one for one in found.recompilations() if one.program == "jit_step"]
    assert again.reason == "arguments"
    assert (again.times, again.known) == (1, 1)
    assert again.seconds > 0
    assert again.function.startswith(__file__)
    assert [dataclasses.astuple(change) for change in again.changes] == [expected]
    assert f"{expected[0]}: {expected[1]} {expected[2]} -> {expected[3]}" in str(again)


@pytest.mark.parametrize("options", [{"static_argnames": "n"}, {"static_argnums": 2}])
@pytest.mark.parametrize("named", [False, True])
def test_a_static_value_that_changed(options: dict[str, Any], named: bool):
    step = step_of(**options)
    found = profiled(lambda: [step(PARAMS, X, n=n) if named else step(PARAMS, X, n) for n in (2, 3, 5)])
    (again,) = [one for one in found.recompilations() if one.program == "jit_step"]
    assert again.times == 2  # one entry for what changes in the same way
    (change,) = again.changes
    assert (change.where, change.what, change.before, change.after) == ("n", "static value", "2", "3")


def test_static_values_with_one_text_are_told_apart():
    step = step_of(static_argnames="n")
    found = profiled(lambda: [step(PARAMS, X, n=Kind(n)) for n in (2, 3, 2)])
    (again,) = [one for one in found.recompilations() if one.program == "jit_step"]
    assert again.times == 1
    assert [change.what for change in again.changes] == ["static value"]
    assert "0x" not in str(again)


def test_a_function_that_is_jitted_anew_and_a_value_that_it_closes_over():
    def scaled(factor: float) -> Any:
        return jax.jit(lambda x: x * factor)

    found = profiled(lambda: [scaled(float(factor))(X) for factor in (2, 3)])
    (again,) = [one for one in found.recompilations() if one.function]
    assert [(one.where, one.what, one.before, one.after) for one in again.changes] == [
        ("factor", "closed-over value", "2.0", "3.0")
    ]
    same = profiled(lambda: [scaled(2.0)(X) for _ in range(3)])
    (again,) = [one for one in same.recompilations() if one.function]
    assert (again.reason, again.times, again.changes) == ("same arguments", 2, ())
    assert "jitted anew" in str(again)


def test_a_setting_that_changed():
    step = step_of()

    def work() -> Any:
        with jax.default_matmul_precision("float32"):
            exact = step(PARAMS, X)
        return exact, step(PARAMS, X)

    (again,) = [one for one in profiled(work).recompilations() if one.program == "jit_step"]
    assert [(one.where, one.what) for one in again.changes] == [("jax_default_matmul_precision", "setting")]


def test_functions_of_one_name_are_not_taken_for_one():
    add = jax.jit(lambda x: x + 1)
    square = jax.jit(lambda y: y @ y)
    found = profiled(lambda: (add(X), square(jnp.ones((3, 3)))))
    assert len([one for one in found.programs if "lambda" in one.name]) == 2
    assert [one for one in found.recompilations() if "lambda" in one.program] == []


def test_of_what_was_compiled_before_the_program_tells_it():
    step = step_of()
    step(PARAMS, X).block_until_ready()
    found = profiled(lambda: (step(PARAMS, X), step(PARAMS, jnp.ones((5, 8)))))
    sources = {one.arguments_from for one in found.programs if one.name == "jit_step"}
    assert sources == {"call", "program"}
    (again,) = [one for one in found.recompilations() if one.program == "jit_step"]
    assert [(one.where, one.before, one.after) for one in again.changes] == [("x", "(4, 8)", "(5, 8)")]


def test_programs_that_are_compiled_ahead():
    step = step_of()
    programs = [step.lower(PARAMS, jnp.ones((n, 8))) for n in (4, 5)]
    found = profiled(
        lambda: [one.compile()(PARAMS, jnp.ones((n, 8))) for one, n in zip(programs, (4, 5), strict=True)]
    )
    (again,) = [one for one in found.recompilations() if one.program == "jit_step"]
    assert [(one.where, one.what) for one in again.changes] == [("x", "shape")]


def test_outside_of_a_compilation_there_is_no_call():
    assert call_being_compiled() is None


def test_an_argument_whose_own_code_fails_does_not_harm_the_program():
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("mine")

        def __mul__(self, other: Any) -> Any:
            return other * 3

        __rmul__ = __mul__

    step = step_of(static_argnames="n")
    found = profiled(lambda: step(PARAMS, X, n=Odd()))
    (program,) = [one for one in found.programs if one.name == "jit_step"]
    assert program.arguments_from == "program"
    assert program.compile_seconds is not None


SHARDED = """
import json, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.observe.profile import TpuPerformanceProfiler
mesh = Mesh(jax.devices(), ("d",))
x = jnp.ones((8, 8))
sides = [jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("d"), P(None, "d"))]
step = jax.jit(lambda x: x * 2)
jax.block_until_ready(sides)
profiler = TpuPerformanceProfiler()
with profiler.profile_context("sharded"):
    jax.block_until_ready([step(one) for one in sides])
(again,) = profiler.profile().recompilations()
print("RESULT", json.dumps([[one.where, one.what, one.before, one.after] for one in again.changes]))
"""


def test_a_sharding_that_changed():
    ((where, what, before, after),) = run_apart(SHARDED, XLA_FLAGS=emulated(4))
    assert (where, what) == ("x", "sharding")  # not the shape, which is another one on each device
    assert "('d',)" in before
    assert "None, 'd'" in after
    assert before.endswith("over d=4")


def test_the_rule_names_the_argument():
    step = step_of(static_argnames="n")
    found = find_bottlenecks(profiled(lambda: [step(PARAMS, X, n=n) for n in range(6)]))
    (compiling,) = [one for one in found.bottlenecks if one.kind == "recompilation"]
    assert "n: static value 0 -> 1" in compiling.suggestion
    assert "not as a static argument" in compiling.suggestion
    assert compiling.evidence["changed"][0]["program"] == "jit_step"
    json.dumps(compiling.to_dict(), allow_nan=False)


# --- the text of a program


def test_arguments_of_a_program():
    text = step_of().lower(PARAMS, X).compile().as_text()
    assert program_arguments(text) == (
        Argument("params['w']", dtype="float32", shape=(8, 8)),
        Argument("x", dtype="float32", shape=(4, 8)),
    )
    odd = "ENTRY %main (p: (f32[2], bf16[3])) -> f32[2] {\n  %p = (f32[2]{0}, bf16[3]{0:T(128)}) parameter(0)\n}\n"
    assert program_arguments("HloModule m\n\n" + odd) == (
        Argument("argument 0[0]", dtype="float32", shape=(2,)),
        Argument("argument 0[1]", dtype="bfloat16", shape=(3,)),
    )
    assert program_arguments("") == ()


# --- in files

arguments = st.builds(
    Argument,
    name=st.sampled_from(["x", "y", "params['w']", "n"]),
    kind=st.sampled_from(["array", "static", "closure", "setting"]),
    dtype=st.sampled_from(["", "float32"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    weak=st.booleans(),
    sharding=st.sampled_from(["", "P('d')"]),
    value=st.sampled_from(["", "3"]),
)
programs = st.lists(st.tuples(st.sampled_from("fg"), st.lists(arguments, max_size=4).map(tuple)), max_size=6)


@given(programs)
@settings(max_examples=200, deadline=None)
def test_packed_arguments_come_back(given: list[tuple[str, tuple[Argument, ...]]]):
    packed = json.loads(json.dumps(pack_arguments(given)))
    assert unpack_arguments(packed) == [own for _, own in given]


@given(programs)
@settings(max_examples=100, deadline=None)
def test_arguments_that_are_equal_have_no_changes(given: list[tuple[str, tuple[Argument, ...]]]):
    for _, own in given:
        assert changes_between(own, own) == []
        assert changes_between(own, own, same_source=False) == []


def test_programs_of_thousands_of_parameters_stay_small():
    def compiled(number: int) -> ProgramRuns:
        many = tuple(
            Argument(f"params['layer{i}']['w']", dtype="float32", shape=(128, 512)) for i in range(5000)
        )
        x = Argument("x", dtype="float32", shape=(number, 8))
        return ProgramRuns("jit_step", 1, 0.1, 8, 8, None, "a.py:1", 0.1 * number, 0.05, "call", (*many, x))

    one = profile_of(programs=(compiled(0),))
    twenty = profile_of(programs=tuple(compiled(number) for number in range(20)))
    small, large = len(one.to_json()), len(twenty.to_json())
    assert small < 1_000_000
    assert large < 1.02 * small
    assert Profile.from_json(twenty.to_json()) == twenty
    (again,) = twenty.recompilations()
    assert (again.times, [change.where for change in again.changes]) == (19, ["x"])
    # In another dtype each of them changes; that is told once.
    other = replace(
        twenty.programs[0],
        arguments=tuple(replace(a, dtype="bfloat16") for a in twenty.programs[0].arguments),
    )
    (told,) = diff_profiles(one, profile_of(programs=(other,))).recompiled
    assert len(told.changes) + told.left_out == 5001
    assert len(told.changes) == 50
    assert "and 49 more: dtype float32 -> bfloat16; and 4,951 more changes" in str(told)


ONE = Operation("jit_f", "fusion.1", "compute", "fusion", "jit(f)/dot", "a.py:3", "float32", 4, 0.4, 8, 8)
X8 = Argument("x", dtype="float32", shape=(8,))
RUN = ProgramRuns("jit_f", 4, 0.4, 8, 8, None, "a.py:1", 0.25, 0.125, "call", (X8,))


def profile_of(*operations: Operation, programs: tuple[ProgramRuns, ...] = (), **changes: Any) -> Profile:
    figures: dict[str, Any] = {
        "name": "x",
        "platform": "cpu",
        "chip": "cpu",
        "devices": 2,
        "wall_seconds": 1.0,
        "flops": 0,
        "bytes": 0,
        "busy_seconds": 0.5,
        "communication_seconds": 0.0,
        "peak_memory_bytes": None,
        "peak_flops": None,
        "peak_bandwidth": None,
        "compiled": 0,
        "compile_seconds": 0.0,
        "events": 1,
        "perturbation": 0.0,
    }
    return Profile(**{**figures, **changes}, operations=operations, programs=programs)


def test_a_profile_of_an_earlier_version():
    data = json.loads(profile_of(ONE, programs=(RUN,)).to_json())
    del data["timeline"], data["lines"]
    for name in ("function", "compiled_at", "compile_seconds", "arguments_from", "arguments"):
        del data["programs"][0][name]
    found = Profile.from_json(json.dumps(data))
    assert found.timeline is None
    assert found.programs == (
        replace(RUN, function="", compiled_at=None, compile_seconds=None, arguments_from="", arguments=()),
    )
    assert found.recompilations() == ()
    # What it does not say is not guessed.
    assert diff_profiles(found, profile_of(programs=(RUN,))).recompiled[0].reason == "compiled earlier"


PACKED = {"name": "x", "dtype": "float32", "shape": [8]}


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": 3},
        {"arguments": [3]},
        {"arguments": [{"dtype": "float32"}]},
        {"arguments": [{**PACKED, "more": 1}]},
        {"arguments": [{**PACKED, "kind": "magic"}]},
        {"arguments": [{**PACKED, "shape": [-1]}]},
        {"arguments": [{**PACKED, "shape": [True]}]},
        {"arguments": [{**PACKED, "shape": 3}]},
        {"arguments": [{**PACKED, "weak": 1}]},
        {"arguments": [{**PACKED, "name": "red \x1b[31m"}]},
        {"arguments": {"like": 0, "changed": {}}},
        {"arguments": {"like": -1, "changed": {}}},
        {"arguments": {"like": True, "changed": {}}},
        {"arguments": {"like": 0}},
        {"arguments_from": "hearsay"},
        {"compile_seconds": -1},
        {"compile_seconds": "long"},
        {"compiled_at": float("nan")},
        {"function": "a\x1b"},
        {"function": 3},
    ],
)
def test_arguments_with_nonsense_are_refused(change: dict[str, Any]):
    data = json.loads(profile_of(ONE, programs=(RUN,)).to_json())
    data["programs"][0] |= change
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "changed", [{"1": PACKED}, {"-1": PACKED}, {"x": PACKED}, {"0": 3}, 3, {"9" * 5000: PACKED}]
)
def test_differences_of_arguments_with_nonsense_are_refused(changed: Any):
    data = json.loads(profile_of(ONE, programs=(RUN, RUN)).to_json())
    assert data["programs"][1]["arguments"] == {"like": 0, "changed": {}}
    data["programs"][1]["arguments"]["changed"] = changed
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.from_json(json.dumps(data))


def test_a_small_file_does_not_become_a_large_profile():
    few = [PACKED] * (MOST_ARGUMENTS // 100)
    with pytest.raises(ValueError, match="more than 1,000,000"):
        unpack_arguments([few, *({"like": 0, "changed": {}} for _ in range(100))])


# --- the difference of two profiles


def test_what_was_compiled_in_the_second_and_not_in_the_first():
    other = replace(X8, shape=(9,))
    before = profile_of(programs=(RUN,))
    after = profile_of(
        programs=(
            RUN,
            replace(RUN, arguments=(other,), compiled_at=0.5),
            replace(RUN, arguments=(X8,), compiled_at=0.6),
            replace(RUN, name="jit_g", compiled_at=0.7, compile_seconds=1.0),
        )
    )
    found = {(one.program, one.reason): one for one in diff_profiles(before, after).recompiled}
    assert set(found) == {("jit_f", "arguments"), ("jit_f", "same arguments"), ("jit_g", "new")}
    (change,) = found["jit_f", "arguments"].changes
    assert (change.where, change.what, change.before, change.after) == ("x", "shape", "(8,)", "(9,)")
    assert diff_profiles(before, before).recompiled == ()
    assert "x: shape (8,) -> (9,)" in str(diff_profiles(before, after))
    json.dumps(diff_profiles(before, after).to_dict(), allow_nan=False)


def test_the_difference_of_real_profiles_names_the_argument():
    first, second = step_of(static_argnames="n"), step_of(static_argnames="n")
    before = profiled(lambda: first(PARAMS, X, n=2))
    after = profiled(lambda: (second(PARAMS, X, n=2), second(PARAMS, X, n=4)))
    found = [one for one in diff_profiles(before, after).recompiled if one.program == "jit_step"]
    assert [(c.where, c.what, c.before, c.after) for one in found for c in one.changes] == [
        ("n", "static value", "2", "4")
    ]


def test_more_work_and_the_same_work_done_slower():
    rates: dict[str, Any] = {"peak_flops": 100.0, "peak_bandwidth": 1000.0}
    slow, more, copy, new = "a.py:1", "a.py:2", "a.py:3", "a.py:4"
    one = replace(ONE, flops=20, bytes=0, seconds=0.4)
    before = profile_of(
        *(replace(one, source=source) for source in (slow, more)),
        replace(one, source=copy, flops=0, bytes=100),
        **rates,
    )
    after = profile_of(
        replace(one, source=slow, seconds=0.8),
        replace(one, source=more, seconds=0.8, flops=40),
        replace(one, source=copy, seconds=0.2, flops=0, bytes=50),
        replace(one, source=new),
        **rates,
    )
    found = {change.place: change for change in diff_profiles(before, after).changes}
    assert {place: change.cause for place, change in found.items()} == {
        slow: "same work, slower",
        more: "more work",
        copy: "less work",
        new: "new",
    }
    # FLOPs over the peak, on one of two devices; bytes over the bandwidth.
    assert (found[more].floor_before, found[more].floor_after) == (0.1, 0.2)
    assert (found[copy].floor_before, found[copy].floor_after) == pytest.approx((0.05, 0.025))
    assert "more work" in str(diff_profiles(before, after))
    unknown = diff_profiles(profile_of(one), profile_of(replace(one, seconds=0.8))).changes[0]
    assert (unknown.floor_before, unknown.cause) == (None, "")


def test_a_line_that_moved_is_the_same_line():
    """Another number, since a comment was put above it, and another folder."""
    old = {"/one/m.py:4": "x = layer(x)", "/one/m.py:5": "x = layer(x)", "/one/m.py:9": "return x.sum()"}
    new = {"/two/m.py:5": "x = layer(x)", "/two/m.py:6": "x = layer(x)", "/two/m.py:10": "return x.mean()"}
    before = profile_of(*(replace(ONE, source=source) for source in old), lines=old, platform="tpu")
    after = profile_of(
        *(replace(ONE, source=source, seconds=0.9) for source in new), lines=new, platform="tpu"
    )
    found = {change.place: (change.before, change.after) for change in diff_profiles(before, after).changes}
    spent, later = ONE.seconds / 2, 0.45
    assert found == {f"/two/m.py:{number}": (spent, later) for number in (5, 6, 10)}
    edited = {change.place: change.was for change in diff_profiles(before, after).changes if change.was}
    assert edited == {"/two/m.py:10": "/one/m.py:9"}
    assert "/two/m.py:10 (edited)" in str(diff_profiles(before, after))
    # A profile of an earlier version has no texts: then only the same place is the same.
    assert len(diff_profiles(replace(before, lines={}), after).changes) == 6


def test_lines_that_were_edited_are_found_between_their_neighbours():
    old = {
        "m.py:1": "x = norm(x)",
        "m.py:2": "y = jnp.sin(x) @ w",
        "m.py:3": "y = y + bias",
        "m.py:4": "return y.sum()",
    }
    new = {
        "m.py:1": "x = norm(x)",
        "m.py:2": "y = jnp.sin(jnp.cos(x)) @ w",
        "m.py:3": "q = attention(k, v)",
        "m.py:7": "return y.sum()",
    }
    found = edited_lines(same_lines(old), same_lines(new))
    assert {line.text: after.text for line, after in found.items()} == {
        "y = jnp.sin(x) @ w": "y = jnp.sin(jnp.cos(x)) @ w"
    }
    # Another file's lines are not these.
    elsewhere = {place.replace("m.py", "n.py"): text for place, text in new.items()}
    assert not edited_lines(same_lines(old), same_lines(elsewhere))


@given(
    st.lists(st.sampled_from(["a = b", "a = b + c", "return a", "x = f(x)", "for i in x:"]), max_size=8),
    st.lists(st.sampled_from(["a = b", "a = b * c", "return b", "x = f(x)", "while x:"]), max_size=8),
)
def test_each_line_becomes_at_most_one_other(first: list[str], second: list[str]):
    old = same_lines({f"m.py:{number}": text for number, text in enumerate(first, 1)})
    new = same_lines({f"m.py:{number}": text for number, text in enumerate(second, 1)})
    found = edited_lines(old, new)
    assert set(found) <= set(old.values()) - set(new.values())
    assert set(found.values()) <= set(new.values()) - set(old.values())
    assert len(set(found.values())) == len(found)


def test_an_operation_of_several_lines_is_divided_between_them(tmp_path: Path):
    """XLA makes one loop of a cosine and sums; a second cosine is that line's, and more work though as many bytes."""

    def run(first: str) -> Profile:
        text = (
            f"import jax.numpy as jnp\ndef step(x):\n    y = {first}\n    z = y + 1\n    return z * z + y\n"
        )
        (tmp_path / "model.py").write_text(text)
        linecache.checkcache()
        names: dict[str, Any] = {}
        exec(compile(text, str(tmp_path / "model.py"), "exec"), names)
        return profiled(lambda: jax.jit(names["step"])(jnp.ones((256, 256))))

    before, after = run("jnp.cos(x)"), run("jnp.cos(jnp.cos(x))")
    elements = 256 * 256
    (fusion,) = [one for one in before.operations if one.program == "jit_step" and one.parts]
    assert {source.rpartition(":")[2] for source, _ in fusion.parts} == {"3", "4", "5"}
    assert sum(share for _, share in fusion.parts) == pytest.approx(1)
    assert fusion.elementwise == 13 * elements  # a function is 10, an addition and a product one
    assert fusion.source.endswith("model.py:3")
    assert Profile.from_json(before.to_json()) == before
    # By times that say it took twice as long, whatever they were here.
    lines = {
        change.place.rpartition(":")[2]: change
        for change in diff_profiles(timed(before, 1.0), timed(after, 2.0)).changes
        if "model.py" in change.place
    }
    assert lines["3"].was == lines["3"].place
    assert lines["3"].seconds == pytest.approx(20 / 23 * 2 - 10 / 13)
    assert (lines["3"].elementwise_before, lines["3"].elementwise_after) == (10 * elements, 20 * elements)
    assert lines["3"].cause == "more work"
    assert "655,360 → 1,310,720 operations on elements: more work" in str(
        diff_profiles(timed(before, 1.0), timed(after, 2.0))
    )


def timed(profile: Profile, seconds: float) -> Profile:
    """A profile whose fusions took a time that is given."""
    return replace(
        profile,
        operations=tuple(replace(one, seconds=seconds if one.parts else 0.0) for one in profile.operations),
    )


def test_a_profile_of_an_earlier_version_says_nothing_of_elements():
    rates: dict[str, Any] = {"peak_flops": 100.0, "peak_bandwidth": 1000.0}
    parts = (("a.py:3", 0.5), ("a.py:4", 0.5))
    before = profile_of(replace(ONE, seconds=0.4), **rates)
    after = profile_of(replace(ONE, seconds=0.8, elementwise=500_000, parts=parts), **rates)
    assert ONE.elementwise is None
    (change,) = diff_profiles(before, after).changes
    assert (change.place, change.elementwise_before, change.elementwise_after) == ("a.py:3", None, 500_000)
    assert change.cause == "same work, slower"
    json.dumps(diff_profiles(before, after).to_dict(), allow_nan=False)


def test_lines_with_absurd_numbers_and_texts_take_no_time():
    text = "x" * 100_000
    old = same_lines({"m.py:" + "9" * 5000: "a", "m.py:²": "b", "m.py:1": text + "1"})
    new = same_lines({"m.py:1": text + "2"})
    assert len(old) == 1
    assert len(edited_lines(old, new)) == 1
    many = [same_lines({f"m.py:{n}": f"{word} {n}" for n in range(1, 20_000)}) for word in ("one", "other")]
    assert edited_lines(*many) == {}


def test_emulated_devices_share_the_time():
    """Eight devices one after the other: what one line has more is what the whole has more."""
    spent = replace(ONE, seconds=0.032), replace(ONE, seconds=0.064)
    before, after = (
        replace(profile_of(one), devices=8, busy_seconds=one.seconds, wall_seconds=one.seconds + 1e-3)
        for one in spent
    )
    (change,) = diff_profiles(before, after).changes
    assert change.seconds == pytest.approx(0.032)
    # Two at a time: their seconds pass twice as fast.
    assert replace(before, busy_seconds=0.016).at_once == pytest.approx(2)
    assert replace(before, platform="tpu").at_once == 8


@pytest.mark.parametrize(
    "parts", [[["a.py:1", 10**400]], [["a.py:1", 0.9], ["a.py:2", 0.9]], [["a.py:1", True]]]
)
def test_shares_with_nonsense_are_refused(parts: Any):
    test_parts_with_nonsense_are_refused(parts)


@pytest.mark.parametrize("parts", [[["a.py:1", 2.0]], [["a\x1b.py:1", 0.5]], [[1, 0.5]], [["a.py:1"]], 3])
def test_parts_with_nonsense_are_refused(parts: Any):
    data = json.loads(profile_of(ONE).to_json())
    data["operations"][0]["parts"] = parts
    with pytest.raises(ProfileError):
        Profile.from_json(json.dumps(data))


def test_a_product_has_the_place_where_it_is_written(tmp_path: Path):
    """And not that of the sum into which XLA takes it."""
    (tmp_path / "model.py").write_text(
        "import jax\ndef helper(x, w):\n    return x @ w\n"
        "@jax.jit\ndef step(x, w):\n    return jax.numpy.tanh(helper(x, w)).sum()\n"
    )
    names: dict[str, Any] = {}
    path = str(tmp_path / "model.py")
    exec(compile((tmp_path / "model.py").read_text(), path, "exec"), names)
    x = jnp.ones((256, 256))
    found = profiled(lambda: names["step"](x, x))
    (product,) = [one for one in found.operations if one.flops]
    assert product.source == f"{path}:3"
    assert found.lines[product.source] == "return x @ w"
    assert Profile.from_json(found.to_json()).lines == found.lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    weights: jax.Array
    factor: int = dataclasses.field(metadata={"static": True})


def test_a_static_field_that_changed():
    step = jax.jit(lambda model, x: model.weights @ x * model.factor)
    x = jnp.ones((8, 8))
    (found,) = [
        one
        for one in profiled(lambda: [step(Scaled(x, factor), x) for factor in (1, 2)]).recompilations()
        if "lambda" in one.program
    ]
    (change,) = found.changes
    assert (change.where, change.what, change.before, change.after) == (
        "static fields of Scaled in model",
        "static value",
        "(1,)",
        "(2,)",
    )


def test_a_container_and_a_keyword_that_changed():
    x = jnp.ones((8, 8))
    summed = jax.jit(lambda pair: pair[0] @ pair[1])
    scaled = jax.jit(lambda x, n: x @ x * n)
    found = profiled(lambda: [summed((x, x)), summed([x, x]), scaled(x, 2.0), scaled(x, n=2.0)])
    said = {
        (change.where, change.what, change.before, change.after)
        for one in found.recompilations()
        if "lambda" in one.program
        for change in one.changes
    }
    assert ("containers of pair", "structure", "tuple", "list") in said
    assert ("arguments by keyword", "structure", "absent", "n") in said


def test_one_machine_measured_twice_has_one_limit():
    """The peak of a CPU is measured, and lower on a busy machine: that is not less work."""
    before = profile_of(replace(ONE, flops=20), peak_flops=100.0, peak_bandwidth=1.0)
    after = profile_of(replace(ONE, flops=20, seconds=0.8), peak_flops=50.0, peak_bandwidth=1.0)
    (change,) = diff_profiles(before, after).changes
    assert change.floor_before == change.floor_after
    assert change.cause == "same work, slower"


# --- beside a plan

STEP = replace(RUN, runs=8, seconds=0.8, flops=8 * 300, bytes=8 * 50)


def planned(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def candidate(**changes: Any) -> dict[str, Any]:
    return {
        "topology": "v4:2x2x1",
        "view": "chip",
        "step_seconds": 0.05,
        "time": {"low": 0.04, "high": 0.08, "communication": 0.01},
        "model_flops": 800.0,
        "hbm_bytes": 1000,
        **changes,
    }


PLAN = {"fits": True, "work": "a model", "candidates": [candidate()]}
LOCK = {
    "format": 1,
    "work": "a model",
    "topology": "v4:2x2x1",
    "view": "chip",
    "step_seconds": 0.05,
    "hbm_bytes": 1000,
    "figures": {"FLOPs": 400, "bytes moved": 25},
}


def test_a_profile_beside_a_plan(tmp_path: Path):
    plan = read_planned_step(planned(tmp_path, PLAN))
    measured = profile_of(programs=(replace(STEP, name="jit_g", seconds=0.1), STEP), peak_memory_bytes=1500)
    found = compare_with_plan(measured, plan)
    assert found.program == "jit_f"
    # Eight runs on two devices in one second; the plan's FLOPs are those of four devices.
    assert found.ratios == {
        "seconds": pytest.approx(0.1 / 0.05),
        "wall_seconds": pytest.approx(0.25 / 0.05),
        "communication_seconds": 0.0,
        "flops": pytest.approx(300 / 200),
        "bytes": None,
        "peak_memory_bytes": 1.5,
    }
    assert any("ratios say nothing about the plan's accuracy" in note for note in found.notes)
    assert "predicted" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)
    both = diff_profiles(measured, measured, plan=plan)
    assert both.to_dict()["plan"]["after"]["ratios"]["peak_memory_bytes"] == 1.5
    assert "before, beside the plan:" in str(both)
    assert diff_profiles(measured, measured).to_dict()["plan"] is None


def test_a_profile_beside_a_lockfile(tmp_path: Path):
    plan = read_planned_step(planned(tmp_path, LOCK))
    on_chips = profile_of(programs=(STEP,), chip=plan.chip, platform="tpu")
    found = compare_with_plan(on_chips, plan)
    assert found.ratios["flops"] == pytest.approx(300 / 400)
    assert found.ratios["bytes"] == pytest.approx(50 / 25)
    (note,) = found.notes
    assert note.startswith("the plan is for 4 devices, and 2 of this process ran")
    assert read_planned_step(planned(tmp_path, {**LOCK, "figures": {}})).flops is None


def test_what_plan_writes_is_read(tmp_path: Path):
    from capibara.config import ModularModelConfig
    from capibara.plan import plan

    made = plan(ModularModelConfig.from_toml("demo"), "v4-8", compile=False)
    read = read_planned_step(planned(tmp_path, {"fits": True, **made.to_json()}))
    assert read.seconds == made.best.step_seconds
    assert made.best.flops is not None
    assert read.flops == made.best.flops / 4
    assert read.peak_memory_bytes == made.best.hbm_bytes
    assert read.chip == "tpu-v4"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[" * 100_000, "is not a valid plan file"),
        ("[]", "expected an object"),
        ("{}", "missing 'topology'"),
        ({"fits": False, "error": "large"}, "nothing fits"),
        ({"options": []}, "plans serving"),
        ({"candidates": []}, "no candidate"),
        ({**PLAN, "candidates": [3]}, "expected an object"),
        ({**PLAN, "work": "\x1b[31m"}, "expected printable text"),
        ({**PLAN, "candidates": [candidate(step_seconds=0)]}, "step_seconds: got 0"),
        ({**PLAN, "candidates": [candidate(step_seconds=True)]}, "step_seconds: got True"),
        ({**PLAN, "candidates": [candidate(hbm_bytes="much")]}, "hbm_bytes: got 'much'"),
        ({**PLAN, "candidates": [candidate(time={})]}, "missing 'low'"),
        ({**PLAN, "candidates": [candidate(topology="moon")]}, "is not a valid plan file"),
        ({**PLAN, "candidates": [candidate(view=3)]}, "is not a valid plan file"),
        ({**LOCK, "figures": {"FLOPs": -1}}, "FLOPs: got -1"),
    ],
)
def test_plans_with_nonsense_are_refused(tmp_path: Path, data: Any, words: str):
    with pytest.raises(ProfileError, match=words.replace("[", r"\[")):
        read_planned_step(planned(tmp_path, data))


def test_bad_input_beside_a_plan(tmp_path: Path):
    with pytest.raises(ProfileError, match=r"plan: '/nowhere.json' cannot be read: No such file"):
        read_planned_step("/nowhere.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_planned_step("/nul\0")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_planned_step(tmp_path / "binary")
    with pytest.raises(ProfileError, match="without a program that ran"):
        compare_with_plan(profile_of(), read_planned_step(planned(tmp_path, PLAN)))


def test_a_sharding_over_a_mesh_without_devices_has_a_text():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert _sharding_text(sharding).endswith("('data',) over data=4×model=2")
