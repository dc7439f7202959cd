"""Compiled models: values, gradients, transformations, state, randomness, sources, errors."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import compose as ml
from capibara.compose.initializers import zeros


def mlp(sizes: list[int]) -> ml.CompiledModel:
    return ml.compile(ml.MLP(sizes[0], sizes[1:-1], sizes[-1]))


def numpy_mlp(params, x: np.ndarray) -> np.ndarray:
    names = sorted(params)
    for i, name in enumerate(names):
        x = x @ np.asarray(params[name]["weight"], "float64") + np.asarray(params[name]["bias"], "float64")
        if i < len(names) - 1:
            x = np.maximum(x, 0)
    return x


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=3, max_size=5), st.lists(st.integers(1, 3), max_size=2))
def test_mlp_equals_numpy(sizes: list[int], batch: list[int]) -> None:
    compiled = mlp(sizes)
    params = compiled.randomize_params(1)
    x = np.random.default_rng(0).normal(size=(*batch, sizes[0])).astype("float32")
    out = compiled.apply(params, {"input": x})["output"]
    np.testing.assert_allclose(out, numpy_mlp(params, x.astype("float64")), rtol=1e-5, atol=1e-6)


def test_composes_with_jit_grad_vmap() -> None:
    compiled = mlp([3, 4, 2])
    params = compiled.randomize_params(0)
    x = jnp.arange(15.0).reshape(5, 3) / 10

    def loss(params, x):
        return jnp.sum(compiled.apply(params, {"input": x})["output"] ** 2)

    plain = jax.grad(loss)(params, x)
    jitted = jax.jit(jax.grad(loss))(params, x)
    rows = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, jitted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.sum(0), rtol=1e-4, atol=1e-6), plain, rows)


def test_evaluate_gives_outputs_and_gradients() -> None:
    compiled = ml.compile(ml.Linear(dimension=64), ml.JaxBackend(), shapes={"input": [32, 128]})
    params = compiled.randomize_params()
    inputs = {"input": jnp.ones((32, 128))}
    outputs = compiled.evaluate(params, inputs)
    again, gradients = compiled.evaluate(params, inputs, output_gradients={"output": jnp.ones((32, 64))})
    np.testing.assert_array_equal(outputs["output"], again["output"])
    np.testing.assert_allclose(gradients["weight"], np.full((128, 64), 32.0))
    np.testing.assert_allclose(gradients["bias"], np.full(64, 32.0))


@pytest.mark.thin(3)
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("mode", ["scan", "unroll"])
def test_repeat_equals_the_block_applied_in_turn(mode: str, remat: str) -> None:
    whole = ml.compile(ml.Repeat(ml.SwiGLU(6, 4), 3, mode=mode, remat=remat))
    one = ml.compile(ml.SwiGLU(6, 4))
    params = whole.randomize_params(3)
    x = jax.random.normal(jax.random.key(0), (2, 4))

    def stacked(params, x):
        return jnp.sum(jnp.sin(whole.apply(params, {"input": x})["output"]))

    def in_turn(params, x):
        for i in range(3):
            x = one.apply(jax.tree.map(lambda p, i=i: p[i], params["repeat"]), {"input": x})["output"]
        return jnp.sum(jnp.sin(x))

    np.testing.assert_allclose(stacked(params, x), in_turn(params, x), rtol=1e-5)
    a, b = (jax.grad(f, argnums=(0, 1))(params, x) for f in (stacked, in_turn))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), a, b)
    # Forward mode as well.
    _, tangent = jax.jvp(lambda x: stacked(params, x), (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, jnp.sum(a[1]), rtol=1e-4, atol=1e-5)


def test_unrolled_gradient_has_no_padded_additions() -> None:
    whole = ml.compile(ml.Repeat(ml.SwiGLU(6, 4), 8, mode="unroll"))
    params = whole.randomize_params(0)
    program = jax.make_jaxpr(
        jax.grad(lambda p: jnp.sum(whole.apply(p, {"input": jnp.ones((2, 4))})["output"]))
    )(params)
    names = [eqn.primitive.name for eqn in program.jaxpr.eqns]
    assert "pad" not in names


def test_scanned_program_does_not_grow_with_depth() -> None:
    def size(count: int) -> int:
        compiled = ml.compile(ml.Repeat(ml.SwiGLU(6, 4), count, mode="scan"))
        params = jax.eval_shape(lambda: compiled.init(jax.random.key(0)))
        run = jax.jit(jax.grad(lambda p: jnp.sum(compiled.apply(p, {"input": jnp.ones((2, 4))})["output"])))
        return run.lower(params).as_text().count("\n")

    assert size(4) == size(64)


def test_repetitions_start_differently_and_stay_when_others_come() -> None:
    params = ml.compile(ml.Repeat(ml.SwiGLU(6, 4), 3)).randomize_params(0)
    w = np.asarray(params["repeat"]["gate"]["weight"])
    assert not np.allclose(w[0], w[1])


def counter() -> ml.Model:
    """Counts its calls in a state and adds the count to its input."""
    model = ml.Model()
    model.add_input("input", "*b", "float")
    model.add_state("count", (), zeros)
    model.add(ml.Add(), "up", left="count", right=1.0, output="next")
    model.update_state("count", "next")
    model.add(ml.Add(), "sum", left="input", right="next", output="output")
    model.expose("output")
    return model


@pytest.mark.parametrize("mode", ["scan", "unroll"])
def test_state_goes_in_and_comes_out(mode: str) -> None:
    compiled = ml.compile(ml.Repeat(counter(), 2, mode=mode))
    state = compiled.init_state()
    x = {"input": jnp.zeros(3)}
    out, state = compiled.apply({}, x, state=state)
    np.testing.assert_array_equal(out["output"], [2, 2, 2])
    out, state = jax.jit(lambda s: compiled.apply({}, x, state=s))(state)
    np.testing.assert_array_equal(out["output"], [4, 4, 4])
    np.testing.assert_array_equal(jax.tree.leaves(state)[0], [2, 2])
    with pytest.raises(ml.InputError, match=r"has state.*init_state"):
        compiled.apply({}, x)


def test_dropout_is_random_only_in_training_and_differs_by_layer() -> None:
    body = ml.Model()
    body |= ml.Dropout(0.5)(input="input", output="output")
    compiled = ml.compile(ml.Repeat(body, 2, mode="scan"))
    x = {"input": jnp.ones(2000)}
    np.testing.assert_array_equal(compiled.apply({}, x)["output"], x["input"])
    a = compiled.apply({}, x, key=jax.random.key(0), train=True)["output"]
    b = compiled.apply({}, x, key=jax.random.key(0), train=True)["output"]
    c = compiled.apply({}, x, key=jax.random.key(1), train=True)["output"]
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    # Two independent masks leave a quarter; one mask used twice would leave a half.
    assert 0.2 < float(jnp.mean(a > 0)) < 0.3
    with pytest.raises(ml.InputError, match="pass key="):
        compiled.apply({}, x, train=True)


def test_precision_policy() -> None:
    backend = ml.JaxBackend(policy=ml.Precision("float32", "bfloat16", "float32"))
    model = ml.Model()
    model |= ml.RMSNorm()(input="x", output="n")
    model |= ml.Linear(4)(input="n", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 8]})
    params = compiled.randomize_params()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert compiled.apply(params, {"x": jnp.ones((2, 8))})["y"].dtype == jnp.bfloat16
    dots = [
        eqn
        for eqn in jax.make_jaxpr(lambda p, x: compiled.apply(p, {"x": x}))(
            params, jnp.ones((2, 8))
        ).jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert [v.aval.dtype.name for v in dots[0].invars] == ["bfloat16", "bfloat16"]
    assert dots[0].params["preferred_element_type"] == jnp.float32


def test_float64_only_while_running() -> None:
    before = jax.config.read("jax_enable_x64")
    compiled = ml.compile(ml.Linear(3), ml.JaxBackend(dtype="float64"), shapes={"input": [2, 4]})
    params = compiled.randomize_params()
    out = compiled.evaluate(params, {"input": np.ones((2, 4))})["output"]
    assert out.dtype == np.float64
    assert jax.config.read("jax_enable_x64") == before
    assert jnp.ones(2).dtype == jnp.float32


def test_source_is_readable_and_written(tmp_path) -> None:
    path = tmp_path / "model.py"
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="h")
    model += ml.Relu()(output="y")
    compiled = ml.compile(model, shapes={"x": [2, 3]}, file_path=path)
    golden = textwrap.dedent('''
        """Generated by capibara.compose from Model."""

        from capibara.compose.backends import jax_ops as ops


        def forward(params, inputs, state, key, train):
            x = inputs['x']
            linear_product = ops.dense(x, params['linear']['weight'], accumulate='float32')
            linear_sum = ops.add(linear_product, params['linear']['bias'])
            relu = ops.relu(linear_sum)
            return {'y': relu}, state
    ''').lstrip()
    assert path.read_text() == compiled.source == golden
    assert inspect.getsource(compiled.function) == golden.split("\n\n\n")[1]
    assert [p.name for p in tmp_path.iterdir()] == ["model.py"]


def test_fresh_parameters_do_not_depend_on_others() -> None:
    def params(extra: bool):
        model = ml.Model()
        model.add(ml.Linear(4), "one", input="x", output="h")
        if extra:
            model.add(ml.Linear(4), "other", input="x", output="g")
        return ml.compile(model, shapes={"x": [2, 3]}).randomize_params(5)

    np.testing.assert_array_equal(params(False)["one"]["weight"], params(True)["one"]["weight"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, p: c.apply(p, {}), "missing \\['x'\\]"),
        (lambda c, p: c.apply(p, {"X": jnp.ones((2, 3))}), "(?s)missing.*unknown"),
        (lambda c, p: c.apply(p, jnp.ones((2, 3))), "must be a dict"),
        (lambda c, p: c.apply(p, {"x": 3}), "not an array"),
        (lambda c, p: c.apply(p, {"x": jnp.ones(3)}), r"shape \(3,\), expected"),
        (lambda c, p: c.apply(p, {"x": jnp.ones((2, 4))}), r"shape \(2, 4\), expected \(size, 3\)"),
        (lambda c, p: c.evaluate(p, {"x": jnp.ones((2, 3))}, {"z": 1}), "'z', which is not an output"),
        (lambda c, p: c.init(jax.random.key(0), bach=3), "'bach' is not a free size"),
    ],
)
def test_wrong_calls(call, words: str) -> None:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="y")
    compiled = ml.compile(model, shapes={"x": [None, 3]})
    with pytest.raises(ml.ComposeError, match=words):
        call(compiled, compiled.randomize_params())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "gpu:7"}, "devices of this machine are: cpu:0"),
        ({"device": "cpu:x"}, "write a platform and a number"),
        ({"device_mesh": (64, 2)}, "needs 128 devices.*XLA_FLAGS"),
        ({"device_mesh": (0,)}, "at least 1"),
        ({"dtype": "float31"}, "not a floating dtype.*Did you mean"),
        ({"policy": ("a",)}, "."),
    ],
)
def test_wrong_backends(arguments, words: str) -> None:
    if "policy" in arguments:
        with pytest.raises(ml.CompileError, match="narrower"):
            ml.Precision("float32", "bfloat16", "bfloat16")
        return
    with pytest.raises(ml.CompileError, match=words):
        ml.JaxBackend(**arguments)


def test_compile_refuses_what_is_no_model() -> None:
    model = ml.Model()
    with pytest.raises(ml.UnconnectedError, match="no output"):
        ml.compile(model)
    with pytest.raises(ml.CompileError, match="is not a model"):
        ml.compile("model")  # type: ignore[arg-type]
    with pytest.raises(ml.CompileError, match=r"shapes names 'inputt'.*Did you mean 'input'"):
        ml.compile(ml.Linear(3), shapes={"inputt": [1, 2]})
    with pytest.raises(ml.CompileError, match="'in' is not known"):
        ml.compile(ml.Linear(3)).randomize_params()


def test_sharded_model_equals_one_device() -> None:
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from capibara import compose as ml
        model = lambda: ml.Repeat(ml.SwiGLU(16, 8), 2, mode="scan")
        one = ml.compile(model())
        many = ml.compile(model(), ml.JaxBackend(device_mesh=(4, 2)))
        params, sharded = one.randomize_params(0), many.randomize_params(0)
        jax.tree.map(np.testing.assert_array_equal, params, sharded)
        gate = jax.tree.leaves_with_path(sharded)
        specs = {jax.tree_util.keystr(k): v.sharding.spec for k, v in gate}
        P = jax.sharding.PartitionSpec
        assert [s for k, s in specs.items() if "gate" in k] == [P(None, "data", "model")], specs
        assert [s for k, s in specs.items() if "down" in k] == [P(None, "model", "data")], specs
        x = jnp.arange(32.0).reshape(4, 8) / 30
        a, b = (c.evaluate(p, {"input": x})["output"] for c, p in ((one, params), (many, sharded)))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        print("same")
    """
    # Bits are compared, and without optimization the two programs round differently.
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**__import__("os").environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "same", done.stderr
