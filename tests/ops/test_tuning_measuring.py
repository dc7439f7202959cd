"""Measuring which parameters are fast, and that every operation which declares some can be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops import OpTypeError, OpValueError, explain, list_ops, tuner, tuning, tuning_cache
from capibara.ops import registry as registry_module
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuned, Tuning, forced
from capibara.ops.tuning_cache import Entry

# The measuring.


@dataclass(frozen=True)
class _Spec:
    name: str
    size: int
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class _Problem:
    size: int
    dtype: str
    implementation: str
    block: int | None = None
    tuned: Tuned | None = None


def _slow(steps: int, x: jax.Array, error: float = 0.0) -> jax.Array:
    """``2 x``, after so many steps that XLA cannot leave out."""
    return jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y) * 0 + y, x) * (2 + error)


STEPS = {8: 4000, 16: 1, 32: 8000, None: 4000}


@pytest.fixture
def op(monkeypatch):
    """An operation whose block of 16 is quick, whose block of 64 is wrong, and whose block of 128 does not compile."""
    monkeypatch.setattr(registry_module, "_OPS", dict(registry_module._OPS))

    def prepare(x: Any, *, implementation: str = "auto") -> tuple[_Problem, tuple[Any, ...]]:
        return _Problem(x.shape[0], str(x.dtype), implementation), (x,)

    def looped(problem: _Problem, x: jax.Array) -> jax.Array:
        if problem.block == 128:
            raise NotImplementedError("too large for the chip")
        return _slow(STEPS.get(problem.block, 1), x, 0.1 if problem.block == 64 else 0.0)

    made = Op(
        "double",
        prepare,
        [
            Implementation("xla", {"forward": looped}, tunables={"block": (8, 16, 32, 64, 128)}),
            Implementation("other", {"forward": lambda p, x: _slow(4000, x)}),
            Implementation("reference", {"forward": lambda p, x: x + x}),
        ],
        Tuning(
            lambda: [_Spec("some", 512), _Spec("same", 512), _Spec("more", 1024, ("large",))],
            lambda spec, random: ((random.normal(size=spec.size),), {}),
            lambda problem: {"size": problem.size},
            differentiable=False,
        ),
    )

    @public(made)
    def double(x: Any, *, implementation: str = "auto") -> Any:
        made.check_name(implementation)
        problem, arrays = made.prepare(x, implementation=implementation)
        return made.run("forward", problem, *arrays)

    return made


def test_the_quick_block_is_found_the_wrong_one_is_not_taken(op):
    (case,) = tuner.cases(op, "small")
    outcome = tuner.tune_case(case, max_seconds=60)
    assert outcome.key == "double|float32|size=512"
    assert outcome.entry.parameters == {"xla": {"block": 16}}
    assert outcome.entry.gains["xla"] > 1.03
    assert outcome.gain > 1.03
    assert outcome.entry.fastest is None
    assert outcome.default == "xla"
    assert list(outcome.wrong_results) == ["xla block=64"]
    assert "of 512 elements differ" in outcome.wrong_results["xla block=64"]
    assert outcome.failed == {"xla block=128": "NotImplementedError: too large for the chip"}
    assert outcome.complete
    assert set(outcome.seconds) == {"heuristic", "choice"}


def test_a_faster_implementation_is_chosen(op, monkeypatch):
    order = {"xla": Implementation("xla", {"forward": lambda p, x: _slow(8000, x)})}
    order["other"] = Implementation("other", {"forward": lambda p, x: _slow(1, x)})
    monkeypatch.setattr(op, "_implementations", [order["xla"], order["other"], op._implementations[2]])
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=60)
    assert (outcome.entry.fastest, outcome.entry.parameters) == ("other", {})
    assert outcome.gain > 1.03
    tuned = tuning.declared(op, "cpu", outcome.entry)
    with forced("double", tuned):
        found = explain("double", jnp.zeros(1024))
    assert found.chosen == "other"
    assert found.reasons["xla"] == "other was measured to be faster here"


def test_nothing_is_kept_where_nothing_is_faster(op, monkeypatch):
    same = [Implementation(n, {"forward": lambda p, x: x * 2}) for n in ("xla", "other")]
    monkeypatch.setattr(op, "_implementations", [*same, op._implementations[2]])
    # A clock on which every call takes as long as any other.
    ticks = iter(range(1_000_000))
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=1e5, clock=lambda: float(next(ticks)))
    assert outcome.entry == Entry(jax=jax.__version__)
    assert outcome.gain == 1.0


def test_without_time_it_says_so_and_keeps_nothing(op):
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=1e-6)
    assert not outcome.complete
    assert outcome.entry.parameters == {}


def test_one_implementation_leaves_the_rest_of_an_entry_alone(op):
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=60, implementation="xla")
    assert outcome.entry.parameters == {"xla": {"block": 16}}
    before = Entry("other", {"other": {"size": 3}, "xla": {"block": 8}}, {"other": 2.0, "xla": 3.0, "": 4.0})
    merged = outcome.merged(before, "xla")
    assert merged.fastest == "other"
    assert merged.parameters == {"other": {"size": 3}, "xla": {"block": 16}}
    assert merged.gains["other"] == 2.0
    assert merged.gains["xla"] == outcome.entry.gains["xla"]


def test_cases_take_changes_and_leave_doubles_out(op):
    assert [case.spec.size for case in tuner.cases(op, "small")] == [512]
    assert [case.spec.size for case in tuner.cases(op, "large", changes={"size": 7})] == [7]
    with pytest.raises(OpValueError, match="no field 'sise'"):
        tuner.cases(op, changes={"sise": 7})
    with pytest.raises(OpTypeError, match="integer"):
        tuner.cases(op, changes={"size": "7"})  # type: ignore[dict-item]
    with pytest.raises(OpValueError, match="dtype must be"):
        tuner.cases(op, dtype="int8")
    with pytest.raises(OpValueError, match="nothing that could be tuned"):
        tuner.cases(list_ops()["cached_attention"])
    with pytest.raises(OpValueError, match="no implementation 'cpu'"):
        tuner.tune_case(tuner.cases(op)[0], implementation="cpu")


@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_a_median_hold_it_as_often_as_they_say(seed):
    random = np.random.default_rng(seed)
    for n in (7, 9, 15):
        inside = 0
        for _ in range(400):
            low, high = tuner.median_bounds(random.exponential(size=n).tolist())
            inside += low <= np.log(2) <= high
        assert inside >= 0.92 * 400
    assert tuner.median_bounds([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert tuner.median_bounds([float(i) for i in range(9)]) == (1.0, 7.0)


def test_noise_is_not_taken_for_a_gain():
    random = np.random.default_rng(0)
    kept = sum(
        tuner.is_faster(ratios, {"forward": ratios})
        for ratios in (np.exp(random.normal(0, 0.2, 15)).tolist() for _ in range(300))
    )
    assert kept <= 9
    sure = np.exp(random.normal(-0.2, 0.02, 15)).tolist()
    assert tuner.is_faster(sure, {"forward": sure})
    assert not tuner.is_faster(sure[:5], {"forward": sure[:5]})
    assert not tuner.is_faster(sure, {"forward": [1.2] * 15, "gradient": sure})


@pytest.mark.parametrize("name", sorted(n for n, op in list_ops().items() if op.tuning is not None))
def test_every_operation_that_declares_it_can_be_measured(name):
    """Every spec makes a valid call; problems have the field; what is tunable is a field that the heuristic leaves."""
    op = list_ops()[name]
    assert op.tuning is not None
    assert op.face is not None
    assert tuner.cases(op, "large")
    for spec in op.tuning.specs():
        args, kwargs = op.tuning.arguments(spec, np.random.default_rng(0))
        args, kwargs = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, "float32" if x.dtype == "float64" else x.dtype)
                if isinstance(x, np.ndarray)
                else x
            ),
            (args, kwargs),
        )
        problem, _ = op.prepare(*args, **kwargs)
        assert replace(problem, tuned=Tuned("cpu")).tuned == Tuned("cpu")
        bucket = op.tuning.bucket(problem)
        if bucket is None:
            continue
        assert tuning_cache._KEY.fullmatch(tuning.bucket_key(name, problem, bucket))
        for each in op._implementations:
            for parameter in each.tunables:
                assert getattr(problem, parameter) is None, (spec.name, parameter)


def _prepared(op: Op) -> Iterator[tuple[Any, Any, Any]]:
    """Problem and arguments of the small specs, in float32, with the heuristics."""
    assert op.tuning is not None
    for case in tuner.cases(op, "small"):
        args, kwargs = jax.tree.map(
            lambda x: x.astype("float32") if isinstance(x, np.ndarray) and x.dtype == "float64" else x,
            op.tuning.arguments(case.spec, np.random.default_rng(0)),
        )
        with forced(op.name, None):
            yield op.prepare(*args, **kwargs)[0], args, kwargs


@pytest.mark.parametrize("name", sorted(n for n, op in list_ops().items() if op.tuning is not None))
def test_a_choice_reaches_the_program_of_every_such_operation(name):
    """The public function prepares its calls with what was measured, and each tunable value makes its own problem."""
    op = list_ops()[name]
    assert op.tuning is not None
    assert op.face is not None
    face = op.face
    problem, args, kwargs = next(each for each in _prepared(op) if op.tuning.bucket(each[0]) is not None)
    for each in op.usable(problem, "cpu"):
        values = {parameter: numbers[0] for parameter, numbers in op.tunables(each).items()}
        chosen = Tuned("cpu", each, ((each, tuple(sorted(values.items()))),) if values else ())
        with forced(name, chosen):
            (part,) = explain(lambda *a, **k: face(*a, **k), *args, platform="cpu", **kwargs).parts
        assert part.chosen == each
        assert part.parameters in (values, {})  # one that refuses these values runs with its own


def test_a_model_leaves_the_chunks_of_its_scan_to_what_was_measured():
    from capibara import compose as ml
    from capibara.config.sections import SSMSection

    assert SSMSection().chunk_size is None
    compiled = ml.compile(ml.StateSpace(8, 3, 4), ml.JaxBackend())
    params, x = compiled.init(jax.random.key(0)), jnp.ones((1, 64, 8))
    with forced("selective_scan", Tuned("cpu", "xla", (("xla", (("chunk_size", 16),)),))):
        found = explain(lambda x: compiled.evaluate(params, {"input": x}), x, platform="cpu")
    (part,) = (each for each in found.parts if each.op == "selective_scan")
    assert dict(part.parameters) == {"chunk_size": 16}
