"""The settings of a backend hold in ``apply`` and ``evaluate``, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated

from capibara import compose as ml

SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans", "jax_default_device")


def settings() -> list[Any]:
    return [getattr(jax.config, name) for name in SETTINGS]


@pytest.fixture(autouse=True)
def same_settings_after() -> Any:
    before = settings()
    yield
    assert settings() == before


def products(jaxpr: Any) -> list[Any]:
    """The precision of every matrix product, those of inner functions too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(eqn.params["precision"])
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


def attention(backend: ml.JaxBackend) -> tuple[ml.CompiledModel, Any, Any]:
    block = ml.SelfAttention(8, 2)
    model = ml.Model()
    table = model.add(ml.RotaryTable(4), "rotary", positions="positions")
    model |= block(input="x", cos=table.cos, sin=table.sin, output="y")
    compiled = ml.compile(model, backend, shapes={"x": [1, 4, 8]})
    x = {"x": np.ones((1, 4, 8), "float32"), "positions": np.arange(4, dtype="int32")}
    return compiled, compiled.randomize_params(), x


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGHEST, "highest"])
def test_precision_holds_in_apply_and_its_gradient(precision: Any) -> None:
    compiled, params, x = attention(ml.JaxBackend(precision=precision))
    loss = lambda p: compiled.apply(p, x)["y"].sum()  # noqa: E731
    forward = products(jax.make_jaxpr(lambda p: compiled.apply(p, x))(params).jaxpr)
    both = products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    late = products(jax.make_jaxpr(lambda p: jax.vjp(jax.jit(loss), p)[1](1.0))(params).jaxpr)
    assert len(both) > len(forward) > 4
    assert len(late) > len(forward)
    assert {p for pair in (*forward, *both, *late) for p in pair} == {jax.lax.Precision.HIGHEST}


def test_without_precision_the_surrounding_one_holds() -> None:
    compiled, params, x = attention(ml.JaxBackend())
    assert set(products(jax.make_jaxpr(lambda p: compiled.apply(p, x))(params).jaxpr)) == {None}


def linear(**arguments: Any) -> tuple[ml.CompiledModel, Any, dict[str, Any]]:
    compiled = ml.compile(ml.Linear(3), ml.JaxBackend(**arguments), shapes={"input": [2, 4]})
    return compiled, compiled.randomize_params(), {"input": np.arange(8.0).reshape(2, 4) / 7}


def test_float64_holds_in_a_bare_apply() -> None:
    compiled, params, x = linear(dtype="float64")
    want = x["input"] @ np.asarray(params["weight"]) + np.asarray(params["bias"])
    out = compiled.apply(params, x)["output"]
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, want, rtol=1e-15)


@pytest.mark.parametrize("call", ["apply", "evaluate"])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_float64_is_not_silently_cut_in_transformations(transform: Any, call: str) -> None:
    compiled, params, x = linear(dtype="float64")

    def run(p: Any) -> Any:
        return getattr(compiled, call)(p, x)["output"].sum()

    if transform is jax.vmap:
        params = jax.tree.map(lambda a: np.stack([np.asarray(a)] * 2), params)
    with pytest.raises(ml.InputError, match=r"compiled\.backend\.scope\(\)"):
        transform(run)(params)
    with compiled.backend.scope():
        out = transform(run)(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype("float64")}
    if transform is jax.grad:
        np.testing.assert_allclose(out["weight"], np.repeat(x["input"].sum(0)[:, None], 3, 1), rtol=1e-15)


def test_debug_finds_the_nan_in_a_bare_apply() -> None:
    model = ml.Model()
    model |= ml.Log()(input="x", output="y")
    x = {"x": jnp.array([-1.0])}
    assert np.isnan(ml.compile(model).apply({}, x)["y"])
    again = ml.Model()
    again |= ml.Log()(input="x", output="y")
    compiled = ml.compile(again, ml.JaxBackend(debug=True))
    with pytest.raises(FloatingPointError):
        compiled.apply({}, x)
    run = jax.jit(lambda x: compiled.apply({}, x))
    with pytest.raises(FloatingPointError), compiled.backend.scope():
        run(x)


@pytest.mark.parametrize("precision", ["hihgest", 3, "HIGHEST "])
def test_unknown_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(ml.CompileError, match="precision="):
        ml.JaxBackend(precision=precision)


def test_device_of_the_backend_and_the_arguments_device() -> None:
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from capibara import compose as ml
        first, second = jax.devices()
        backend = ml.JaxBackend(device="cpu:1")
        compiled = ml.compile(ml.SwiGLU(8, 4), backend)
        params = compiled.randomize_params()
        assert {d for a in jax.tree.leaves(params) for d in a.devices()} == {second}
        x = {"input": np.ones((2, 4), "float32")}
        eager, jitted = compiled.apply(params, x)["output"], jax.jit(compiled.apply)(params, x)["output"]
        assert eager.devices() == {second}, eager.devices()
        # Arrays that stand on a device of their own stay there, in a jit of the user's as anywhere.
        there = jax.device_put(params, first)
        for run in (compiled.apply, jax.jit(compiled.apply), compiled.evaluate):
            out = run(there, x)["output"]
            assert out.devices() == {first}, out.devices()
            np.testing.assert_allclose(out, eager, rtol=1e-5)
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={
            **__import__("os").environ,
            "XLA_FLAGS": emulated(2),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "same", done.stderr


def test_a_narrow_input_does_not_narrow_wide_parameters() -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="y")
    model |= ml.MatrixMultiply()(left="y", right="w", output="z")
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(3, 2))
    compiled = ml.compile(model, ml.JaxBackend(dtype="float64"), shapes={"x": (4, 5), "w": (3, 2)})
    params = compiled.randomize_params(seed=0)
    weight, bias = (np.asarray(params["linear"][k]) for k in ("weight", "bias"))
    expected = (x.astype(np.float64) @ weight + bias) @ w
    found = compiled.evaluate(params, {"x": x, "w": w})["z"]
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)
