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
from capibara.ops.conv import causal_conv1d
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.linalg import optimized_gemm
from capibara.ops.scan import lif, linear_recurrence, selective_scan
from capibara.ops.vq import initial_codebook_state, nearest_code, vector_quantise

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape)


X = jnp.ones((3, 2))
STATE = initial_codebook_state(jax.random.key(0), 4, 2)
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
