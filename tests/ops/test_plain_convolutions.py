"""Convolutions in one to three dimensions and their transposes, against sums over taps in NumPy."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax import lax

from capibara.ops import OpShapeError, OpTypeError, OpValueError, conv

CONVS = {1: conv.conv1d, 2: conv.conv2d, 3: conv.conv3d}
TRANSPOSES = {1: conv.conv_transpose1d, 2: conv.conv_transpose2d, 3: conv.conv_transpose3d}
FAST: Any = {"xla_backend_optimization_level": 0}


def scattered(x, w, out, strides, lows, dilation, groups):
    """Every input, times each tap, added to the output it belongs to: ``out[i * stride + tap * dilation - low]``."""
    n = x.ndim - 2
    y = np.zeros((len(x), *out, w.shape[-1]))
    inner, outer = w.shape[-2], w.shape[-1] // groups
    for at in itertools.product(*map(range, x.shape[1:-1])):
        for tap in itertools.product(*map(range, w.shape[:n])):
            place = tuple(
                i * s + t * d - low for i, s, t, d, low in zip(at, strides, tap, dilation, lows, strict=True)
            )
            if all(0 <= p < m for p, m in zip(place, out, strict=True)):
                for g in range(groups):
                    part = x[(slice(None), *at, slice(g * inner, g * inner + inner))]
                    cut = slice(g * outer, g * outer + outer)
                    y[(slice(None), *place, cut)] += part @ w[(*tap, slice(None), cut)]
    return y


def turned(w, n):
    return w[tuple(slice(None, None, -1) for _ in range(n))]


def gathered(x, w, out, strides, lows, dilation, groups):
    """The convolution: ``out[i]`` is the sum of ``x[i * stride + tap * dilation - low] · w[tap]``."""
    n = x.ndim - 2
    y = np.zeros((len(x), *out, w.shape[-1]))
    inner, outer = w.shape[-2], w.shape[-1] // groups
    for at in itertools.product(*map(range, out)):
        for tap in itertools.product(*map(range, w.shape[:n])):
            place = tuple(
                i * s + t * d - low for i, s, t, d, low in zip(at, strides, tap, dilation, lows, strict=True)
            )
            if all(0 <= p < m for p, m in zip(place, x.shape[1:-1], strict=True)):
                for g in range(groups):
                    part = x[(slice(None), *place, slice(g * inner, g * inner + inner))]
                    cut = slice(g * outer, g * outer + outer)
                    y[(slice(None), *at, cut)] += part @ w[(*tap, slice(None), cut)]
    return y


CASES = [
    # sizes, taps, strides, padding, dilation, groups
    ((9,), (3,), 2, "SAME", 1, 1),
    ((8,), (2,), 3, "VALID", 2, 2),
    ((7,), (4,), 1, (3, 0), 1, 4),
    ((1,), (1,), 1, "SAME", 1, 1),
    ((5, 6), (3, 2), (2, 1), "SAME", 1, 2),
    ((5, 4), (2, 3), 1, ((1, 0), (2, 2)), (2, 1), 4),
    ((3, 4, 5), (2, 3, 2), (1, 2, 3), "SAME", 1, 1),
    ((4, 3, 3), (3, 1, 2), 2, "VALID", 1, 2),
]


def draw(sizes, taps, groups):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, *sizes, 4)), rng.normal(size=(*taps, 4 // groups, 8))


@pytest.mark.parametrize(("sizes", "taps", "strides", "padding", "dilation", "groups"), CASES)
def test_convolutions(sizes, taps, strides, padding, dilation, groups):
    n = len(sizes)
    x, w = draw(sizes, taps, groups)
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    with jax.enable_x64(True):
        got = jax.jit(partial(CONVS[n], **options), compiler_options=FAST)(x, w)
    steps, apart = (np.broadcast_to(v, n) for v in (strides, dilation))
    reach = [(k - 1) * d + 1 for k, d in zip(taps, apart, strict=True)]
    if padding == "SAME":
        out = [-(-m // s) for m, s in zip(sizes, steps, strict=True)]
        lows = [max((o - 1) * s + k - m, 0) // 2 for o, s, k, m in zip(out, steps, reach, sizes, strict=True)]
    else:
        pads = np.zeros((n, 2), int) if padding == "VALID" else np.reshape(padding, (n, 2))
        out = [(m + sum(p) - k) // s + 1 for m, p, k, s in zip(sizes, pads, reach, steps, strict=True)]
        lows = [p[0] for p in pads]
    np.testing.assert_allclose(got, gathered(x, w, out, steps, lows, apart, groups), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("sizes", "taps", "strides", "padding", "dilation", "groups"), CASES)
def test_transposed_convolutions(sizes, taps, strides, padding, dilation, groups):
    n = len(sizes)
    x, w = draw(sizes, taps, groups)
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    with jax.enable_x64(True):
        got = jax.jit(partial(TRANSPOSES[n], **options), compiler_options=FAST)(x, w)
        if groups == 1 and isinstance(padding, str):
            spread = tuple(np.broadcast_to(strides, n))
            np.testing.assert_allclose(got, lax.conv_transpose(x, w, spread, padding), rtol=1e-11, atol=1e-11)
    steps, apart = (np.broadcast_to(v, n) for v in (strides, dilation))
    reach = [(k - 1) * d + 1 for k, d in zip(taps, apart, strict=True)]
    if padding == "SAME":
        out = [m * s for m, s in zip(sizes, steps, strict=True)]
        lows = [max(k - s, 0) // 2 for k, s in zip(reach, steps, strict=True)]
    elif padding == "VALID":
        out = [(m - 1) * s + max(k, s) for m, k, s in zip(sizes, reach, steps, strict=True)]
        lows = [0] * n
    else:
        pads = np.reshape(padding, (n, 2))
        out = [(m - 1) * s + k - sum(p) for m, s, k, p in zip(sizes, steps, reach, pads, strict=True)]
        lows = [p[0] for p in pads]
    want = scattered(x, turned(w, n), out, steps, lows, apart, groups)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_the_transpose_is_the_gradient_of_the_convolution():
    x, w = (
        jnp.ones((1, 7, 6, 4)),
        device_array(np.random.default_rng(0).normal(size=(3, 2, 4, 5)), jnp.float32),
    )
    y, pull = jax.vjp(lambda x: conv.conv2d(x, w, strides=(3, 2), padding=((1, 2), (0, 0))), x)
    back = jnp.swapaxes(w[::-1, ::-1], 2, 3)
    got = conv.conv_transpose2d(y, back, strides=(3, 2), padding=((1, 2), (0, 0)))
    np.testing.assert_allclose(got, pull(y)[0][:, : got.shape[1], : got.shape[2]], rtol=1e-4, atol=1e-4)


def test_types_precision_and_transformations():
    x, w = jnp.ones((3, 2, 6, 4), jnp.bfloat16), jnp.ones((3, 4, 2), jnp.bfloat16)
    assert conv.conv1d(x[0], w, precision="highest").dtype == jnp.bfloat16
    assert conv.conv1d(x[0], w.astype(jnp.float32)).dtype == jnp.float32
    assert jax.jit(jax.vmap(conv.conv1d, (0, None)))(x, w).shape == (3, 2, 6, 2)
    assert conv.conv1d(x[0, :, :0], w).shape == (2, 0, 2)
    assert jax.jvp(conv.conv1d, (x[0], w), (x[0], w))[1].shape == (2, 6, 2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"inputs": np.zeros((2, 8))}, OpShapeError, r"inputs must be \[batch, length, channels\]"),
        ({"filters": np.zeros((3, 4, 2), int)}, OpTypeError, "filters must be floating point"),
        ({"filters": np.zeros((3, 3, 2))}, OpShapeError, "must have 4 in their last axis but one"),
        ({"filters": np.zeros((0, 4, 2))}, OpShapeError, "no taps"),
        ({"groups": 3}, OpValueError, "groups must divide the 4 channels"),
        ({"groups": True}, OpTypeError, "groups must be an integer"),
        ({"dilation": 0}, OpValueError, "dilation must be 1 integers of at least 1"),
        ({"padding": "FULL"}, OpValueError, "'SAME', 'VALID' or 1 pairs"),
        ({"padding": (1, 2, 3)}, OpValueError, "padding must be 2 integers"),
    ],
)
def test_bad_input(change, error, match):
    call = {"inputs": np.zeros((2, 8, 4)), "filters": np.zeros((3, 4, 2)), **change}
    for function in (conv.conv1d, conv.conv_transpose1d):
        with pytest.raises(error, match=match):
            function(**call)


def test_padding_that_leaves_nothing():
    with pytest.raises(OpValueError, match="takes away more than"):
        conv.conv_transpose1d(np.zeros((1, 2, 4)), np.zeros((3, 4, 2)), padding=(5, 5))
