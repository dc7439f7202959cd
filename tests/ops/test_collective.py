"""Collectives: on one device, on emulated meshes (processes of their own), and in programs compiled for TPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from emulation import emulated
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from tpu_compiler import environment, needs_libtpu

from capibara.ops import NoImplementationError, OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.collective import (
    all_gather_matmul,
    all_to_all,
    async_all_reduce,
    matmul_reduce_scatter,
    optimized_all_gather,
    reduce_scatter,
    zero_residual,
)
from capibara.ops.collective.quantise import decode, encode, message_size
from capibara.ops.collective.specs import MOVES, REDUCES, MoveSpec, ReduceSpec, gradients
from capibara.ops.tagged import tagged

CHECKS = Path(__file__).with_name("emulated_collectives.py")


def _any(x: Any) -> Any:
    """An argument of a type that the signature forbids."""
    return x


def _run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("rows", "columns", "checks"),
    [
        (1, 2, ["all_reduce", "compression", "gradients", "movement", "placed"]),
        (2, 2, ["conventions"]),
        pytest.param(4, 8, ["products"], marks=pytest.mark.slow),
        pytest.param(1, 2, ["dtypes", "products"], marks=pytest.mark.slow),
        pytest.param(4, 8, ["all_reduce", "dtypes", "compression", "gradients"], marks=pytest.mark.slow),
        pytest.param(4, 8, ["movement", "placed"], marks=pytest.mark.slow),
    ],
)
def test_on_emulated_devices(rows: int, columns: int, checks: list[str]):
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(rows * columns)}
    out = _run([sys.executable, str(CHECKS), str(rows), str(columns), *checks], environ)
    assert [line.split()[0] for line in out.splitlines()] == checks


FOR_TPU = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.ops import collective
from capibara.ops.collective.specs import MOVES, PRODUCTS, REDUCES
from capibara.ops.tagged import tagged

(move,), (product,), (layer,) = (tagged(specs, "large") for specs in (MOVES, PRODUCTS, REDUCES))
devices = topologies.get_topology_desc(
    platform="tpu", topology_name="v4:2x2x2", chip_config_name="megacore"
).devices
mesh = Mesh(np.array(devices), ("data",))

def program(function, *shapes, out=P("data")):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=out)
    laid = NamedSharding(mesh, P("data"))
    # Each shape is one device's.
    given = [jax.ShapeDtypeStruct((8 * s[0], *s[1:]), jnp.float32, sharding=laid) for s in shapes]
    return jax.jit(mapped).lower(*given).compile().as_text()

def count(text, kind):
    return len(re.findall(r" %s\\(" % kind, text))

def operands(text, kind):
    return set(re.findall(r"= \\(?([a-z]+[0-9]+)\\[[^=]*? %s\\(" % kind, text))

ring = program(lambda x: collective.optimized_all_gather(x, move.axis, True), move.part)
assert count(ring, "collective-permute-start") == count(ring, "collective-permute-done") == 7, ring
assert count(ring, "all-gather") == count(ring, "all-gather-start") == 0

text = program(collective.all_gather_matmul, product.x(), product.weight())
assert count(text, "collective-permute-start") == 7
# In the schedule, products stand between the start of a transfer and its end.
lines = text[text.index("ENTRY"):].splitlines()
started, between = 0, 0
for line in lines:
    started += " collective-permute-start(" in line
    started -= " collective-permute-done(" in line
    between += bool(started and re.search(r" (fusion|convolution|dot)\\(", line))
assert between >= 3, text

text = program(collective.matmul_reduce_scatter, product.x(8), product.weight())
assert count(text, "collective-permute-start") == 7

text = program(
    lambda x: collective.async_all_reduce(x, "mean", layer.compressed, True), layer.shapes["w"], out=P()
)
assert count(text, "collective-permute-start") == 7
assert operands(text, "collective-permute-start") == {"s8"}, operands(text, "collective-permute-start")
assert operands(text, "all-gather") | operands(text, "all-gather-start") == {"s8"}
assert count(text, "all-reduce") == count(text, "all-reduce-start") == 0
print("compiled")
"""


@pytest.mark.slow
@needs_libtpu
def test_rings_are_asynchronous_on_tpu_v4():
    assert "compiled" in _run([sys.executable, "-c", FOR_TPU], environment())


@pytest.mark.parametrize("spec", tagged(REDUCES, "small"), ids=lambda s: f"{s.name} {s.compressed}")
def test_one_device_has_nothing_to_do(spec: ReduceSpec):
    numbers = gradients(spec, 1, np.random.default_rng(0))
    tree = {name: device_array(x[0]) for name, x in numbers.items()}
    every: list[dict[str, Any]] = [
        {},
        {"use_compression": True},
        {"reduction_op": "sum", "overlap_compute": False},
    ]
    for options in every:
        for got, want in zip(
            jax.tree.leaves(async_all_reduce(tree, **options)), jax.tree.leaves(tree), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    _, left = async_all_reduce(tree, use_compression=True, residual=zero_residual(tree))
    assert jax.tree.structure(left) == jax.tree.structure(tree)
    assert async_all_reduce({}) == {}


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_compute": False},
        {"overlap_compute": True},
        {"implementation": "reference"},
        {"use_compression": True},
    ],
)
def test_arrays_without_elements_are_not_sent(op: str, options: dict[str, Any]):
    if op == "max" and "use_compression" in options:
        pytest.skip("sums are compressed")
    tree = {"w": jnp.ones((3, 5)), "none": jnp.ones((0, 2))}
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = PartitionSpec("data")

    def gradient(tree: Any) -> Any:
        out, pull = jax.vjp(partial(async_all_reduce, reduction_op=op, axis_name="model", **options), tree)
        return out, pull(out)

    for check in (True, False):
        run = jax.shard_map(gradient, mesh=mesh, in_specs=split, out_specs=(split, split), check_vma=check)
        whole = {k: jax.ShapeDtypeStruct((2 * len(x), *x.shape[1:]), x.dtype) for k, x in tree.items()}
        program = jax.make_jaxpr(run)(whole)
        sent = re.findall(r" = (?:psum|all_gather|all_to_all|ppermute|reduce_scatter)\w*\[", str(program))
        nothing = re.findall(
            r"\[0,2\]\S* = (psum|all_gather|all_to_all|ppermute|reduce_scatter)", str(program)
        )
        assert sent
        assert nothing == []
        out, (back,) = jax.eval_shape(run, whole)
        assert {k: x.shape for k, x in out.items()} == {k: x.shape for k, x in whole.items()}
        assert {k: x.shape for k, x in back.items()} == {k: x.shape for k, x in whole.items()}


@pytest.mark.parametrize("spec", tagged(MOVES, "small"), ids=lambda s: s.name)
def test_one_device_has_all(spec: MoveSpec):
    x = device_array(np.random.default_rng(0).normal(size=spec.part))
    for ring in (False, True):
        np.testing.assert_array_equal(optimized_all_gather(x, spec.axis, ring), x)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_blocks_are_rounded_to_their_own_scale(kind: str):
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(kind)
    x[1, :32] *= np.asarray(1e-3, kind)
    x[2] = 0
    message = encode(device_array(x), 32)
    assert message.dtype == jnp.int8
    assert message.shape == (3, message_size(64, 32))
    got = np.asarray(decode(message, 32, jnp.dtype(jnp.float32)))
    bound = np.abs(x.reshape(3, 2, 32)).max(-1, keepdims=True).astype("float32") / 254 * 1.02
    assert (np.abs(got - x).reshape(3, 2, 32) <= bound).all()
    assert (got[2] == 0).all()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: async_all_reduce(x, "avg"), OpValueError, "reduction_op must be one of sum, mean"),
        (lambda x: async_all_reduce(x, _any(3)), OpTypeError, "reduction_op must be a string"),
        (lambda x: async_all_reduce(x, use_compression=_any(1)), OpTypeError, "use_compression must be True"),
        (lambda x: async_all_reduce(x, "max", True), OpValueError, "takes reduction_op 'sum' or 'mean'"),
        (lambda x: async_all_reduce({"a": 1.0}), OpTypeError, r"gradients\['a'\] must be an array"),
        (
            lambda x: async_all_reduce([x > 0]),
            OpTypeError,
            r"gradients\[0\] must be floating point or integer",
        ),
        (lambda x: async_all_reduce(x, residual=x), OpValueError, "use_compression is False"),
        (lambda x: async_all_reduce(x, "sum", True, residual=[x]), OpTypeError, "must have the tree"),
        (
            lambda x: async_all_reduce(x, "sum", True, residual=x[:1]),
            OpShapeError,
            "residual must have the shape",
        ),
        (lambda x: async_all_reduce(x, block_size=0), OpValueError, "block_size must be at least 1"),
        (lambda x: async_all_reduce(x, axis_name=_any(3)), OpTypeError, "axis_name must be a mesh axis name"),
        (lambda x: async_all_reduce(x, axis_name=("a", "a")), OpValueError, "each once"),
        (lambda x: async_all_reduce(x, implementation="rings"), OpValueError, "there is no implementation"),
        (
            lambda x: async_all_reduce(x, implementation="int8"),
            NoImplementationError,
            "use_compression=False",
        ),
        (lambda x: jax.jit(async_all_reduce)(x), OpValueError, "not known while tracing"),
        (lambda x: optimized_all_gather(x, 2), OpShapeError, "axis must be a dimension of x"),
        (
            lambda x: optimized_all_gather(x, 0, _any("ring")),
            OpTypeError,
            "use_ring_algorithm must be True or False",
        ),
        (lambda x: optimized_all_gather(_any([1.0])), OpTypeError, "x must be an array"),
        (lambda x: reduce_scatter(x, 0), OpValueError, "none is bound here"),
        (lambda x: reduce_scatter(x, 0, "avg"), OpValueError, "reduction_op must be one of"),
        (lambda x: all_to_all(x, axis_name="data"), OpValueError, "no axis 'data' is bound here"),
        (lambda x: all_gather_matmul(x, x), OpShapeError, r"expected x \[\.\.\., rows, inner\]"),
        (lambda x: matmul_reduce_scatter(x, x.T), OpValueError, "none is bound here"),
        (lambda x: all_gather_matmul(x, jnp.arange(6).reshape(3, 2)), OpTypeError, "weight must be floating"),
        (
            lambda x: all_gather_matmul(x, x.T, precision="higest"),
            OpValueError,
            "all_gather_matmul: precision must be 'default', .* got 'higest'. Did you mean 'highest'?",
        ),
        (
            lambda x: matmul_reduce_scatter(x, x.T, precision=3),
            OpTypeError,
            "matmul_reduce_scatter: precision must be .* got 3",
        ),
        (
            lambda x: matmul_reduce_scatter(x, x.T, precision=("high", "low")),
            OpValueError,
            "precision must be",
        ),
        # A precision that there is gets past the check of it.
        (lambda x: all_gather_matmul(x, x.T, precision="highest"), OpValueError, "none is bound here"),
        (lambda x: all_gather_matmul(x, x.T, precision="TF32_TF32_F32"), OpValueError, "none is bound here"),
        (
            lambda x: matmul_reduce_scatter(x, x.T, precision=(jax.lax.Precision.HIGH,) * 2),
            OpValueError,
            "none is bound here",
        ),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        call(jnp.ones((2, 3)))


@pytest.mark.parametrize("spec", REDUCES, ids=lambda s: f"{s.name} {s.compressed}")
def test_explain_names_the_algorithm(spec: ReduceSpec):
    tree = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if name in spec.integers else jnp.float32)
        for name, shape in spec.shapes.items()
    }
    for platform in ("cpu", "tpu", "cuda"):
        answer = explain(async_all_reduce, tree, use_compression=spec.compressed, platform=platform)
        assert answer.chosen == ("int8" if spec.compressed else "ring")
        if spec.compressed:
            assert answer.reasons["xla"] == "int8 comes before it"
        assert (
            explain(async_all_reduce, tree, "max", overlap_compute=False, platform=platform).chosen == "xla"
        )


def test_the_documented_calls():
    from capibara.jax.tpu_v4.backend import TpuV4CollectiveOps

    gradients = {"w": jnp.arange(4.0)}
    local_activations = jnp.ones((2, 3))
    collective_ops = TpuV4CollectiveOps()
    reduced_gradients = collective_ops.async_all_reduce(
        gradients, reduction_op="mean", use_compression=True, overlap_compute=True
    )
    gathered_activations = collective_ops.optimized_all_gather(
        local_activations, axis=0, use_ring_algorithm=True
    )
    np.testing.assert_array_equal(reduced_gradients["w"], gradients["w"])
    np.testing.assert_array_equal(gathered_activations, local_activations)
