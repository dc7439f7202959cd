"""Operations that are primitives of their own, under ``jax.disable_jit``: they still compile what they compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops.linalg import quantised_matmul
from capibara.ops.one_device import on_one_device
from capibara.ops.scan import linear_recurrence

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
