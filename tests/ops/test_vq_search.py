"""nearest_code's implementations against distances in NumPy: sizes, types, angles, what is not finite, meshes."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from emulation import emulated

from capibara.ops import OpTypeError, OpValueError, explain
from capibara.ops.tagged import tagged
from capibara.ops.vq import nearest_code
from capibara.ops.vq.specs import SPECS

FAST: Any = {"xla_backend_optimization_level": 0}
NAMES = ("cpu", "xla", "reference")


def distances(x, codebook, metric="euclidean"):
    """The definition, in float64, code by code."""
    x, codebook = np.asarray(x, np.float64), np.asarray(codebook, np.float64)
    rows = []
    for code in codebook:
        if metric == "euclidean":
            rows.append(np.sum((x - code) ** 2, -1))
            continue
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(code)
        rows.append(1 - np.where(lengths == 0, 0, x @ code / np.where(lengths == 0, 1, lengths)))
    return np.stack(rows, -1)


def draw(spec, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape) for shape in spec.shapes())


@pytest.mark.thin(3)
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("spec", tagged(SPECS, "small"), ids=lambda s: s.name)
def test_every_implementation_is_the_definition(spec, metric):
    x, codebook = draw(spec)
    want = distances(x, codebook, metric)

    def every(x, codebook):
        search = partial(nearest_code, metric=metric, return_distance=True)
        return [search(x, codebook, implementation=name) for name in NAMES]

    with jax.enable_x64(True):
        found = jax.jit(every, compiler_options=FAST)(x, codebook)
    for index, distance in found:
        assert index.dtype == np.int32
        assert distance.dtype == np.float64
        if metric == "cosine" and spec.dim == 1:  # all codes of a sign are alike but for rounding
            picked = np.take_along_axis(want, np.asarray(index)[..., None], -1)[..., 0]
            np.testing.assert_allclose(picked, want.min(-1), atol=1e-12)
        else:
            np.testing.assert_array_equal(index, np.argmin(want, -1))
        np.testing.assert_allclose(distance, want.min(-1, initial=np.inf), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_types_are_compared_wide(dtype):
    rng = np.random.default_rng(0)
    x, codebook = (device_array(rng.normal(size=s), dtype) for s in ((200, 16), (64, 16)))
    want = distances(x, codebook)
    for name in NAMES:
        index, distance = nearest_code(x, codebook, return_distance=True, implementation=name)
        assert distance.dtype == jnp.float32
        picked = np.take_along_axis(want, np.asarray(index)[:, None], -1)[:, 0]
        np.testing.assert_allclose(picked, want.min(-1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(distance, picked, rtol=1e-5)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite(name, metric):
    rng = np.random.default_rng(0)
    x, codebook = (rng.normal(size=s).astype(np.float32) for s in ((40, 5), (13, 5)))
    search = jax.jit(partial(nearest_code, metric=metric, implementation=name), compiler_options=FAST)
    plain = np.asarray(search(x, codebook))
    assert len(set(plain)) > 5

    wild = codebook.copy()
    wild[0, 2], wild[4, 1] = np.inf, -np.inf
    kept = np.delete(np.arange(13), [0, 4])
    np.testing.assert_array_equal(search(x, wild), kept[distances(x, codebook[kept], metric).argmin(-1)])
    np.testing.assert_array_equal(search(x, np.full_like(codebook, np.inf)), 0)

    wild = x.copy()
    wild[3, 0], wild[5, 1], wild[7], wild[9, 2] = np.nan, np.inf, -np.inf, 3e38
    got = np.asarray(search(wild, codebook))
    assert (got[[3, 5, 7]] == 0).all()
    if metric == "euclidean":  # its square overflows: infinitely far from all
        assert got[9] == 0
    else:
        assert got[9] == distances(wild[9:10], codebook, metric).argmin()
    rest = np.delete(np.arange(40), [3, 5, 7, 9])
    np.testing.assert_array_equal(got[rest], plain[rest])

    nan = codebook.copy()
    nan[8, 0], nan[11, 1] = np.nan, np.nan
    got = np.asarray(search(wild, nan))  # NaN counts as the least, as in jnp.argmin
    assert got[3] == 0
    assert (np.delete(got, 3) == 8).all()


def test_zeros_and_scales_for_the_angle():
    codebook = np.array([[0, 0], [1, 0], [0, -1e-30], [1e30, 1e30]], np.float32)
    x = np.array([[0, 0], [5, 0.1], [0.1, -3], [1, 1], [1e-30, 1e-30]], np.float32)
    for name in NAMES:
        index, distance = nearest_code(
            x, codebook, metric="cosine", return_distance=True, implementation=name
        )
        np.testing.assert_array_equal(index, [0, 1, 2, 3, 3])
        assert distance[0] == 1
    slopes = jax.grad(lambda x: jnp.sum(nearest_code(x, codebook, metric="cosine", return_distance=True)[1]))(
        x
    )
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_distance_has_gradients_and_the_index_none(metric):
    rng = np.random.default_rng(0)
    x, codebook = (rng.normal(size=s) for s in ((9, 4), (5, 4)))

    def plain(x, codebook):
        if metric == "euclidean":
            return jnp.sum((x[:, None] - codebook) ** 2, -1).min(-1).sum()
        unit = [v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (x, codebook)]
        return (1 - unit[0] @ unit[1].T).min(-1).sum()

    with jax.enable_x64(True):
        got = jax.grad(lambda *a: nearest_code(*a, metric=metric, return_distance=True)[1].sum(), (0, 1))(
            x, codebook
        )
        want = jax.grad(plain, (0, 1))(x, codebook)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_memory_stays_a_tenth_of_the_table():
    for spec in tagged(SPECS, "large"):
        given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in spec.shapes()]
        for name in ("cpu", "xla"):
            program = jax.jit(partial(nearest_code, implementation=name), compiler_options=FAST)
            analysis = program.lower(*given).compile().memory_analysis()
            assert analysis is not None
            table = 4 * spec.tokens * spec.codes
            # Beside the blocks there may be a copy of the vectors, padded or turned.
            assert analysis.temp_size_in_bytes <= max(table / 10, 4 * spec.tokens * spec.dim + (32 << 20))
            if spec.name == "large":
                assert analysis.temp_size_in_bytes <= table / 10


def test_explain_is_what_is_lowered():
    x, codebook = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((5000, 8), (1000, 8)))
    found = {}
    for platform in ("cpu", "cuda", "tpu"):
        answer = explain(nearest_code, x, codebook, platform=platform)
        lowered = jax.jit(nearest_code).trace(x, codebook).lower(lowering_platforms=(platform,)).as_text()
        forced = jax.jit(partial(nearest_code, implementation=answer.chosen)).trace(x, codebook)
        products = [
            set(re.findall(r"(?<=dot_general )%.*", re.sub(r"%\w+", "%", text)))
            for text in (lowered, forced.lower(lowering_platforms=(platform,)).as_text())
        ]
        # Which of the forms it is shows in the sizes of its products.
        assert products[0] == products[1]
        found[answer.chosen] = products[0]
    assert set(found) == {"cpu", "xla"}
    assert found["cpu"] != found["xla"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"metric": "cosin"}, OpValueError, "Did you mean 'cosine'"),
        ({"metric": None}, OpTypeError, "metric must be 'euclidean' or 'cosine'"),
        ({"return_distance": 1}, OpTypeError, "return_distance must be True or False"),
    ],
)
def test_bad_input(change, error, match):
    with pytest.raises(error, match=match):
        nearest_code(jnp.zeros((3, 4)), jnp.zeros((5, 4)), **change)


MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from capibara.ops.vq import (
    initial_codebook_state, nearest, nearest_code, product_quantise, update_codebook, vector_quantise
)
rng = np.random.default_rng(0)
x, c = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 6, 4), (37, 4)))
want = jax.jit(lambda x, c: nearest_code(x, c, implementation="reference"))(x, c)
nearest.BLOCK_CODES = 16
mesh = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
for name in ("cpu", "xla"):
    f = lambda x, c: nearest_code(x, c, implementation=name)
    split = jax.shard_map(f, mesh=mesh, in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y")))
    np.testing.assert_array_equal(jax.jit(split)(x, c), want)
    placed = jax.device_put(x, NamedSharding(mesh, P("y")))
    np.testing.assert_array_equal(jax.jit(f)(placed, c), want)

state, key = initial_codebook_state(jax.random.key(0), 8, 4), jax.random.key(1)
def train(state, x, axis_name=None):
    _, indices, metrics, after = vector_quantise(
        state, x, train=True, decay=0.5, dead_code_threshold=0.0, axis_name=axis_name
    )
    metrics.pop("commitment_loss")
    return indices, metrics, after
apart = jax.shard_map(
    lambda s, x: train(s, x, ("x", "y")), mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=(P(("x", "y")), P(), P())
)
got, whole = jax.jit(apart)(state, x), jax.jit(train)(state, x)
for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(whole)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

def revive(state, x, key):
    return update_codebook(
        state, x, jnp.zeros(x.shape[:-1], int), decay=0.0, dead_code_threshold=1.0, key=key, axis_name=("x", "y")
    )
got = jax.jit(jax.shard_map(revive, mesh=mesh, in_specs=(P(), P(("x", "y")), P()), out_specs=P()))(state, x, key)
rows = np.asarray(x).reshape(-1, 4)
owners = {int(np.nonzero((rows == code).all(-1))[0][0]) * 32 // len(rows) for code in np.asarray(got["codebook"])[1:]}
assert len(owners) > 2, owners

mesh = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    placed = jax.device_put(x, NamedSharding(mesh, P("y", None)))
    codes = jax.device_put(c, NamedSharding(mesh, P()))
    index, distance = jax.jit(lambda x, c: nearest_code(x, c, return_distance=True))(placed, codes)
    assert jax.typeof(index).sharding.spec[0] == "y" == jax.typeof(distance).sharding.spec[0]
    np.testing.assert_array_equal(index, want)
"""


@pytest.mark.slow
def test_inside_shard_map_and_on_meshes():
    environment = {
        **os.environ,
        "XLA_FLAGS": emulated(32, quick=True),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", MESH], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("implementation", ["cpu", "xla", "reference"])
def test_far_from_the_origin_the_nearest_is_found(implementation):
    random = np.random.default_rng(5)
    # |code|² is 1e8 or so: its rounding alone is larger than the distances between codes.
    centre = np.array([1e4, -3e4, 2e3, 0.0])
    codes, x = ((centre + random.normal(size=(n, 4))).astype(np.float32) for n in (64, 300))
    gaps = ((x[:, None].astype(np.float64) - codes.astype(np.float64)) ** 2).sum(-1)
    got = np.asarray(nearest_code(x, codes, implementation=implementation))
    np.testing.assert_allclose(gaps[np.arange(300), got], gaps.min(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "reference"])
def test_moving_the_codes_breaks_no_tie_and_no_large_number(implementation):
    codes = np.array([[0.0], [2.0], [5.0], [np.inf], [7.0]], np.float32)
    x = np.array([[1.0], [3.5], [6.0], [-4.0]], np.float32)
    for offset in (0, 4096):
        got = nearest_code(x + offset, codes + offset, implementation=implementation)
        np.testing.assert_array_equal(got, [0, 1, 2, 0])
    large = np.array([[-3e38], [3e38], [1.0]], np.float32)
    assert nearest_code(np.array([[0.5]], np.float32), large, implementation=implementation)[0] == 2
