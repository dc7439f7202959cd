"""Sampling against sets and frequencies worked out in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from capibara.errors import ConfigError
from capibara.serve.sampling import Sampling, keep_top_k, keep_top_p, sample

# A fixed size, so that nothing is compiled anew; few distinct values, so that there are ties.
LOGITS = arrays(np.float32, 12, elements=st.integers(-6, 6).map(np.float32))


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    return exponentials / exponentials.sum()


def kept(masked: jax.Array) -> np.ndarray:
    return np.isfinite(np.asarray(masked))


@given(logits=LOGITS, k=st.integers(0, 14))
@settings(deadline=None)
def test_top_k_keeps_the_k_largest(logits: np.ndarray, k: int) -> None:
    masked = keep_top_k(device_array(logits), k)
    expected = set(sorted(range(12), key=lambda token: (-logits[token], token))[: k or 12])
    assert set(np.flatnonzero(kept(masked)).tolist()) == expected
    np.testing.assert_array_equal(np.asarray(masked)[kept(masked)], logits[kept(masked)])


@given(logits=LOGITS, p=st.floats(0.01, 1.0))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: np.ndarray, p: float) -> None:
    mask = kept(keep_top_p(device_array(logits), p))
    truth = probabilities(logits)
    order = sorted(range(12), key=lambda token: (-logits[token], token))
    count = int(mask.sum())
    # A prefix of the order of likelihood …
    assert set(np.flatnonzero(mask).tolist()) == set(order[:count])
    # … that reaches p, and would not with one token less (up to float32 rounding).
    assert truth[order[:count]].sum() >= p - 1e-5
    if 1 < count < 12 or p < 1:
        assert count == 1 or truth[order[: count - 1]].sum() < p + 1e-5


def test_the_likeliest_token_is_always_kept() -> None:
    assert kept(keep_top_p(device_array([0.0, 9.0, 0.0]), 1e-30)).tolist() == [False, True, False]


def test_rows_are_independent() -> None:
    logits = device_array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert kept(keep_top_k(logits, 1)).tolist() == [[False, False, True], [True, False, False]]
    assert kept(keep_top_p(logits, 0.5)).tolist() == [[False, False, True], [True, False, False]]


def test_zero_temperature_takes_the_likeliest_whatever_the_key() -> None:
    logits = device_array([[0.0, 5.0, 4.9], [7.0, 0.0, 7.0]])
    for seed in range(5):
        assert sample(jax.random.key(seed), logits, Sampling(temperature=0.0)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(temperature=0.5), np.array([16, 4, 1, 1]) / 22),
        (Sampling(temperature=2.0), np.sqrt([8, 4, 2, 2]) / np.sqrt([8, 4, 2, 2]).sum()),
        (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_p=0.8), [4 / 7, 2 / 7, 1 / 7, 0]),
        # top-k first: of the three that are left the first two have 6/7.
        (Sampling(top_k=3, top_p=0.85), [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies(sampling: Sampling, expected: Any) -> None:
    logits = jnp.log(device_array([4.0, 2.0, 1.0, 1.0]))
    count = 20_000
    drawn = sample(jax.random.key(0), jnp.broadcast_to(logits, (count, 4)), sampling)
    assert drawn.dtype == jnp.int32
    found = np.bincount(np.asarray(drawn), minlength=4) / count
    expected = np.asarray(expected)
    assert (found[expected == 0] == 0).all()
    # Five standard deviations of a frequency.
    np.testing.assert_array_less(np.abs(found - expected), 5 * np.sqrt(0.25 / count))


def test_the_same_key_gives_the_same_tokens() -> None:
    logits = jax.random.normal(jax.random.key(1), (50, 40))
    first, again, other = (sample(jax.random.key(seed), logits, Sampling()).tolist() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
    ],
)
def test_values_outside_their_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)  # pyright: ignore[reportArgumentType]
