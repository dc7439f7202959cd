"""The TPU kernel of products with a matrix in codes: interpreted against NumPy in float64, and compiled for TPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax.experimental.pallas import tpu as pltpu
from quantised_oracle import KINDS, quantised_case
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

from capibara.ops import NoImplementationError, explain
from capibara.ops.linalg import quantised_matmul
from capibara.ops.linalg.specs import QuantisedSpec

KERNEL = partial(quantised_matmul, implementation="pallas_tpu")
SPECS = (
    QuantisedSpec("one group in the columns", (3,), 512, 128, 256),
    QuantisedSpec("several", (2, 5), 256, 384, 32),
    QuantisedSpec("a group of several columns", (), 1024, 128, 512),
    QuantisedSpec("a row is a group", (9,), 768, 256, 768),
)
# Above 128 vectors, counted once for each group in the columns, tiles of the matrix are made into numbers.
MANY = (
    QuantisedSpec("many", (130,), 512, 128, 256),
    QuantisedSpec("many, several groups", (2, 70), 256, 384, 32),
    QuantisedSpec("two blocks of vectors", (520,), 1024, 128, 512),
)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        pytest.param(
            kind,
            spec,
            id=f"{spec.name}-{kind}",
            # The kinds differ in how codes become numbers, and sizes in the rest.
            marks=[] if kind == "table" or spec in (SPECS[0], MANY[0]) else pytest.mark.slow,
        )
        for spec in (*SPECS, *MANY)
        for kind in KINDS
    ],
)
def test_interpreted_against_numpy(kind, spec):
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    out = KERNEL(x, codes, scales, levels, group=spec.group)
    expected = x.astype(np.float64) @ weight.T
    assert out.shape == expected.shape
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(weight).max() * spec.inner**0.5)
    narrow = KERNEL(device_array(x, jnp.bfloat16), codes, scales, levels, group=spec.group)
    assert narrow.dtype == jnp.bfloat16
    rounded = np.asarray(device_array(x, jnp.bfloat16), np.float64) @ weight.T
    np.testing.assert_allclose(np.asarray(narrow, np.float64), rounded, atol=2e-2 * np.abs(rounded).max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_reference(kind):
    spec = SPECS[1]
    x, codes, scales, levels, _ = quantised_case(kind, spec)

    def loss(implementation: str, x: Any, scales: Any, levels: Any) -> jax.Array:
        out = quantised_matmul(x, codes, scales, levels, group=spec.group, implementation=implementation)
        return jnp.sum(jnp.sin(out / spec.inner))

    places = (0, 1) if levels is None else (0, 1, 2)
    got, want = (
        jax.jit(jax.grad(partial(loss, name), places))(x, scales, levels)
        for name in ("pallas_tpu", "reference")
    )
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("implementation", ["auto", "pallas_tpu"])
def test_forward_mode_is_that_of_the_reference(implementation):
    spec = SPECS[0]
    x, codes, scales, _, _ = quantised_case("int8", spec)

    def product(implementation: str, x: Any, scales: Any) -> jax.Array:
        return quantised_matmul(x, codes, scales, group=spec.group, implementation=implementation)

    given = (x, scales), (x[::-1].copy(), scales * 0.5)
    got, want = (jax.jvp(partial(product, name), *given) for name in (implementation, "reference"))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_vmap_not_a_number_and_what_it_refuses():
    spec = SPECS[1]
    x, codes, scales, levels, weight = quantised_case("int8", spec)
    several = jax.vmap(lambda x: KERNEL(x, codes, scales, group=spec.group))(np.stack([x, 2 * x]))
    np.testing.assert_allclose(several[1], 2 * (x.astype(np.float64) @ weight.T), rtol=1e-3, atol=1e-2)
    # Infinity in one group of a vector stays in that vector, and has the sign that it should.
    wild = x.copy()
    wild[1, 2, 40] = np.inf
    wild[0, 0, 3] = np.nan
    got, want = (
        quantised_matmul(wild, codes, scales, group=spec.group, implementation=name)
        for name in ("pallas_tpu", "reference")
    )
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.sign(got[1, 2]), np.sign(want[1, 2]))
    assert (
        explain(quantised_matmul, x, codes, scales, levels, group=32, platform="tpu").chosen == "pallas_tpu"
    )
    wide = np.ones((384, 512), np.float32)
    for change, group, why in (
        ((x.astype(np.float16), codes, scales), 32, "float32 or bfloat16"),
        ((x[..., :250], codes[:, :250], scales), 32, "multiple of 128 numbers"),
        ((x, codes[:100], scales[:100]), 32, "multiple of 128 of them"),
        ((x, codes, np.ones((384, 6), np.float32)), 48, "groups that divide"),
        ((wide[:, :384], wide.astype(np.int8)[:, :384], wide[:, :2]), 256, "whole groups"),
    ):
        with pytest.raises(NoImplementationError, match=why):
            KERNEL(*change, group=group)
        assert explain(quantised_matmul, *change, group=group, platform="tpu").chosen == "xla"


def test_scales_that_do_not_fit_beside_a_tile_are_left_to_xla():
    vectors, codes = (
        jax.ShapeDtypeStruct((512, 32768), jnp.float32),
        jax.ShapeDtypeStruct((128, 32768), jnp.int8),
    )
    scales = jax.ShapeDtypeStruct((128, 16384), jnp.float32)
    found = explain(quantised_matmul, vectors, codes, scales, group=2, platform="tpu")
    assert found.chosen == "xla"
    assert "16384 for each do not fit" in found.reasons["pallas_tpu"]


@pytest.mark.parametrize("spec", [SPECS[1], MANY[0]], ids=lambda s: s.name)
def test_in_the_tpu_interpreter_nothing_is_read_that_was_not_written(spec, capfd):
    x, codes, scales, levels, weight = quantised_case("table", spec)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=1)
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(params):
        got = jax.block_until_ready(KERNEL(x, codes, scales, levels, group=spec.group))
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in capfd.readouterr().out
    expected = x.astype(np.float64) @ weight.T
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(weight).max() * spec.inner**0.5)


SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.linalg import quantised_matmul

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
one = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0])
out = {}


def measure(name, vectors, rows, inner, group, bits, dtype, table=False):
    def shape(s, d):
        return jax.ShapeDtypeStruct(s, d, sharding=one)

    codes = shape((rows, inner), jnp.int8) if bits == 8 else shape((rows, inner // 2), jnp.uint8)
    given = [shape((vectors, inner), dtype), codes, shape((rows, inner // group), jnp.float32)]
    given += [shape((16,), jnp.float32)] * table
    compiled = jax.jit(lambda *a: quantised_matmul(*a, group=group)).lower(*given).compile()
    out[name] = {
        "explain": explain(quantised_matmul, *given, group=group, platform="tpu").chosen,
        "kernel": "capibara_quantised_matmul" in compiled.as_text(),
        "temp": compiled.memory_analysis().temp_size_in_bytes, "numbers": rows * inner * dtype.dtype.itemsize,
        # The compiler may lay scales out anew, which counts where groups are tiny.
        "others": 4 * vectors * rows + 4 * rows * (inner // group),
    }


for dtype in (jnp.bfloat16, jnp.float32)[: 1 if few else 2]:
    name = dtype.dtype.name
    measure(name + " int8", 8, 4096, 4096, 128, 8, dtype)
    measure(name + " int8, small groups", 16, 4096, 4096, 32, 8, dtype)
    measure(name + " int4", 1, 11008, 4096, 64, 4, dtype)
    measure(name + " levels", 8, 4096, 4096, 64, 4, dtype, True)
    measure(name + " many", 256, 4096, 1024, 128, 8, dtype)
    measure(name + " many, levels", 512, 4096, 1024, 64, 4, dtype, True)
measure("many, with many groups", 512, 4096, 8192, 2, 4, jnp.float32)
measure("wide", 8, 4096, 28672, 512, 8, jnp.bfloat16)
measure("a prompt", 2048, 4096, 4096, 128, 8, jnp.bfloat16)
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.parametrize("kind", few_or_all("v4"))
def test_compiled_for_tpus_the_numbers_are_nowhere(kind):
    found = ask(SCRIPT, *kind.split())
    for name, each in found.items():
        assert (each["explain"], each["kernel"]) == ("pallas_tpu", True), name
        assert each["temp"] <= each["numbers"] / 4 + each["others"], (name, each)
