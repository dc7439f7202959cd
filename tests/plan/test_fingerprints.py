"""Fingerprints: equal for the same program whatever its names, different with a reason, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tpu_compiler import needs_libtpu

from capibara.plan import PlanError, parse_slice
from capibara.plan.compiler import Job, ProgramCache, compile_program
from capibara.plan.fingerprints import Fingerprint, check_fingerprints, fingerprint, record_fingerprints
from capibara.plan.program.digest import program_digest

SUPPORT = Path(__file__).parents[1] / "support"
X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def lowered(function, *shapes):
    return jax.jit(function).lower(*(shapes or (X, W)))


def first(x, w):
    return {"out": jnp.where(x > 0, x @ w, 0.0), "sum": x.sum()}


def renamed(inputs, weights):
    # The same further down, under other names.
    return {"a": jnp.where(inputs > 0, inputs @ weights, 0.0), "b": inputs.sum()}


def test_names_do_not_count() -> None:
    one, other = lowered(first), lowered(renamed)
    assert one.as_text() != other.as_text()  # "@jit_first", "result['out']"
    assert program_digest(one) == program_digest(other) == program_digest(one.as_text())
    assert fingerprint(one).changes(fingerprint(other)) == ()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: {"out": jnp.where(x > 1, x @ w, 0.0), "sum": x.sum()}, (X, W)),
        (lambda x, w: {"out": jnp.where(x > 0, x @ w, 0.0), "sum": x.max()}, (X, W)),
        (first, (X, jax.ShapeDtypeStruct((32, 16), jnp.float32))),
        (first, (jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), W)),
    ],
    ids=["a constant", "an operation", "a shape", "a dtype"],
)
def test_what_is_computed_counts(function, shapes) -> None:
    if shapes == (X, W):
        assert program_digest(lowered(function)) != program_digest(lowered(first))
    else:
        other = lowered(lambda x, w: {"out": x @ w, "sum": x.sum()}, *shapes)
        assert program_digest(other) != program_digest(lowered(lambda x, w: {"out": x @ w, "sum": x.sum()}))


def test_which_function_is_called_counts() -> None:
    """Functions are known by their first place in the text: calls of two in another order are another program."""
    text = (
        "module @m {{ func.func public @main() {{ call @{}() call @{}() call @f() }} "
        "func.func private @f() func.func private @g() }}"
    )
    assert program_digest(text.format("f", "g")) != program_digest(text.format("g", "f"))
    assert program_digest(text.format("f", "g")) == program_digest(
        text.format("f", "g").replace("@g", "@_where_3").replace("@m ", "@other ")
    )
    called = 'stablehlo.custom_call @{}(%0) {{backend_config = "say @{}"}}'
    assert program_digest(called.format("a", "x")) != program_digest(called.format("b", "x"))
    assert program_digest(called.format("a", "x")) != program_digest(called.format("a", "y"))


def test_figures_are_those_of_the_program() -> None:
    found = fingerprint(lowered(lambda x, w: x @ w))
    assert found.figures["FLOPs"] == 2 * 64 * 32 * 32
    assert found.figures["bytes of arguments"] == (64 * 32 + 32 * 32) * 4
    assert found.figures["bytes of outputs"] == 64 * 32 * 4
    assert found.versions["jax"] == jax.__version__
    assert set(found.versions) == {"jax", "jaxlib", "cpu"}
    assert Fingerprint.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_changes_say_what_and_by_how_much() -> None:
    before = Fingerprint("a", {"jax": "1"}, {"FLOPs": 1000, "all-gather": 4, "all-gather, asynchronous": 4})
    after = Fingerprint("b", {"jax": "1"}, {"FLOPs": 1500, "all-gather": 4, "all-reduce": 2})
    assert before.changes(before) == ()
    assert before.changes(after) == (
        "the program before compilation is another one: its code, its shapes or JAX changed",
        "FLOPs: was 1,000, is 1,500 (+50.0%)",
        "all-gather, asynchronous: was 4, is 0",
        "all-reduce: was 0, is 2",
    )
    assert before.changes(Fingerprint("a", {"jax": "2"}, before.figures)) == ("jax was 1, is 2",)


def test_a_file_holds_one_for_each_combination_of_versions(tmp_path) -> None:
    path = tmp_path / "prints.json"
    old = Fingerprint("a", {"jax": "1"}, {"FLOPs": 10})
    new = Fingerprint("b", {"jax": "2"}, {"FLOPs": 20})
    record_fingerprints(path, {"step": old, "other": old})
    record_fingerprints(path, {"step": new})
    for each in (old, new):
        found = check_fingerprints(path, {"step": each})
        assert found.passed
        assert found.same == ("step",)
    grown = Fingerprint("b", {"jax": "2"}, {"FLOPs": 30})
    found = check_fingerprints(path, {"step": grown, "other": old})
    assert not found.passed
    assert found.changes == {"step": ("FLOPs: was 20, is 30 (+50.0%)",)}
    assert found.same == ("other",)
    assert "step: CHANGED\n  FLOPs" in str(found)
    record_fingerprints(path, {"step": grown})
    assert check_fingerprints(path, {"step": grown}).passed
    assert check_fingerprints(path, {"step": old}).passed
    # Of other versions, or of another name, nothing is said.
    unknown = check_fingerprints(path, {"step": Fingerprint("c", {"jax": "3"}, {}), "third": old})
    assert unknown.passed
    assert "compiled by jax 3, known of jax 1; jax 2" in unknown.missing["step"]
    assert "no program of this name" in unknown.missing["third"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "programs": {}}',
        '{"format": 1}',
        '{"format": 1, "programs": {"a": {}}}',
        '{"format": 1, "programs": {"a": [1]}}',
        '{"format": 1, "programs": {"a": [{"digest": 1, "versions": {}, "figures": {}}]}}',
        '{"format": 1, "programs": {"a": [{"digest": "", "versions": {}, "figures": {"FLOPs": "many"}}]}}',
        '{"format": 1, "programs": {"a": [{"digest": "", "versions": {}, "figures": {"FLOPs": NaN}}]}}',
        '{"format": 1, "programs": {"a": [{"digest": "", "versions": {"jax": 1}, "figures": {}}]}}',
        "[" * 100_000,
    ],
)
def test_other_files_are_refused_and_kept(tmp_path, content) -> None:
    path = tmp_path / "prints.json"
    path.write_text(content)
    found = {"a": Fingerprint("a", {}, {})}
    with pytest.raises(PlanError, match="is not a file of fingerprints"):
        check_fingerprints(path, found)
    with pytest.raises(PlanError, match="is not a file of fingerprints"):
        record_fingerprints(path, found)
    assert path.read_text() == content


def test_bad_arguments(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"lowered: got function, expected jax\.jit"):
        fingerprint(first)
    with pytest.raises(PlanError, match="compiled: got str"):
        fingerprint(lowered(first), "text")
    with pytest.raises(PlanError, match="cannot be read"):
        check_fingerprints(tmp_path / "none.json", {})
    bad: list[Any] = [
        ([1], "got list"),
        ({"a": 1}, "got 'a': int"),
        ({1: Fingerprint("", {})}, "got 1:"),
    ]
    for found, said in bad:
        for use in (check_fingerprints, record_fingerprints):
            with pytest.raises(PlanError, match=f"found: {said}.*expected"):
                use(tmp_path / "none.json", found)
    assert not (tmp_path / "none.json").exists()


@needs_libtpu
def test_of_a_program_for_a_slice(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    job = Job(
        builder="plan_builders:product",
        params={"rows": 512},
        slice=parse_slice("v4:2x2x1"),
        mesh=(("data", 2), ("model", 2)),
    )
    program = compile_program(job, cache=ProgramCache(tmp_path))
    found = Fingerprint.of(program)
    assert found.digest == program.program_hash
    assert set(found.versions) == {"jax", "jaxlib", "libtpu"}
    assert found.figures["FLOPs"] == 2 * 256 * 256 * 128
    assert found.figures["devices"] == 4
    assert found.figures["bytes of parameters"] == 256 * 128 * 4
