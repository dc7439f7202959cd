"""nearest_code against all distances in NumPy; vector_quantise's averages, revival and gradients."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.ops import OpShapeError, OpTypeError, OpValueError
from capibara.ops.vq import initial_codebook_state, nearest, nearest_code, vector_quantise
from capibara.ops.vq.problem import prepare


def oracle(x, codebook):
    distances = np.sum((x[..., None, :].astype(np.float64) - codebook) ** 2, -1)
    return np.argmin(distances, -1)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "reference"])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5), (4, 0, 5)])
def test_nearest_is_the_definition(shape, implementation):
    rng = np.random.default_rng(0)
    x, codebook = rng.normal(size=shape).astype(np.float32), rng.normal(size=(11, 5)).astype(np.float32)
    got = nearest_code(x, codebook, implementation=implementation)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, oracle(x, codebook))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 40), codes=st.integers(1, 12), limit=st.integers(1, 60), seed=st.integers(0, 99))
def test_blocks_of_any_size(tokens, codes, limit, seed):
    rng = np.random.default_rng(seed)
    # Integers: distances are exact, so that ties are ties.
    x = rng.integers(-2, 3, (tokens, 2)).astype(np.float32)
    codebook = rng.integers(-2, 3, (codes, 2)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "BLOCK_CODES", 1 + limit % 7)
        problem = prepare(x, codebook)[0]
        for best, contiguous in ((nearest._best_column, True), (nearest._best_row, False)):
            got = nearest._blocked(best, limit, contiguous, problem, device_array(x), device_array(codebook))
            np.testing.assert_array_equal(got, oracle(x, codebook))


def test_ties_go_to_the_lowest_index():
    codebook = device_array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_array_equal(nearest_code(device_array([[0.0, 0.0], [1.0, 0.0]]), codebook), [0, 0])


def test_the_table_of_distances_is_never_whole():
    x, codebook = jax.ShapeDtypeStruct((65536, 8), jnp.float32), jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    table = 65536 * 1024 * 4

    def temporary(implementation):
        program = jax.jit(lambda x, c: nearest_code(x, c, implementation=implementation))
        analysis = program.lower(x, codebook).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary("reference") >= table
    assert temporary("auto") <= table / 10


def test_nearest_under_transformations():
    rng = np.random.default_rng(1)
    x, codebook = (device_array(rng.normal(size=s), jnp.float32) for s in ((3, 6, 4), (3, 5, 4)))
    got = jax.jit(jax.vmap(nearest_code))(x, codebook)
    for i in range(3):
        np.testing.assert_array_equal(got[i], oracle(np.asarray(x[i]), np.asarray(codebook[i])))
    assert nearest_code(x.astype(jnp.bfloat16), codebook[0]).shape == (3, 6)


def test_nearest_bad_input():
    x, codebook = jnp.zeros((3, 4)), jnp.zeros((5, 4))
    with pytest.raises(OpShapeError, match="codebook's dim, 4"):
        nearest_code(jnp.zeros((3, 5)), codebook)
    with pytest.raises(OpShapeError, match="at least one code"):
        nearest_code(x, jnp.zeros((0, 4)))
    with pytest.raises(OpTypeError, match="x must be floating point"):
        nearest_code(jnp.zeros((3, 4), jnp.int32), codebook)
    with pytest.raises(OpTypeError, match="codebook must be an array"):
        nearest_code(x, [[1.0]])
    with pytest.raises(OpValueError, match="no implementation"):
        nearest_code(x, codebook, implementation="best")


def numpy_update(state, x, decay, epsilon):
    """The moving averages of van den Oord et al. 2017, appendix A.1, one vector at a time."""
    codebook = np.asarray(state["codebook"], np.float64)
    counts, sums = np.zeros(len(codebook)), np.zeros_like(codebook)
    for vector in x.reshape(-1, x.shape[-1]):
        k = np.argmin(np.sum((codebook - vector) ** 2, -1))
        counts[k] += 1
        sums[k] += vector
    size = decay * np.asarray(state["cluster_size"], np.float64) + (1 - decay) * counts
    total = decay * np.asarray(state["codebook_sum"], np.float64) + (1 - decay) * sums
    smooth = (size + epsilon) / (size.sum() + len(size) * epsilon) * size.sum()
    return {"codebook": total / smooth[:, None], "cluster_size": size, "codebook_sum": total}


def test_moving_averages():
    rng = np.random.default_rng(2)
    state = initial_codebook_state(jax.random.key(0), 6, 3)
    for _ in range(3):
        x = rng.normal(size=(4, 5, 3)).astype(np.float32)
        want = numpy_update(state, x, 0.8, 1e-3)
        _, _, _, state = vector_quantise(
            state, device_array(x), train=True, decay=0.8, epsilon=1e-3, dead_code_threshold=0.0
        )
        for name, value in want.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_metrics():
    state = {
        "codebook": device_array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]),
        "cluster_size": jnp.ones(4),
        "codebook_sum": jnp.zeros((4, 2)),
    }
    x = device_array([[0.0, 0.1], [0.0, 0.2], [0.8, 0.0], [1.2, 0.0]])
    quantized, indices, metrics, after = vector_quantise(state, x, train=False, commitment_weight=0.5)
    np.testing.assert_array_equal(indices, [0, 0, 1, 1])
    np.testing.assert_allclose(quantized, np.asarray(state["codebook"])[[0, 0, 1, 1]])
    error = np.mean(np.array([0.1, 0.2, 0.2, 0.2]) ** 2) / 2
    assert metrics["quantization_error"] == pytest.approx(error)
    assert metrics["commitment_loss"] == pytest.approx(0.5 * error)
    assert metrics["perplexity"] == pytest.approx(2.0)
    assert metrics["usage"] == pytest.approx(0.5)
    assert all(after[name] is state[name] for name in state)


def test_gradients_go_straight_through_and_the_loss_pulls_to_the_code():
    state = initial_codebook_state(jax.random.key(1), 8, 3)
    x = jax.random.normal(jax.random.key(2), (5, 3))
    weight = jax.random.normal(jax.random.key(3), (5, 3))
    straight = jax.grad(lambda x: jnp.vdot(weight, vector_quantise(state, x, train=True)[0]))(x)
    np.testing.assert_allclose(straight, weight, rtol=1e-6)
    pull = jax.grad(
        lambda x: vector_quantise(state, x, train=False, commitment_weight=0.5)[2]["commitment_loss"]
    )(x)
    nearest = np.asarray(state["codebook"])[oracle(np.asarray(x), np.asarray(state["codebook"]))]
    np.testing.assert_allclose(pull, 0.5 * 2 * (np.asarray(x) - nearest) / x.size, rtol=1e-5, atol=1e-7)
    to_state = jax.grad(lambda s: jnp.sum(vector_quantise(s, x, train=True)[0]))(state)
    assert not any(np.any(g) for g in jax.tree.leaves(to_state))


def test_dead_codes_move_to_inputs_and_the_same_key_gives_the_same():
    state = initial_codebook_state(jax.random.key(0), 16, 2)
    for name in ("codebook", "codebook_sum"):
        state[name] = state[name].at[8:].add(100.0)
    x = jax.random.normal(jax.random.key(5), (64, 2))

    @jax.jit
    def step(key):
        return vector_quantise(state, x, train=True, dead_code_threshold=1.0, decay=0.5, key=key)[3]

    after, again, other = (step(jax.random.key(k)) for k in (1, 1, 2))
    dead = np.asarray(numpy_update(state, np.asarray(x), 0.5, 1e-5)["cluster_size"]) < 1.0
    assert dead[8:].all()
    revived = np.asarray(after["codebook"])[dead]
    assert all((np.asarray(x) == code).all(-1).any() for code in revived)
    np.testing.assert_array_equal(np.asarray(after["cluster_size"])[dead], 2.0)
    np.testing.assert_allclose(np.asarray(after["codebook_sum"])[dead], 2 * revived)
    np.testing.assert_array_equal(after["codebook"], again["codebook"])
    assert np.any(np.asarray(after["codebook"]) != np.asarray(other["codebook"]))
    unmoved = vector_quantise(state, x, train=True, dead_code_threshold=1.0, decay=0.5)[3]["codebook"]
    assert np.asarray(unmoved)[8:].min() > 50


def test_a_codebook_learns_clusters():
    centres = jax.random.normal(jax.random.key(0), (8, 4)) * 5
    state = initial_codebook_state(jax.random.key(1), 24, 4)

    @jax.jit
    def step(state, key):
        pick, noise, revive = jax.random.split(key, 3)
        x = centres[jax.random.randint(pick, (256,), 0, 8)] + 0.05 * jax.random.normal(noise, (256, 4))
        _, _, metrics, state = vector_quantise(
            state, x, train=True, decay=0.9, dead_code_threshold=2.0, key=revive
        )
        return state, metrics

    errors = []
    for i in range(150):
        state, metrics = step(state, jax.random.key(i))
        errors.append(float(metrics["quantization_error"]))
    # The noise itself has a mean square of 0.0025.
    assert errors[-1] < 0.004 < 1.0 < errors[0]


def test_bfloat16_input_keeps_a_float32_codebook():
    state = initial_codebook_state(jax.random.key(0), 8, 4)
    x = jax.random.normal(jax.random.key(1), (10, 4), jnp.bfloat16)
    quantized, _, metrics, after = vector_quantise(state, x, train=True)
    assert quantized.dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves((metrics, after))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"state": {"codebook": 1}}, OpTypeError, "with the keys codebook, cluster_size, codebook_sum"),
        ({"state": None}, OpTypeError, "got NoneType"),
        ({"x": np.zeros((3, 4), np.int32)}, OpTypeError, "floating-point"),
        ({"x": np.zeros((3, 5), np.float32)}, OpShapeError, "the codebook's dim, 4"),
        ({"x": np.zeros((0, 4), np.float32)}, OpShapeError, "no vector"),
        ({"decay": 1.5}, OpValueError, "decay must lie in"),
        ({"commitment_weight": -1.0}, OpValueError, "commitment_weight must lie in"),
        ({"dead_code_threshold": float("nan")}, OpValueError, "dead_code_threshold"),
    ],
)
def test_bad_input(change, error, match):
    state = initial_codebook_state(jax.random.key(0), 8, 4)
    with pytest.raises(error, match=match):
        vector_quantise(**{"state": state, "x": jnp.zeros((3, 4)), "train": True, **change})


def test_bad_state():
    state = initial_codebook_state(jax.random.key(0), 8, 4)
    with pytest.raises(OpShapeError, match="cluster_size"):
        vector_quantise({**state, "cluster_size": jnp.ones(7)}, jnp.zeros((3, 4)), train=True)
    with pytest.raises(OpValueError, match="codebook_size must be an integer from 1"):
        initial_codebook_state(jax.random.key(0), 0, 4)
