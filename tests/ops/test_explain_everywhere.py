"""``explain`` against the programs: for every public function and platform, what is in what JAX lowers and compiles."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_calls import CALLS, called, custom_calls, functions, named
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import topologies

import capibara.jax.tpu_v4.kernels as kernels
from capibara import ops
from capibara.jax._backend import TYPICAL_CALLS
from capibara.ops import Explanation, OpTypeError, OpValueError, attention, explain, tropical
from capibara.ops.tuning import Tuned, forced

FUNCTIONS = functions()
NAMES = sorted(set(FUNCTIONS) & set(CALLS))
PLATFORMS = ("cpu", "tpu", "cuda")


def answers(found: Explanation) -> dict[str, set[str]]:
    """By operation, the implementations that an answer names."""
    parts = found.parts or ((found,) if found.op in ops.list_ops() else ())
    by_op: dict[str, set[str]] = {}
    for part in parts:
        by_op.setdefault(part.op, set()).add(part.chosen)
    return by_op


def kernels_of(chosen: set[str]) -> tuple[bool, bool]:
    """Whether implementations with these names call native and Pallas code."""
    return "native" in chosen, any("pallas" in name for name in chosen)


def test_every_public_function_has_a_call_here():
    assert set(FUNCTIONS) - set(CALLS) == set()


def test_every_operation_has_a_public_function_and_a_typical_call():
    for name, op in ops.list_ops().items():
        assert op.face is not None, name
        assert op.face in FUNCTIONS.values(), name
        assert name in TYPICAL_CALLS, name


@pytest.mark.thin(4)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_lowered_program_has_what_explain_says(name, platform):
    args, kwargs = CALLS[name]
    found = explain(FUNCTIONS[name], *args, platform=platform, **kwargs)
    assert found.platform == platform
    run, shapes = called(name, FUNCTIONS[name])
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    assert named(text) == answers(found)
    native, pallas = kernels_of({found.chosen, *(part.chosen for part in found.parts)})
    calls = custom_calls(text)
    assert any(call.startswith("capibara") for call in calls) == native
    assert any(not call.startswith("capibara") for call in calls) == pallas


def test_a_gradient_takes_the_same_implementation():
    for name, op in ops.list_ops().items():
        key = next(key for key, function in FUNCTIONS.items() if function is op.face)
        if op.tuning is None or not op.tuning.differentiable:
            continue
        run, shapes = called(key, FUNCTIONS[key])

        def loss(*arrays: Any, run=run) -> Any:
            numbers = (x for x in run(*arrays) if jnp.issubdtype(x.dtype, jnp.inexact))
            return sum((jnp.sum(jnp.abs(x)) for x in numbers), jnp.zeros(()))

        args, kwargs = CALLS[key]
        for platform in ("cpu", "tpu"):
            lowered = jax.jit(jax.grad(loss)).trace(*shapes).lower(lowering_platforms=(platform,))
            chosen = explain(name, *args, platform=platform, **kwargs).chosen
            assert named(lowered.as_text(debug_info=True)) == {name: {chosen}}, (name, platform)


def test_the_compiled_program_calls_the_kernel_that_explain_names():
    for name in ("attention.flash_attention", "tropical.matmul"):
        args, kwargs = CALLS[name]
        found = explain(FUNCTIONS[name], *args, **kwargs)
        run, shapes = called(name, FUNCTIONS[name])
        text = jax.jit(run).lower(*shapes).compile().as_text()
        assert text is not None
        assert bool(custom_calls(text)) == (found.chosen == "native")


@pytest.mark.parametrize("name", [k for k in NAMES if hasattr(FUNCTIONS[k], "__capibara_op__")])
def test_tracing_a_function_finds_what_its_problem_says(name):
    args, kwargs = CALLS[name]
    direct = explain(FUNCTIONS[name], *args, **kwargs)
    if name == "collective.async_all_reduce":
        return  # inside another function it has to be given its axis

    def around(*args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[name](*args, **kwargs)

    traced = explain(around, *args, **kwargs)
    assert traced.op == "around"
    assert [(part.op, part.chosen, dict(part.reasons)) for part in traced.parts] == [
        (direct.op, direct.chosen, dict(direct.reasons))
    ]


def test_methods_of_the_documented_classes_answer_as_the_functions():
    classes = [each for each in vars(kernels).values() if inspect.isclass(each)]
    assert len(classes) >= 6
    seen = 0
    by_function = {id(function): name for name, function in FUNCTIONS.items()}
    for each in classes:
        for method, member in inspect.getmembers(each(), callable):
            if method.startswith("_"):
                continue
            name = by_function[id(getattr(member, "__func__", member))]
            args, kwargs = CALLS[name]
            assert str(explain(member, *args, **kwargs)) == str(explain(FUNCTIONS[name], *args, **kwargs))
            seen += 1
    assert seen >= 30


def test_the_documented_classes_have_every_function_of_their_category():
    for category in sorted({name.partition(".")[0] for name in FUNCTIONS}):
        (found,) = (each for name, each in vars(kernels).items() if name.lower() == f"tpuv4{category}ops")
        for name in (n.partition(".")[2] for n in FUNCTIONS if n.startswith(f"{category}.")):
            assert getattr(found, name, None) is FUNCTIONS[f"{category}.{name}"], f"{found.__name__}.{name}"


def test_a_bound_method_and_a_partial_are_traced():
    class Layer:
        window = 8

        def __call__(self, x: Any) -> Any:
            return self.attend(x) + 1

        def attend(self, x: Any) -> Any:
            return attention.flash_attention(x, x, x, window=self.window, use_causal_mask=True)

    x = jax.ShapeDtypeStruct((1, 2, 16, 8), jnp.float32)
    for function in (Layer().attend, Layer(), partial(Layer().attend)):
        found = explain(function, x, platform="tpu")
        assert found.chosen == "pallas_tpu"
        assert [part.op for part in found.parts] == ["flash_attention"]


def test_what_was_traced_before_is_traced_again():
    inner = jax.jit(lambda x: attention.flash_attention(x, x, x))
    x = jnp.ones((1, 1, 8, 4))
    inner(x)
    assert explain(lambda x: inner(x), x, platform="tpu").chosen == "pallas_tpu"


def test_several_operations_in_one_function():
    def both(x: Any, a: Any) -> Any:
        return attention.flash_attention(x, x, x), tropical.matmul(a, a), tropical.matmul(a, a)

    found = explain(both, jnp.ones((1, 1, 8, 4)), jnp.ones((8, 8)), platform="tpu")
    assert [part.op for part in found.parts] == ["flash_attention", "tropical_matmul"]
    assert found.chosen == "pallas_tpu, xla"
    assert str(found).splitlines()[0] == "both on tpu: pallas_tpu, xla"
    assert "  tropical_matmul on tpu: xla" in str(found).splitlines()


def test_inside_shard_map_the_axis_is_bound_already():
    from operation_calls import inside_one_device

    seen = []

    def local(x: Any) -> Any:
        seen.append(explain(ops.collective.reduce_scatter, x).chosen)
        return x

    jax.eval_shape(inside_one_device(local), jnp.ones((8, 4)))
    assert seen == ["xla"]


def test_measured_parameters_are_shown_where_they_were_measured():
    x = jnp.ones((1, 2, 64, 16))
    tuned = Tuned("cpu", "xla", (("xla", (("block_size", 64),)),))
    with forced("flash_attention", tuned):
        here = explain("flash_attention", x, x, x, platform="cpu")
        there = explain("flash_attention", x, x, x, platform="cuda")
    assert here.chosen == "xla"
    assert dict(here.parameters) == {"block_size": 64}
    assert "xla was measured to be faster here" in here.reasons["cpu"]
    assert "measured on this device: block_size=64" in str(here)
    assert dict(there.parameters) == {}


@pytest.mark.parametrize(
    ("op", "args", "error", "text"),
    [
        (len, (np.ones(3),), OpTypeError, "runs no operation"),
        (jnp.sin, (np.ones(3),), OpTypeError, "runs no operation"),
        (3, (), OpTypeError, "name or its public function"),
        ("flash_atention", (), OpValueError, "Did you mean 'flash_attention'"),
        (tropical.matvec, (np.ones((2, 2), "float32"), np.ones(3, "float32")), ValueError, "must be equal"),
    ],
)
def test_bad_input(op, args, error, text):
    with pytest.raises(error, match=text):
        explain(op, *args)
    with pytest.raises(OpTypeError, match="platform must be a string"):
        explain("flash_attention", platform=3)  # type: ignore[arg-type]


SCRIPT = r"""
import json, sys
import jax
sys.path.insert(0, sys.argv[2])
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from operation_calls import CALLS, NEED_AXIS, called, custom_calls, functions, named
from capibara.ops import explain, list_ops

kind = sys.argv[1]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
one = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0])
out = {}
for name, function in functions().items():
    if not hasattr(function, "__capibara_op__") or name in NEED_AXIS or name not in CALLS:
        continue
    args, kwargs = CALLS[name]
    run, shapes = called(name, function)
    given = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one) for s in shapes]
    text = jax.jit(run).lower(*given).compile().as_text()
    found = explain(function, *args, platform="tpu", **kwargs)
    out[name] = {
        "op": found.op, "chosen": found.chosen, "calls": sorted(custom_calls(text)),
        "named": {op: sorted(them) for op, them in named(text).items()},
    }
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.parametrize(
    "kind",
    topologies(),
)
def test_compiled_for_tpus(kind):
    found = ask(SCRIPT, kind, str(Path(__file__).parent.parent / "support"))
    assert len(found) >= 10
    for name, row in found.items():
        # Of an operation that XLA folds into others no instruction may carry the name; another one's never does.
        assert row["named"] in ({row["op"]: [row["chosen"]]}, {}), name
        assert (row["calls"] != []) == ("pallas" in row["chosen"]), name
    assert found["attention.flash_attention"]["calls"] == ["tpu_custom_call"]
    assert found["attention.flash_attention"]["named"] == {"flash_attention": ["pallas_tpu"]}
