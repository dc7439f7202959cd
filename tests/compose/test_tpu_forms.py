"""The forms of operations for TPUs have the values and gradients of those for CPUs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from emulation import emulated
from other_process import run_apart

from capibara import compose as ml
from capibara.compose.backends import jax_ops
from capibara.compose.backends.jax_tpu import choose_forms, on_tpu, returning_half_width
from capibara.config.axes import AxisRules

CLOSE: dict[Any, Any] = {
    jnp.float32: {"rtol": 1e-5, "atol": 1e-5},
    jnp.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
CASES: dict[str, Any] = {
    "dense": ((2, 130, 16), (16, 24)),
    "project": ((2, 130, 16), (16, 4, 8)),
    "merge": ((2, 130, 4, 8), (4, 8, 16)),
    "rms_norm": ((2, 130, 16), (16,)),
    "layer_norm": ((2, 130, 16), (16,)),
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: Any) -> None:
    random = np.random.default_rng(0)
    arrays = [device_array(random.normal(size=shape), dtype) for shape in CASES[name]]
    options = {"epsilon": 1e-5} if "norm" in name else {}

    def both(ops: Any, x: Any, weight: Any) -> Any:
        out, pull = jax.vjp(lambda *a: getattr(ops, name)(*a, accumulate="float32", **options), x, weight)
        return out, pull(jnp.cos(jnp.arange(out.size)).astype(out.dtype).reshape(out.shape))

    found, wanted = jax.jit(lambda *a: [both(ops, *a) for ops in (on_tpu(jax_ops), jax_ops)])(*arrays)

    def check(got: jax.Array, want: jax.Array) -> None:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), **CLOSE[dtype])

    jax.tree.map(check, found, wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_exact_gelu_of_half_width_against_its_definition(dtype: Any) -> None:
    x = device_array(np.linspace(-9, 9, 4001), dtype)
    gelu = on_tpu(jax_ops).gelu
    out, slopes = jax.jit(
        lambda x: (gelu(x, approximate=False), jax.grad(lambda x: gelu(x, approximate=False).sum())(x))
    )(x)
    exact = [(float(each), 0.5 * (1 + math.erf(float(each) / math.sqrt(2)))) for each in x]
    close: dict[str, Any] = {"rtol": float(jnp.finfo(dtype).eps), "atol": 1e-6}
    assert (out.dtype, slopes.dtype) == (dtype, dtype)
    np.testing.assert_allclose(out.astype(jnp.float32), [each * below for each, below in exact], **close)
    density = [math.exp(-each * each / 2) / math.sqrt(2 * math.pi) for each, _ in exact]
    wanted = [below + each * slope for (each, below), slope in zip(exact, density, strict=True)]
    np.testing.assert_allclose(slopes.astype(jnp.float32), wanted, **close)


def test_gelus_that_are_not_exact_or_not_of_half_width_are_the_same() -> None:
    ops = on_tpu(jax_ops)
    x = jnp.linspace(-9, 9, 101)
    for approximate, dtype in ((True, jnp.bfloat16), (True, jnp.float32), (False, jnp.float32)):
        found = ops.gelu(x.astype(dtype), approximate=approximate)
        np.testing.assert_array_equal(found, jax.nn.gelu(x.astype(dtype), approximate=approximate))


@pytest.mark.parametrize("x", [3, 3.0, np.arange(-3, 4), np.arange(-3, 4, dtype=np.int8), np.array([True])])
def test_exact_gelu_takes_what_has_no_fractions_too(x: Any) -> None:
    np.testing.assert_array_equal(
        on_tpu(jax_ops).gelu(x, approximate=False), jax.nn.gelu(jnp.asarray(x), approximate=False)
    )


def test_other_operations_and_calls_outside_of_a_trace_are_the_same() -> None:
    ops = on_tpu(jax_ops)
    assert isinstance(ops, SimpleNamespace)
    assert set(ops.__all__) == set(jax_ops.__all__)
    assert ops.attention is jax_ops.attention
    x = np.ones((2, 3, 4), np.float32)
    np.testing.assert_array_equal(
        ops.rms_norm(x, epsilon=1e-5, accumulate="float32"),
        jax_ops.rms_norm(jnp.asarray(x), epsilon=1e-5, accumulate="float32"),
    )


@pytest.mark.parametrize("norm", [ml.LayerNorm, ml.RMSNorm])
@pytest.mark.parametrize("platforms", [None, ["tpu"], ["cpu", "tpu"]])
def test_a_model_for_tpus_is_exported(norm: Any, platforms: Any, tmp_path: Path) -> None:
    """Of many positions: their layout is for the compiler that runs, and no part of the file."""
    model = ml.Model()
    model |= norm()(input="x", output="normed")
    model |= ml.Linear(8)(input="normed", output="y")
    model.expose("y")
    compiled = ml.compile(model, ml.JaxBackend(platform="tpu"), shapes={"x": [2, 256, 16]})
    ml.export(compiled, tmp_path / "model.jax", platforms=platforms)
    assert (tmp_path / "model.jax").stat().st_size > 1000


def test_a_norm_for_tpus_of_an_array_of_numpy_has_a_gradient() -> None:
    """Without jit, JAX traces a gradient with what is not on a device yet."""
    ops = on_tpu(jax_ops)
    x = np.random.default_rng(0).normal(size=(2, 130, 16)).astype(np.float32)
    options = {"epsilon": 1e-5, "accumulate": "float32"}
    found, wanted = (
        jax.grad(lambda x, form=form: (form.rms_norm(x, **options) ** 3).sum())(x) for form in (ops, jax_ops)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ({"data": 4, "model": 1}, True),
        ({"pipeline": 2, "data": 2, "model": 1}, True),
        ({"data": 2, "fsdp": 2, "model": 1}, True),
        ({"data": 2, "model": 2}, False),
        ({"data": 2, "expert": 2, "model": 1}, False),
        ({"data": 2, "context": 2, "model": 1}, False),
    ],
)
def test_norms_give_an_order_only_where_a_mesh_divides_nothing_but_rows(
    sizes: dict[str, int], given: bool
) -> None:
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    backend: Any = SimpleNamespace(
        platform="tpu", knows_platform=True, rules=AxisRules(), mesh=mesh, policy=ml.Precision()
    )
    ops = choose_forms(jax_ops, backend, mesh)
    traced = jax.make_jaxpr(lambda x: ops.rms_norm(x, epsilon=1e-5, accumulate="float32"))(
        jnp.ones((4, 256, 16))
    )
    assert ("layout_constraint" in str(traced)) == given


FEATURES_CUT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from capibara.compose.backends import jax_ops
from capibara.compose.backends.jax_parts import on_parts
from capibara.compose.backends.jax_tpu import on_tpu
from capibara.config.axes import AxisRules

random = np.random.default_rng(0)
x, cos, sin = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((2, 256, 4, 64), (256, 32), (256, 32)))
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rules = AxisRules(activations={**AxisRules().activations, "head_dim": ("model",), "heads": ()})
ops = on_parts(on_tpu(jax_ops), mesh, rules, tpu=True)
found = jax.jit(lambda x: ops.rotate(x, cos, sin))(x)
print("RESULT" + json.dumps(float(jnp.abs(found - jax_ops.rotate(x, cos, sin)).max())))
"""


def test_features_that_are_cut_are_turned_whole() -> None:
    """The other half of a pair may be on another device."""
    assert run_apart(FEATURES_CUT, XLA_FLAGS=emulated(4)) < 1e-5


STARTS = """
import json
import numpy as np
from capibara import compose as ml
from capibara.jax_versions import backends_started

model = ml.Model()
model |= ml.LayerNorm()(input="x", output="normed")
model |= ml.Linear(8)(input="normed", output="y")
model.expose("y")
compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [2, 8, 16]})
before = backends_started()
params = compiled.randomize_params(0)
y = compiled.evaluate(params, {"x": np.zeros((2, 8, 16), "float32")})["y"]
print("RESULT" + json.dumps([before, backends_started(), list(y.shape)]))
"""


def test_compiling_a_model_starts_no_devices() -> None:
    """``jax.distributed.initialize`` has to come before that, and may come after a model was compiled."""
    assert run_apart(STARTS) == [False, True, [2, 8, 8]]


def products(ops: Any, name: str, dtype: Any) -> set[tuple[str, ...]]:
    """The dtypes of operands and results of a product's and its gradient's programs."""
    arrays = [jnp.ones(shape, dtype) for shape in CASES[name]]

    def loss(*arrays: jax.Array) -> jax.Array:
        return getattr(ops, name)(*arrays, accumulate="float32").astype(jnp.float32).sum()

    found = set()
    for equation in jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays).jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.add(tuple(str(each.aval.dtype) for each in (*equation.invars, *equation.outvars)))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [on_tpu, lambda ops: ops], ids=["tpu", "cpu"])
@pytest.mark.parametrize("name", ["dense", "project", "merge"])
def test_products_of_half_width_have_such_gradients(name: str, form: Any, dtype: str) -> None:
    ops = form(jax_ops)
    assert products(returning_half_width(ops), name, dtype) == {(dtype,) * 3}
    assert "float32" in {each for found in products(ops, name, dtype) for each in found}
    assert products(returning_half_width(ops), name, "float32") == products(ops, name, "float32")


@pytest.mark.parametrize(
    ("platform", "exchange", "devices", "half"),
    [
        ("gpu", "accumulate", 1, True),
        ("cuda", "accumulate", 1, True),
        ("gpu", "accumulate", 4, False),
        ("gpu", "compute", 4, True),
        ("tpu", "accumulate", 1, False),
        ("tpu", "compute", 4, True),
        ("cpu", "accumulate", 1, False),
        ("cpu", "compute", 4, True),
    ],
)
def test_where_products_return_half_width(platform: str, exchange: str, devices: int, half: bool) -> None:
    """Where nothing is exchanged the results are the same, and GPUs multiply such gradients faster."""
    mesh = None if devices == 1 else jax.sharding.AbstractMesh((devices,), ("data",))
    policy = ml.Precision("float32", "bfloat16", "float32", exchange)
    backend = ml.JaxBackend(policy=policy, device_mesh=mesh, platform=platform)
    found = products(choose_forms(jax_ops, backend, mesh), "dense", "bfloat16")
    assert (found == {("bfloat16",) * 3}) == half


def test_an_exchange_that_there_is_not() -> None:
    with pytest.raises(ml.CompileError, match=r"exchange='computer' is not one of .*Did you mean 'compute'"):
        ml.Precision(exchange="computer")
