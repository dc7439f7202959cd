"""causal_conv1d: against NumPy's definition, pieces joined through the state, bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import OpShapeError, OpTypeError
from capibara.ops.conv import causal_conv1d

IMPLEMENTATIONS = ("xla", "reference")


def oracle(x, weight, bias=None, state=None):
    batch, _, channels = x.shape
    taps = weight.shape[0]
    state = np.zeros((batch, taps - 1, channels)) if state is None else state
    y = np.zeros(x.shape)
    for c in range(channels):
        for b in range(batch):
            past = np.concatenate([state[b, :, c], x[b, :, c]])
            # np.convolve flips its second argument; the last tap meets the present.
            y[b, :, c] = np.convolve(past, weight[::-1, c], "valid") + (0 if bias is None else bias[c])
    return y


def arrays(batch=2, length=7, channels=3, taps=4, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, length, channels), (taps, channels), (channels,), (batch, taps - 1, channels))
    return [rng.normal(size=s) for s in shapes]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("length", "taps"), [(7, 4), (1, 4), (2, 4), (5, 1), (3, 5)])
def test_value_and_state(length, taps, implementation):
    x, weight, bias, state = arrays(length=length, taps=taps)
    with jax.enable_x64(True):
        y, after = causal_conv1d(
            device_array(x),
            device_array(weight),
            device_array(bias),
            state=device_array(state),
            implementation=implementation,
        )
        plain, _ = causal_conv1d(device_array(x), device_array(weight), implementation=implementation)
    np.testing.assert_allclose(y, oracle(x, weight, bias, state), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(plain, oracle(x, weight), rtol=1e-12, atol=1e-12)
    past = np.concatenate([state, x], 1)
    np.testing.assert_array_equal(after, past[:, past.shape[1] - (taps - 1) :])


def test_gradient_is_that_of_the_reference():
    x, weight, bias, state = (device_array(a, jnp.float32) for a in arrays())

    def loss(x, weight, bias, state, implementation):
        y, after = causal_conv1d(x, weight, bias, state=state, implementation=implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(after**2)

    both = [jax.grad(loss, argnums=(0, 1, 2, 3))(x, weight, bias, state, name) for name in IMPLEMENTATIONS]
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_pieces_join_and_vmap():
    x, weight, bias, _ = (device_array(a, jnp.float32) for a in arrays(length=9))
    want, end = causal_conv1d(x, weight, bias)
    first, state = causal_conv1d(x[:, :2], weight, bias)
    second, state = causal_conv1d(x[:, 2:], weight, bias, state=state)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state, end)
    many, _ = jax.vmap(lambda w: causal_conv1d(x, w, bias))(jnp.stack([weight, 2 * weight]))
    np.testing.assert_allclose(many[0], want, rtol=1e-5, atol=1e-6)


def test_bfloat16_sums_wide():
    x, weight, bias, _ = (device_array(a, jnp.bfloat16) for a in arrays())
    y, state = causal_conv1d(x, weight, bias)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16)
    want = oracle(*(np.asarray(a, np.float64) for a in (x, weight, bias)))
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1e-2, atol=1e-3)


def test_no_positions_keep_the_state():
    x, weight, bias, state = (device_array(a, jnp.float32) for a in arrays(length=0))
    y, after = causal_conv1d(x, weight, bias, state=state)
    assert y.shape == (2, 0, 3)
    np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": np.zeros((2, 3))}, OpShapeError, "x must have 3 axes"),
        ({"x": np.zeros((2, 7, 3), np.int32)}, OpTypeError, "x must be floating point"),
        ({"x": [[1.0]]}, OpTypeError, "x must be an array"),
        ({"weight": np.zeros((4, 2))}, OpShapeError, r"weight must have shape \(4, 3\)"),
        ({"weight": np.zeros((0, 3))}, OpShapeError, "at least one tap"),
        ({"bias": np.zeros(2)}, OpShapeError, "bias must have shape"),
        ({"state": np.zeros((2, 4, 3))}, OpShapeError, r"state must have shape \(2, 3, 3\)"),
    ],
)
def test_bad_input(change, error, match):
    x, weight, bias, state = arrays()
    call = {"x": x, "weight": weight, "bias": bias, "state": state, **change}
    with pytest.raises(error, match=match):
        causal_conv1d(**call)
