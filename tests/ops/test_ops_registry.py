"""The registry: which implementation is chosen, what falls through, and what the compiled program then holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from capibara import native
from capibara.ops import NoImplementationError, OpTypeError, OpValueError, explain, list_ops
from capibara.ops import registry as registry_module
from capibara.ops.attention import flash_attention
from capibara.ops.registry import Implementation, Op, public


@dataclass(frozen=True)
class _Problem:
    size: int
    implementation: str


def _refuses_large(problem: _Problem) -> None:
    if problem.size > 4:
        raise NotImplementedError(f"holds 4 numbers at most, got {problem.size}")


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch):
    """An operation that adds another constant in each implementation, so that the choice shows."""
    monkeypatch.setattr(registry_module, "_OPS", dict(registry_module._OPS))

    def prepare(x: Any, *, implementation: str = "auto") -> tuple[_Problem, tuple[Any, ...]]:
        return _Problem(x.shape[0], implementation), (x,)

    made = Op(
        "shift",
        prepare,
        [
            Implementation("cpu", {"forward": lambda p, x: x + 1}, ("cpu",), _refuses_large),
            Implementation("tpu", {"forward": lambda p, x: x + 2}, ("tpu",)),
            Implementation("plain", {"forward": lambda p, x: x + 3}),
        ],
    )

    @public(made)
    def shift(x: Any, *, implementation: str = "auto") -> Any:
        made.check_name(implementation)
        problem, arrays = prepare(x, implementation=implementation)
        return made.run("forward", problem, *arrays)

    return shift


def test_auto_takes_the_first_that_accepts(op):
    assert op(jnp.zeros(2))[0] == 1
    assert op(jnp.zeros(8))[0] == 3


def test_an_explicit_choice_ignores_the_platform_but_not_the_check(op):
    assert op(jnp.zeros(2), implementation="tpu")[0] == 2
    with pytest.raises(NoImplementationError, match="holds 4 numbers at most, got 8"):
        op(jnp.zeros(8), implementation="cpu")


def test_only_not_implemented_falls_through(op, monkeypatch):
    def broken(problem: _Problem) -> None:
        raise RuntimeError("a bug in the kernel")

    first = registry_module.get_op("shift")._implementations[0]
    monkeypatch.setattr(
        registry_module.get_op("shift"),
        "_implementations",
        [Implementation("cpu", first.functions, ("cpu",), broken), Implementation("plain", first.functions)],
    )
    with pytest.raises(RuntimeError, match="a bug in the kernel"):
        op(jnp.zeros(2))


@pytest.mark.parametrize(("platform", "constant"), [("cpu", "1.0"), ("tpu", "2.0"), ("cuda", "3.0")])
def test_the_platform_of_the_lowering_decides_and_explain_agrees(op, platform, constant):
    text = jax.export.export(jax.jit(op), platforms=[platform])(jnp.zeros(2)).mlir_module()
    assert text.count("stablehlo.add ") == 1
    assert f"dense<{constant[0]}" in text
    chosen = explain(op, jnp.zeros(2), platform=platform).chosen
    assert chosen == {"1.0": "cpu", "2.0": "tpu", "3.0": "plain"}[constant]


def test_explain_gives_every_reason(op):
    found = explain("shift", jax.ShapeDtypeStruct((8,), jnp.float32), platform="cpu")
    assert found.chosen == "plain"
    assert found.reasons == {"cpu": "holds 4 numbers at most, got 8", "tpu": "is for tpu, not cpu"}
    assert str(found).splitlines()[0] == "shift on cpu: plain"
    asked = explain(op, jnp.zeros(2), platform="tpu", implementation="plain")
    assert asked.chosen == "plain"
    assert "was asked for" in asked.reasons["cpu"]


def test_explain_says_gpu_is_cuda(op):
    assert explain(op, jnp.zeros(2), platform="gpu").platform == "cuda"


def test_bad_names_are_answered_with_the_near_ones(op):
    with pytest.raises(OpValueError, match="Did you mean 'plain'"):
        op(jnp.zeros(2), implementation="plane")
    with pytest.raises(OpTypeError, match="must be a string"):
        op(jnp.zeros(2), implementation=3)
    with pytest.raises(OpValueError, match="Did you mean 'flash_attention'"):
        explain("flash_atention", jnp.zeros(2))
    with pytest.raises(OpTypeError, match="public function"):
        explain(len, jnp.zeros(2))


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(OpValueError, match="registered already"):
        Op("flash_attention", lambda: (None, ()), [])


def test_the_operations_of_the_package_are_listed():
    names = {"flash_attention", "cached_attention", "selective_scan", "causal_conv1d", "nearest_code"}
    assert names <= set(list_ops())
    with pytest.raises(TypeError):
        list_ops()["new"] = None  # type: ignore[index]


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_attention_lowers_for_another_platform_to_what_explain_says(platform):
    x = jax.ShapeDtypeStruct((1, 2, 16, 4), jnp.float32)

    def lowered(implementation: str) -> str:
        def f(q: jax.Array) -> jax.Array:
            return flash_attention(q, q, q, use_causal_mask=True, implementation=implementation)

        return jax.jit(f).trace(x).lower(lowering_platforms=(platform,)).as_text()

    chosen = explain(flash_attention, x, x, x, use_causal_mask=True, platform=platform).chosen
    on_cpu = "cpu" if native.problem() else "native"
    assert chosen == {"cpu": on_cpu, "tpu": "pallas_tpu", "cuda": "xla"}[platform]
    assert ("tpu_custom_call" in lowered("auto")) == (chosen == "pallas_tpu")
    # The looped form is recognised by its loops; the tiles of the CPU form are written out.
    assert ("stablehlo.while" in lowered("auto")) == (chosen == "xla")
    assert "stablehlo.while" in lowered("xla")
    assert "stablehlo.while" not in lowered("cpu")


def test_a_program_for_one_platform_has_nothing_of_others() -> None:
    from capibara.ops.attention import paged_attention
    from capibara.ops.registry import for_platform

    query = jnp.ones((1, 1, 2, 8))
    pages, table = jnp.ones((3, 8, 1, 8)), jnp.ones((1, 2), jnp.int32)

    def traced() -> str:
        # A new function each time: JAX keeps what it has traced.
        return str(jax.make_jaxpr(lambda q: paged_attention(q, pages, pages, table, jnp.array([9])))(query))

    everywhere = traced()
    assert "platform_index" in everywhere
    assert "capibara_on_one_device" in everywhere
    with for_platform("cpu"):
        here = traced()
    assert "platform_index" not in here
    assert "capibara_on_one_device" not in here
    with for_platform("tpu"):
        assert "capibara_on_one_device" in traced()
    assert traced() == everywhere


def test_kernels_are_for_the_chip_that_is_named() -> None:
    from capibara.ops.linalg.grouped_tpu import ANY_CORE, V6E_CORE, device_core
    from capibara.ops.registry import for_platform, tpu_kind

    assert (tpu_kind(), device_core()) == ("", ANY_CORE)
    with for_platform("tpu", "TPU v6 lite"):
        assert (tpu_kind(), device_core()) == ("TPU v6 lite", V6E_CORE)
