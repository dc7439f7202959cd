"""Product and residual quantisation, moving averages given indices, and the vectors that indices stand for."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import OpShapeError, OpTypeError, OpValueError
from capibara.ops.vq import (
    dequantise,
    initial_codebook_state,
    product_quantise,
    residual_quantise,
    update_codebook,
    vector_quantise,
)

FAST: Any = {"xla_backend_optimization_level": 0}


def nearest(x, codebook, metric="euclidean"):
    if metric == "cosine":
        x, codebook = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (x, codebook))
    return np.argmin(np.sum((x[..., None, :] - codebook) ** 2, -1), -1)


def averaged(state, x, indices, decay, epsilon):
    """van den Oord et al. 2017, appendix A.1, one vector at a time."""
    counts, sums = np.zeros(len(state["codebook"])), np.zeros(state["codebook"].shape)
    for vector, k in zip(x.reshape(-1, x.shape[-1]), indices.reshape(-1), strict=True):
        counts[k] += 1
        sums[k] += vector
    size = decay * np.asarray(state["cluster_size"], np.float64) + (1 - decay) * counts
    total = decay * np.asarray(state["codebook_sum"], np.float64) + (1 - decay) * sums
    smooth = (size + epsilon) / (size.sum() + len(size) * epsilon) * size.sum()
    return {"codebook": total / smooth[:, None], "cluster_size": size, "codebook_sum": total}


def setting(count=3, codes=7, dim=4, shape=(5, 6), seed=0, width=None):
    state = initial_codebook_state(jax.random.key(seed), codes, dim, codebooks=count)
    x = np.random.default_rng(seed).normal(size=(*shape, width or dim)).astype(np.float32)
    return state, x


def part(state, i):
    return {name: np.asarray(value[i]) for name, value in state.items()}


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_product_is_a_quantisation_of_each_part(metric):
    state, x = setting(width=12)
    run = partial(product_quantise, decay=0.7, epsilon=1e-3, metric=metric, dead_code_threshold=0.0)
    quantized, indices, metrics, after = jax.jit(partial(run, train=True), compiler_options=FAST)(state, x)
    errors = []
    for i in range(3):
        piece, codebook = x[..., 4 * i : 4 * i + 4], np.asarray(state["codebook"][i])
        want = nearest(piece, codebook, metric)
        np.testing.assert_array_equal(indices[..., i], want)
        np.testing.assert_allclose(quantized[..., 4 * i : 4 * i + 4], codebook[want], atol=1e-6)
        errors.append(np.mean((piece - codebook[want]) ** 2))
        for name, value in averaged(part(state, i), piece, want, 0.7, 1e-3).items():
            np.testing.assert_allclose(after[name][i], value, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics["quantization_error"], np.mean(errors), rtol=1e-5)
    np.testing.assert_allclose(dequantise(state["codebook"], indices, scheme="product"), quantized, atol=1e-6)
    assert run(state, x, train=False)[3]["codebook"] is state["codebook"]


def test_residual_is_a_quantisation_of_what_is_left():
    state, x = setting()
    run = partial(residual_quantise, decay=0.7, epsilon=1e-3, dead_code_threshold=0.0, commitment_weight=0.5)
    quantized, indices, metrics, after = jax.jit(partial(run, train=True), compiler_options=FAST)(state, x)
    left, losses = x.astype(np.float64), []
    for i in range(3):
        codebook = np.asarray(state["codebook"][i], np.float64)
        want = nearest(left, codebook)
        np.testing.assert_array_equal(indices[..., i], want)
        for name, value in averaged(part(state, i), left, want, 0.7, 1e-3).items():
            np.testing.assert_allclose(after[name][i], value, rtol=1e-4, atol=1e-5, err_msg=name)
        left = left - codebook[want]
        losses.append(0.5 * np.mean(left**2))
    np.testing.assert_allclose(quantized, x - left, atol=1e-5)
    np.testing.assert_allclose(metrics["quantization_error"], np.mean(left**2), rtol=1e-5)
    np.testing.assert_allclose(metrics["commitment_loss"], np.sum(losses), rtol=1e-5)
    np.testing.assert_allclose(
        dequantise(state["codebook"], indices, scheme="residual"), quantized, atol=1e-5
    )
    assert run(state, x, train=False)[3]["codebook"] is state["codebook"]


@pytest.mark.parametrize(("function", "width"), [(product_quantise, 12), (residual_quantise, 4)])
def test_gradients_go_straight_through_and_the_loss_pulls(function, width):
    state, x = setting(width=width)
    weight = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def both(state, x):
        straight = jax.grad(lambda x, s: jnp.vdot(weight, function(s, x, train=True)[0]), (0, 1))(x, state)
        pull = jax.grad(
            lambda x: function(state, x, train=False, commitment_weight=1.0)[2]["commitment_loss"]
        )(x)
        return straight, pull, function(state, x, train=False)[1]

    (straight, to_state), pull, indices = jax.jit(both, compiler_options=FAST)(state, x)
    np.testing.assert_allclose(straight, weight, rtol=1e-6)
    assert not any(np.any(g) for g in jax.tree.leaves(to_state))
    codes = np.stack([np.asarray(state["codebook"])[i][indices[..., i]] for i in range(3)])
    if function is product_quantise:
        want = 2 * (x - np.concatenate(codes, -1)) / x.size
    else:
        want = sum(2 * (x - np.sum(codes[: i + 1], 0)) / x.size for i in range(3))
    np.testing.assert_allclose(pull, want, rtol=1e-3, atol=1e-6)


def test_each_codebook_draws_its_own_dead_codes():
    state, x = setting(count=2, codes=12, dim=2, shape=(64,))
    state = {name: value + 100.0 for name, value in state.items() if name != "cluster_size"} | {
        "cluster_size": jnp.zeros((2, 12))
    }
    pair = np.concatenate([x, x], -1)
    for function, given in ((product_quantise, pair), (residual_quantise, x)):
        step = jax.jit(partial(function, train=True, dead_code_threshold=1.5), compiler_options=FAST)
        after = step(state, given, key=jax.random.key(0))[3]["codebook"]
        again = step(state, given, key=jax.random.key(0))[3]["codebook"]
        np.testing.assert_array_equal(after, again)
        assert np.any(np.asarray(after[0]) != np.asarray(after[1]))
        assert any((x == code).all(-1).any() for code in np.asarray(after[0]))


def test_more_codebooks_leave_less():
    x = device_array(np.random.default_rng(0).normal(size=(256, 4)), jnp.float32)
    state = initial_codebook_state(jax.random.key(1), 12, 4, codebooks=3)
    state = {name: value * 0.5 if value.ndim == 3 else value for name, value in state.items()}

    def step(state, key):
        _, _, metrics, state = residual_quantise(
            state, x, train=True, decay=0.8, dead_code_threshold=1.0, key=key
        )
        return state, metrics["quantization_error"]

    keys = jax.random.split(jax.random.key(0), 40)
    state, errors = jax.jit(lambda s: jax.lax.scan(step, s, keys), compiler_options=FAST)(state)
    one = {name: value[0] for name, value in state.items()}
    first = float(vector_quantise(one, x, train=False)[2]["quantization_error"])
    assert errors[-1] < 0.5 * first
    assert errors[-1] < 0.8 * errors[0]


def test_bfloat16_input_keeps_its_type_and_float32_codebooks():
    state, x = setting(width=12)
    for function, given in ((product_quantise, x), (residual_quantise, x[..., :4])):
        quantized, indices, metrics, after = function(state, device_array(given, jnp.bfloat16), train=True)
        assert quantized.dtype == jnp.bfloat16
        assert indices.dtype == jnp.int32
        assert {a.dtype for a in jax.tree.leaves((metrics, after))} == {jnp.dtype("float32")}


def test_averages_of_given_indices():
    state = initial_codebook_state(jax.random.key(0), 5, 3)
    rng = np.random.default_rng(0)
    x, indices = rng.normal(size=(4, 6, 3)).astype(np.float32), rng.integers(0, 5, (4, 6))
    after = update_codebook(state, x, device_array(indices), decay=0.6, epsilon=1e-2, dead_code_threshold=0.0)
    for name, value in averaged(state, x, indices, 0.6, 1e-2).items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    slopes = jax.grad(lambda x: jnp.sum(update_codebook(state, x, device_array(indices))["codebook"]))(x)
    assert not np.any(slopes)


def test_indices_stand_for_vectors():
    codebook = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    indices = np.array([[0, 3], [2, 1], [4, -1]])
    product = dequantise(codebook, indices, scheme="product")
    np.testing.assert_array_equal(product[1], [6, 7, 8, 15, 16, 17])
    np.testing.assert_array_equal(
        dequantise(codebook, indices, scheme="residual")[0], codebook[0, 0] + codebook[1, 3]
    )
    assert np.isnan(product[2]).all()
    np.testing.assert_array_equal(dequantise(codebook[0], indices[:, 0])[1], [6, 7, 8])
    assert dequantise(codebook, indices[:0], scheme="product").shape == (0, 6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda s, x: product_quantise(s, x[..., :5], train=True),
            OpShapeError,
            "the 3 codebooks' dims together, 12",
        ),
        (lambda s, x: residual_quantise(s, x, train=True), OpShapeError, "the codebook's dim, 4"),
        (lambda s, x: residual_quantise(part(s, 0), x, train=True), OpShapeError, "codebooks=…"),
        (lambda s, x: product_quantise({}, x, train=True), OpTypeError, "with the keys"),
        (lambda s, x: product_quantise(s, x.astype(int), train=True), OpTypeError, "floating-point"),
        (lambda s, x: product_quantise(s, x, train=True, decay=2.0), OpValueError, "decay must lie in"),
        (lambda s, x: product_quantise(s, x, train=True, metric="cos"), OpValueError, "metric must be"),
        (lambda s, x: vector_quantise(s, x, train=True), OpShapeError, r"must be \[codes, dim\]"),
        (lambda s, x: update_codebook(part(s, 0), x[..., :4], x[..., 0]), OpTypeError, "array of integers"),
        (
            lambda s, x: update_codebook(part(s, 0), x[..., :4], np.zeros(3, int)),
            OpShapeError,
            r"one for each vector of x \(5, 6, 4\)",
        ),
        (lambda s, x: dequantise(s["codebook"], np.zeros(3, int)), OpShapeError, r"must be \[codes, dim\]"),
        (
            lambda s, x: dequantise(s["codebook"], np.zeros((5, 2), int), scheme="product"),
            OpShapeError,
            "one for each of the 3 codebooks",
        ),
        (lambda s, x: dequantise(s["codebook"], x), OpTypeError, "indices must be an array of integers"),
        (
            lambda s, x: dequantise(s["codebook"], np.zeros(3, int), scheme="residuals"),
            OpValueError,
            "Did you mean 'residual'",
        ),
        (lambda s, x: dequantise(s["codebook"], np.zeros(3, int), scheme=2), OpTypeError, "scheme must be"),
        (
            lambda s, x: initial_codebook_state(jax.random.key(0), 3, 4, codebooks=0),
            OpValueError,
            "codebooks must be an integer",
        ),
    ],
)
def test_bad_input(call, error, match):
    state, x = setting(width=12)
    with pytest.raises(error, match=match):
        call(state, x)


def test_the_class_has_the_functions():
    from capibara.jax.tpu_v4 import kernels
    from capibara.jax.tpu_v4.backend import TpuV4VQOps

    assert kernels.TpuV4VQOps is TpuV4VQOps
    state, x = setting(width=12)
    ops = TpuV4VQOps()
    quantized, indices, _, _ = ops.product_quantise(state, x, train=False)
    np.testing.assert_allclose(
        ops.dequantise(state["codebook"], indices, scheme="product"), quantized, atol=1e-6
    )
    np.testing.assert_array_equal(ops.nearest_code(x[..., :4], state["codebook"][0]), indices[..., 0])
