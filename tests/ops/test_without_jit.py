"""Operations outside of ``jax.jit``: a call is one program, which is compiled once.

Those that are primitives of their own compile what they compute under ``jax.disable_jit``, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops.attention import cached_attention, flash_attention
from capibara.ops.conv import winograd_conv2d
from capibara.ops.linalg import optimized_gemm, quantised_matmul
from capibara.ops.one_device import on_one_device
from capibara.ops.scan import linear_recurrence, selective_scan
from capibara.ops.tropical import matmul
from capibara.ops.vq import nearest_code

RANDOM = np.random.default_rng(0)
A, X = (jnp.asarray(RANDOM.uniform(0.5, 1.0, (8, 3)), jnp.float32) for _ in range(2))
CODES, SCALES = RANDOM.integers(-9, 9, (4, 3), np.int8), np.ones((4, 1), np.float32)


def _recurrence(x: Any) -> Any:
    return linear_recurrence(A, x)[0]


def _recurrence_by_xla(x: Any) -> Any:
    return linear_recurrence(A, x, implementation="xla")[0]


def _quantised(x: Any) -> Any:
    return quantised_matmul(x, CODES, SCALES, group=3)


def _loop(x: np.ndarray) -> np.ndarray:
    states = [x[0]]
    for a, each in zip(np.asarray(A[1:], np.float64), x[1:], strict=True):
        states.append(a * states[-1] + each)
    return np.stack(states)


@pytest.mark.parametrize(
    ("function", "oracle"),
    [
        (_recurrence, _loop),
        (_recurrence_by_xla, _loop),
        (_quantised, lambda x: x @ CODES.T.astype(np.float64)),
    ],
)
def test_values_and_gradients(function: Any, oracle: Any):
    weights = RANDOM.normal(size=oracle(np.asarray(X)).shape)
    with jax.disable_jit():
        out, pull = jax.vjp(function, X)
        (slope,) = pull(jnp.asarray(weights, jnp.float32))
    x = np.asarray(X, np.float64)
    np.testing.assert_allclose(out, oracle(x), rtol=1e-5, atol=1e-5)
    for place in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-6
        want = np.sum(weights * (oracle(x + step) - oracle(x - step))) / 2e-6
        np.testing.assert_allclose(slope[place], want, rtol=1e-3, atol=1e-4)


def test_a_kernel_for_one_device():
    with jax.disable_jit():
        found = on_one_device(jnp.sin, jnp.cos, X)
    np.testing.assert_allclose(found, np.sin(np.asarray(X, np.float64)), rtol=1e-5)


_compiled = [0]


def _count(event: str, duration_secs: float, **_: Any) -> None:
    _compiled[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def _numbers(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.uniform(0.1, 0.9, shape), jnp.float32)


_HEADS, _SQUARE, _FILTERS = _numbers(1, 2, 24, 4), _numbers(24, 24), _numbers(3, 3, 4, 2)
_TIME, _STEPS, _RATES = _numbers(1, 24, 2, 4), _numbers(1, 24, 2), _numbers(2)


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda: flash_attention(_HEADS, _HEADS, _HEADS, implementation="xla", block_size=8), 1),
        (lambda: flash_attention(_HEADS, _HEADS, _HEADS, implementation="cpu", block_size=8), 1),
        (lambda: jax.grad(lambda q: flash_attention(q, q, q, implementation="xla").sum())(_HEADS), 8),
        (lambda: cached_attention(_TIME, _TIME, _TIME, 3, implementation="xla"), 5),
        (lambda: winograd_conv2d(_HEADS, _FILTERS), 3),
        (lambda: optimized_gemm(_SQUARE, _SQUARE, implementation="xla"), 3),
        (lambda: linear_recurrence(_SQUARE, _SQUARE, implementation="xla"), 3),
        (lambda: selective_scan(_TIME, _STEPS, _RATES, _TIME, _TIME, implementation="xla"), 5),
        (lambda: matmul(_SQUARE, _SQUARE, semiring="min_plus", implementation="xla"), 4),
        (lambda: nearest_code(_SQUARE, _SQUARE, implementation="xla"), 1),
        (lambda: nearest_code(_SQUARE, _SQUARE, implementation="cpu"), 1),
    ],
)
def test_a_call_is_one_program_compiled_once(call: Any, most: int):
    jax.clear_caches()
    before = _compiled[0]
    first = call()
    assert 1 <= _compiled[0] - before <= most  # a few for what stands around the operation
    before = _compiled[0]
    jax.tree.map(np.testing.assert_array_equal, call(), first)
    assert _compiled[0] == before
