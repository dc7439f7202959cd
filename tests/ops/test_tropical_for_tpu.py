"""The TPU kernel of max-plus products: interpreted against NumPy's definition, and compiled for TPUs."""

# NumPy arrays go in where the signatures say jax.Array.
# pyright: reportArgumentType=false

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all
from tropical_oracle import oracle

from capibara.ops import NoImplementationError, explain, tropical
from capibara.ops.tropical import pallas_tpu

KERNEL = partial(tropical.matmul, implementation="pallas_tpu")
# Less than a block, several of each axis, and a batch that broadcasts.
SHAPES = {
    "one block": ((9, 5), (5, 40)),
    "rows": ((265, 30), (30, 33)),
    "depth": ((8, 1040), (1040, 130)),
    "columns": ((17, 140), (140, 1100)),
    "batch": ((3, 1, 16, 20), (2, 20, 64)),
}


def draw(shapes: Any, wild: float = 0.0, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    out = []
    for shape in shapes:
        x = rng.integers(-8, 8, size=shape).astype("float32")  # small integers: many ties
        for what, share in ((-np.inf, wild), (np.inf, wild), (np.nan, wild / 8)):
            x[rng.random(shape) < share] = what
        out.append(x)
    return out


# The largest ones are slow.
@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("shape", "semiring", "wild"),
    [
        *(
            pytest.param(
                shape, "max_plus", 0.01, marks=[pytest.mark.slow] * (shape in ("one block", "depth"))
            )
            for shape in SHAPES
        ),
        ("rows", "min_plus", 0.0),
        pytest.param("batch", "min_plus", 0.0, marks=pytest.mark.slow),
    ],
)
def test_interpreted_values_and_indices_are_the_definition_s(shape, semiring, wild):
    a, b = draw(SHAPES[shape], wild)
    value, index = oracle(a, b, semiring)
    np.testing.assert_array_equal(KERNEL(a, b, semiring=semiring), value)
    got, at = KERNEL(a, b, semiring=semiring, return_argmax=True)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(at, index)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(8, 70), inner=st.integers(1, 140), columns=st.integers(32, 200), seed=st.integers(0, 99)
)
def test_any_sizes(rows, inner, columns, seed):
    a, b = draw([(rows, inner), (inner, columns)], seed=seed)
    got, at = KERNEL(a, b, return_argmax=True)
    value, index = oracle(a, b)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(at, index)


@pytest.mark.slow
def test_gradient_vmap_bfloat16_and_what_it_refuses():
    a, b = draw([(9, 20), (20, 40)])

    def loss(implementation: str, a: Any, b: Any) -> jax.Array:
        return jnp.sum(jnp.sin(tropical.matmul(a, b, implementation=implementation)))

    for got, want in zip(
        *(jax.grad(partial(loss, name), (0, 1))(a, b) for name in ("pallas_tpu", "reference")), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    several = jax.vmap(KERNEL, (0, None))(np.stack([a, a + 1]), b)
    np.testing.assert_array_equal(several[1], oracle(a + 1, b)[0])
    narrow = KERNEL(device_array(a, jnp.bfloat16), device_array(b, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), oracle(a, b)[0])
    assert explain(tropical.matmul, a, b, platform="tpu").chosen == "pallas_tpu"
    for left, right, why in (
        (a[:7], b, "at least 8 rows"),
        (a, b[:, :31], "32 columns"),
    ):
        with pytest.raises(NoImplementationError, match=why):
            KERNEL(left, right)
        assert explain(tropical.matmul, left, right, platform="tpu").chosen == "xla"
    # Of nothing nothing is computed, whoever is asked.
    assert explain(tropical.matmul, a[:, :0], b[:0], platform="tpu").chosen == "xla"
    np.testing.assert_array_equal(KERNEL(a[:, :0], b[:0]), np.full((9, 40), -np.inf, np.float32))


@pytest.mark.parametrize("length", [8, 130, 1000, 1024, 1025, 5000])
def test_blocks_cover_and_fit(length):
    size = pallas_tpu.blocks(length, length, length)
    for block, unit in ((size.rows, size.strip), (size.inner, 128), (size.columns, 128)):
        assert block % unit == 0
        number = -(-length // block)
        assert number * block - length < number * unit  # less than a unit is padded in each block
    # Two copies of each operand's block, and of those of the value and the index.
    held = size.rows * size.inner + size.inner * size.columns + 2 * size.rows * size.columns
    assert 2 * 4 * held < 12 << 20
    assert size.strip * size.columns <= 32 * 1024  # of 64 registers of 1024 numbers, those of value and index


def test_in_the_tpu_interpreter_nothing_is_read_that_was_not_written(capfd):
    a, b = draw([(20, 140), (140, 150)])
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=1)
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(params):
        got = jax.block_until_ready(KERNEL(a, b))
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_array_equal(got, oracle(a, b)[0])


SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from capibara.ops import explain, tropical

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
devices = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices
one = SingleDeviceSharding(devices[0])
out = {}


def measure(name, rows, inner, columns, sharding=one, **options):
    given = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in ((rows, inner), (inner, columns))]
    compiled = jax.jit(lambda a, b: tropical.matmul(a, b, **options)).lower(*given).compile()
    memory = compiled.memory_analysis()
    out[name] = {
        "explain": explain(tropical.matmul, *given, platform="tpu").chosen,
        "kernel": "capibara_max_plus" in compiled.as_text(),
        "temp": memory.temp_size_in_bytes, "terms": 4 * rows * inner * columns,
    }


measure("square", 1024, 1024, 1024)
measure("index", 1024, 1024, 1024, return_argmax=True)
few or measure("odd", 1001, 77, 513)
measure("long", 8, 65536, 128)
with jax.enable_x64(True):
    few or measure("64 bits", 256, 256, 256)
    measure("64 bits, index", 256, 256, 256, return_argmax=True)
measure("vector", 1024, 1024, 1)
if kind.startswith("v5e"):
    mesh = Mesh(np.array(devices).reshape(4), "x")
    measure("mesh", 1024, 1024, 1024, NamedSharding(mesh, P("x")))
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.parametrize("kind", few_or_all("v4"))
def test_compiled_for_tpus_it_keeps_no_array_of_terms(kind):
    found = ask(SCRIPT, *kind.split())
    vector = found.pop("vector")
    assert (vector["explain"], vector["kernel"]) == ("xla", False)
    if (mesh := found.pop("mesh", None)) is not None:  # XLA cannot split a kernel: its own form runs
        assert not mesh["kernel"]
    for name, each in found.items():
        assert (each["explain"], each["kernel"]) == ("pallas_tpu", True), name
        # The operands without infinities, padded, and those of a product of zeros and ones.
        assert each["temp"] <= each["terms"] / 3, (name, each)
