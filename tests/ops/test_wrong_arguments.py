"""Arguments that do not fit, and NumPy's float64: errors by name, and no warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import CapibaraError
from capibara.ops import explain, tropical
from capibara.ops.attention import cached_attention, flash_attention, paged_attention
from capibara.ops.conv import causal_conv1d, conv2d, winograd_conv2d
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.linalg import optimized_gemm
from capibara.ops.scan import lif, linear_recurrence, selective_scan, semiring_scan
from capibara.ops.vq import initial_codebook_state, nearest_code, update_codebook, vector_quantise

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape)


X = jnp.ones((3, 2))
STATE = initial_codebook_state(jax.random.key(0), 4, 2)
IMAGE = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1))
BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "a platform that is none": (
        "Did you mean 'tpu'",
        lambda: explain(optimized_gemm, X, X.T, platform="tpuu"),
    ),
    "no arguments to explain": ("nearest_code cannot be called", lambda: explain("nearest_code")),
    "lists": ("must be an array", lambda: linear_recurrence(X, [1.0, 2.0])),  # type: ignore[arg-type]
    "text as a decay": ("decay must be a number", lambda: lif(X, decay="a")),  # type: ignore[arg-type]
    "a growing neuron": ("decay must lie in", lambda: lif(X, decay=5.0)),
    "an infinite slope": ("slope must be finite", lambda: lif(X, slope=float("inf"))),
    "text as a weight": ("decay must be a number", lambda: vector_quantise(STATE, X, train=True, decay="a")),  # type: ignore[arg-type]
    "a bool as a weight": (
        "decay must be a number",
        lambda: vector_quantise(STATE, X, train=True, decay=True),
    ),
    "a state of lists": (
        "must be an array",
        lambda: vector_quantise({**STATE, "cluster_size": [1.0] * 4}, X, train=True),  # type: ignore[dict-item]
    ),
    "an array as padding": (
        "padding must be",
        lambda: tropical.pool(jnp.ones((1, 4, 1)), 2, padding=np.zeros((1, 2))),  # type: ignore[arg-type]
    ),
    "a complex operand": (
        "Remedy: jax.numpy.matmul or jax.numpy.linalg, which take complex",
        lambda: optimized_gemm(X + 1j, X.T),
    ),
    "an axis of no mesh": (
        "no mesh axis 'rows' here",
        lambda: radix_optimized_fft(X, use_parallel=True, axis_name="rows"),
    ),
    "a name for no nodes": (
        "no implementation 'fast'",
        lambda: tropical.closure(jnp.zeros((0, 0)), implementation="fast"),
    ),
    "a name for no windows": (
        "no implementation 'fast'",
        lambda: tropical.conv1d(jnp.ones((1, 1, 2)), jnp.ones((1, 1, 3)), implementation="fast"),
    ),
    "forward mode of Winograd": (
        "forward-mode differentiation .* is not defined",
        lambda: jax.jvp(winograd_conv2d, IMAGE, IMAGE),
    ),
    "a split outside": ("split_axis=99", lambda: radix_optimized_fft(X, use_parallel=True, split_axis=99)),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_by_name(what: str) -> None:
    says, call = BAD[what]
    with pytest.raises(CapibaraError, match=says):
        call()


def test_numpy_float64_is_taken_as_jax_takes_it() -> None:
    assert nearest_code(normal(5, 3), normal(4, 3)).shape == (5,)
    y, state = causal_conv1d(normal(1, 4, 2), normal(3, 2))
    assert y.dtype == state.dtype == jnp.float32
    shapes = ((1, 6, 2, 3), (1, 6, 2), (2,), (1, 6, 1, 4), (1, 6, 1, 4))
    y, _ = selective_scan(*(-np.abs(normal(*s)) for s in shapes))
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("length", [0, 4])
def test_numpy_float64_in_attention(length: int) -> None:
    q, k = normal(1, 2, length, 4), normal(1, 2, 4, 4)
    out = flash_attention(q, k, jnp.asarray(k))  # NumPy's and JAX's beside each other
    assert (out.shape, out.dtype) == ((1, 2, length, 4), jnp.float32)
    new, cache = normal(1, length, 2, 4), normal(1, 4, 2, 4)
    assert cached_attention(new, cache, cache, 0).dtype == jnp.float32
    table: Any
    lengths: Any
    table, lengths = np.zeros((1, 1), np.int32), np.full(1, 2, np.int32)
    assert paged_attention(new, cache, cache, table, lengths).dtype == jnp.float32


def test_numpy_whole_numbers_are_whole_numbers() -> None:
    one, x = np.int64(1), jnp.asarray(normal(3, 8), jnp.float32)
    np.testing.assert_array_equal(tropical.scan(x, x, axis=one), tropical.scan(x, x, axis=1))  # type: ignore[arg-type]
    np.testing.assert_array_equal(semiring_scan(x, axis=one), semiring_scan(x, axis=1))  # type: ignore[arg-type]
    for factors in (np.array([2, 4]), jnp.array([2, 4])):
        got = radix_optimized_fft(x, factors, axis=one)  # type: ignore[arg-type]
        np.testing.assert_allclose(got, np.fft.fft(x), atol=1e-5)
    assert initial_codebook_state(jax.random.key(0), np.int32(4), one)["codebook"].shape == (4, 1)  # type: ignore[arg-type]


def test_forward_mode_has_conv2d() -> None:
    _, change = jax.jvp(conv2d, IMAGE, IMAGE)
    np.testing.assert_allclose(change, 2 * conv2d(*IMAGE))


def test_an_index_outside_moves_no_code() -> None:
    x = jnp.asarray(normal(3, 2), jnp.float32)
    inside = update_codebook(STATE, x[:2], jnp.array([0, 3]))
    for outside in (4, -5):
        moved = update_codebook(STATE, x, jnp.array([0, -1, outside]))
        for name, want in inside.items():
            np.testing.assert_array_equal(moved[name], want)
