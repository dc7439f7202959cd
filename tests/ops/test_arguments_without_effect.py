"""Arguments that have no effect on CPUs say so, once, with a remedy; and in explain."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import OpWarning, explain
from capibara.ops.attention import fused_multihead_attention
from capibara.ops.conv import winograd_conv2d
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.linalg import fast_svd

SIGNAL = np.ones(64, np.complex64)
IMAGE, FILTERS = np.ones((1, 8, 8, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
LAYER = np.ones((1, 2, 8), np.float32)
MATRIX = device_array(np.random.default_rng(0).normal(size=(40, 50)), jnp.float32)

CALLS = {
    "radix": (radix_optimized_fft, (SIGNAL,), {"radix_factors": [2, 4, 8]}, "implementation='matmul'"),
    "bfloat16": (radix_optimized_fft, (SIGNAL,), {"precision": "bfloat16"}, "implementation='matmul'"),
    "parallel": (radix_optimized_fft, (SIGNAL,), {"use_parallel": True}, "use_parallel=False"),
    "tile": (winograd_conv2d, (IMAGE, FILTERS), {"tile_size": (4, 4)}, "implementation='winograd'"),
    "tile, strides": (
        winograd_conv2d,
        (IMAGE, FILTERS),
        {"tile_size": (4, 4), "strides": 2},
        "leave tile_size out",
    ),
    "dropout": (fused_multihead_attention, (LAYER, 2), {"dropout_rate": 0.1}, "key=jax.random.key"),
    "no rank": (fast_svd, (MATRIX,), {"use_randomized": True}, "rank="),
    "large rank": (fast_svd, (MATRIX, 30), {"use_randomized": True}, "a smaller rank"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_warns_and_explain_says_the_same(name: str):
    function, arguments, options, remedy = CALLS[name]
    jax.clear_caches()  # a warning is given when a call is traced
    with pytest.warns(OpWarning, match="Remedy: ") as caught:
        function(*arguments, **options)
    (said,) = {str(each.message) for each in caught}
    assert remedy in said
    (noted,) = explain(function, *arguments, **options).remarks
    assert noted in said
    assert f"note: {noted}" in str(explain(function, *arguments, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*arguments)


def test_it_is_shown_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            fused_multihead_attention(device_array(LAYER), 2, dropout_rate=0.2)
    assert len(caught) == 1


def test_a_rank_is_chosen_where_a_randomised_one_is_wanted():
    with pytest.warns(OpWarning, match="finds the 10 largest of 40"):
        _, s, _ = fast_svd(MATRIX, use_randomized=True)
    assert s.shape == (10,)
    assert fast_svd(MATRIX)[1].shape == (40,)
    jax.clear_caches()
    with pytest.warns(OpWarning, match="finds the 10 largest of 40"):
        s = fast_svd(MATRIX, compute_uv=False, use_randomized=True, implementation="reference")
    assert s.shape == (10,)


def test_booleans_of_numpy_are_booleans():
    yes, no = (explain(fast_svd, MATRIX, use_randomized=flag) for flag in (np.True_, np.False_))
    assert "finds the 10 largest of 40" in yes.remarks[0]
    assert no.remarks == ()
    assert explain(fast_svd, MATRIX, 3, use_randomized=np.False_).chosen == "reference"
