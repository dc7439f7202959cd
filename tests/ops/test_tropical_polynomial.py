"""Tropical polynomials that are evaluated line by line, against the product of the powers with the coefficients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import tropical

INF = np.inf


@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
def test_as_the_product_of_powers_and_coefficients(semiring: str) -> None:
    random = np.random.default_rng(0)
    lists = [
        random.integers(-9, 9, 5),
        [2.0],
        [-INF, 1, INF],
        [INF, -INF, 0, 3],
        [1, np.nan, 2],
        [INF] * 3,
        [-INF] * 3,
    ]
    points = device_array([-2.5, -0.0, 0.5, 3.0, INF, -INF, np.nan])
    for values in lists:
        coefficients = device_array(np.array(values, np.float32))
        want = tropical.polyval(coefficients, points, semiring=semiring, implementation="reference")
        np.testing.assert_array_equal(tropical.polyval(coefficients, points, semiring=semiring), want)


@pytest.mark.parametrize("semiring", ["max_plus", pytest.param("min_plus", marks=pytest.mark.slow)])
def test_gradients_go_to_the_lowest_exponent_that_reaches_the_value(semiring: str) -> None:
    coefficients = device_array([0.0, 0.0, -2.0, -1.0, -INF])
    points = device_array([-1.0, 0.0, 1.0, 2.5, INF])

    def total(c: jax.Array, x: jax.Array, implementation: str) -> jax.Array:
        found = tropical.polyval(c, x, semiring=semiring, implementation=implementation)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0) * jnp.arange(1.0, 6.0))

    want = jax.grad(total, (0, 1))(coefficients, points, "reference")
    for have, expected in zip(jax.grad(total, (0, 1))(coefficients, points, "auto"), want, strict=True):
        np.testing.assert_array_equal(have, expected)
    # Forward, twice, and over a batch.
    tangent = jax.jvp(lambda x: tropical.polyval(coefficients, x), (points[:4],), (jnp.ones(4),))[1]
    np.testing.assert_array_equal(tangent, [0, 0, 3, 3])
    assert jax.grad(jax.grad(lambda x: tropical.polyval(coefficients, x)))(2.0) == 0
    each = jax.vmap(lambda c: tropical.polyval(c, points))(jnp.stack([coefficients, coefficients + 1]))
    np.testing.assert_array_equal(each[1], each[0] + 1)


def test_many_coefficients_take_the_product() -> None:
    random = np.random.default_rng(1)
    coefficients = random.integers(-99, 99, 65).astype(np.float32)
    points = random.integers(-9, 9, (3, 4)).astype(np.float32)
    want = (coefficients + np.arange(65) * points[..., None]).max(-1)
    many, places = device_array(coefficients), device_array(points)
    np.testing.assert_array_equal(tropical.polyval(many, places), want)
    want = (coefficients[:64] + np.arange(64) * points[..., None]).max(-1)
    np.testing.assert_array_equal(tropical.polyval(many[:64], places), want)
