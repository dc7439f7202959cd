"""Arguments that do not fit, and NumPy's float64: errors by name, and no warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.errors import CapibaraError
from capibara.ops import explain, tropical
from capibara.ops.attention import (
    cached_attention,
    flash_attention,
    fused_multihead_attention,
    multihead_attention_params,
    paged_attention,
)
from capibara.ops.collective import async_all_reduce, zero_residual
from capibara.ops.conv import causal_conv1d, conv2d, winograd_conv2d
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.linalg import optimized_gemm
from capibara.ops.scan import lif, linear_recurrence, selective_scan, semiring_scan
from capibara.ops.vq import (
    initial_codebook_state,
    nearest_code,
    residual_quantise,
    update_codebook,
    vector_quantise,
)

# Which arguments have no effect is for test_arguments_without_effect.py.
pytestmark = pytest.mark.filterwarnings("ignore::capibara.ops.OpWarning")

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape)


X = jnp.ones((3, 2))
Q = jnp.ones((1, 2, 2, 4))
KEY = jax.random.key(0)
STATE = initial_codebook_state(KEY, 4, 2)
IMAGE = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1))


def paged(**options: Any) -> Any:
    table, lengths = jnp.zeros((1, 1), jnp.int32), jnp.full(1, 2, jnp.int32)
    return paged_attention(Q, Q, Q, table, lengths, **options)


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
    "text as a cap": ("softcap must be a number", lambda: flash_attention(Q, Q, Q, softcap="a")),  # type: ignore[arg-type]
    "an infinite cap": ("softcap must be finite", lambda: flash_attention(Q, Q, Q, softcap=np.inf)),
    "NumPy's text as a scale": (
        "scale must be a number",
        lambda: flash_attention(Q, Q, Q, scale=np.str_("a")),  # type: ignore[arg-type]
    ),
    "a complex scale": (
        "scale must be a number",
        lambda: flash_attention(Q, Q, Q, scale=np.complex64(1)),  # type: ignore[arg-type]
    ),
    "NumPy's truth as a cap": (
        "softcap must be a number",
        lambda: flash_attention(Q, Q, Q, softcap=np.True_),  # type: ignore[arg-type]
    ),
    "a scale beyond floats": (
        "scale must be a finite number",
        lambda: flash_attention(Q, Q, Q, scale=10**400),
    ),
    "text as a scale": ("scale must be a number", lambda: flash_attention(Q, Q, Q, scale="a")),  # type: ignore[arg-type]
    "a traced scale": (
        "flash_attention: scale must be a number that is known while tracing, .*got .*Trace.*Remedy: scale=1.0 and a ",
        lambda: jax.jit(lambda s: flash_attention(Q, Q, Q, scale=s))(0.5),
    ),
    "the derivative of a scale": (
        "flash_attention: scale must be a number that is known while tracing",
        lambda: jax.grad(lambda s: flash_attention(Q, Q, Q, scale=s).sum())(0.5),
    ),
    "several scales": (
        "cached_attention: scale must be a number that is known while tracing",
        lambda: jax.vmap(lambda s: cached_attention(Q, Q, Q, 0, scale=s))(jnp.ones(2)),
    ),
    "a traced cap": (
        "paged_attention: softcap must be a number that is known while tracing, .*Remedy: a Python number",
        lambda: jax.jit(lambda s: paged(softcap=s))(0.5),
    ),
    "text as a mask": (
        "use_causal_mask must be True or False, got 'no'",
        lambda: flash_attention(Q, Q, Q, use_causal_mask="no"),  # type: ignore[arg-type]
    ),
    "a cached cap of text": ("softcap must be a number", lambda: cached_attention(Q, Q, Q, 0, softcap="a")),  # type: ignore[arg-type]
    "a cached scale of text": ("scale must be a number", lambda: cached_attention(Q, Q, Q, 0, scale="a")),  # type: ignore[arg-type]
    "positions that are none": ("query_positions must be int", lambda: cached_attention(Q, Q, Q, None)),  # type: ignore[arg-type]
    "a position beyond 32 bits": (
        "query_positions must be integers of 32 bits, got 1099511627776",
        lambda: cached_attention(Q, Q, Q, 2**40),  # type: ignore[arg-type]
    ),
    "a paged cap of text": ("softcap must be a number", lambda: paged(softcap="a")),
    "a paged cap without end": ("softcap must be finite", lambda: paged(softcap=np.inf)),
    "a paged scale of NaN": ("scale must be a finite number", lambda: paged(scale=np.nan)),
    "a list of parameters": (
        "params must be a dict .* got list",
        lambda: fused_multihead_attention(X[None], 2, params=[X]),  # type: ignore[arg-type]
    ),
    "parameters that are numbers": (
        "params must have the shapes .*got {'qkv_kernel': 'float'}",
        lambda: fused_multihead_attention(X[None], 2, params={"qkv_kernel": 1.0}),  # type: ignore[dict-item]
    ),
    "a cap far below": ("softcap must be finite and above 0", lambda: paged(softcap=-(10**400))),
    "a number as a key": (
        "key must be one key of jax.random.key",
        lambda: fused_multihead_attention(X[None], 2, key=3),  # type: ignore[arg-type]
    ),
    "text for biases": (
        "use_bias must be True or False",
        lambda: fused_multihead_attention(X[None], 2, use_bias="no"),  # type: ignore[arg-type]
    ),
    "parameters from a number": ("key must be one key", lambda: multihead_attention_params(3, 8, 2)),  # type: ignore[arg-type]
    "a width of text": ("embed_dim must be an int", lambda: multihead_attention_params(KEY, "8", 2)),  # type: ignore[arg-type]
    "parameters of integers": (
        "dtype must be floating point",
        lambda: multihead_attention_params(KEY, 8, 2, dtype=jnp.int32),
    ),
    "parameters of no type": (
        "dtype must be floating point, got 'float31'",
        lambda: multihead_attention_params(KEY, 8, 2, dtype="float31"),
    ),
    "heads that do not divide": (
        r"multihead_attention_params: num_heads=3 must divide embed_dim \(8\)",
        lambda: multihead_attention_params(KEY, 8, 3),
    ),
    "a threshold of NaN": ("threshold must be a number", lambda: lif(X, threshold=float("nan"))),
    "a residual of a number": (r"gradients\['w'\] must be an array", lambda: zero_residual({"w": 1.0})),
    "a codebook from a number": ("key must be one key", lambda: initial_codebook_state(0, 4, 2)),  # type: ignore[arg-type]
    "a draw from a number": (
        "key must be one key",
        lambda: vector_quantise(STATE, X, train=True, key=3),  # type: ignore[arg-type]
    ),
    "training by text": (
        "train must be True or False, got 'no'",
        lambda: vector_quantise(STATE, X, train="no"),  # type: ignore[arg-type]
    ),
    "codes over no axis": (
        "vector_quantise: no axis 'data' is bound here. Remedy: .*shard_map",
        lambda: vector_quantise(STATE, X, train=True, axis_name="data"),
    ),
    "codes over a number": (
        "axis_name must be a mesh axis name",
        lambda: update_codebook(STATE, X, jnp.zeros(3, int), axis_name=3),  # type: ignore[arg-type]
    ),
    "codes over no axes": (
        r"vector_quantise: axis_name must be .*at least one name.* or None; got \(\). "
        "Remedy: axis_name=None, for vectors that are not distributed",
        lambda: vector_quantise(STATE, X, train=True, axis_name=()),
    ),
    "codes over an axis twice": (
        r"each once, or None; got \('a', 'b', 'a'\). Remedy: axis_name=\('a', 'b'\)",
        lambda: update_codebook(STATE, X, jnp.zeros(3, int), axis_name=("a", "b", "a")),
    ),
    "a sum over no axes": (
        "async_all_reduce: .*Remedy: axis_name=None, for all axes of the jax.shard_map",
        lambda: async_all_reduce(X, axis_name=()),
    ),
    "a split outside": ("split_axis=99", lambda: radix_optimized_fft(X, use_parallel=True, split_axis=99)),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_by_name(what: str) -> None:
    says, call = BAD[what]
    with pytest.raises(CapibaraError, match=says):
        call()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_scale_that_is_learned_is_multiplied_into_the_query(implementation: str) -> None:
    """What the error about a traced scale says to do: the value and derivatives of plain attention."""
    q, k, v = (device_array(normal(1, 2, 5, 4), jnp.float32) for _ in range(3))

    def learned(scale: Any) -> Any:
        return jnp.sin(flash_attention(q * scale, k, v, scale=1.0, implementation=implementation)).sum()

    def plain(scale: Any) -> Any:
        shares = jax.nn.softmax(scale * jnp.einsum("bhqd,bhkd->bhqk", q, k))
        return jnp.sin(jnp.einsum("bhqk,bhkd->bhqd", shares, v)).sum()

    np.testing.assert_allclose(learned(0.7), plain(0.7), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(learned))(0.7), jax.grad(plain)(0.7), rtol=1e-4)


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
    out = flash_attention(q, k, device_array(k))  # NumPy's and JAX's beside each other
    assert (out.shape, out.dtype) == ((1, 2, length, 4), jnp.float32)
    new, cache = normal(1, length, 2, 4), normal(1, 4, 2, 4)
    assert cached_attention(new, cache, cache, 0).dtype == jnp.float32
    table: Any
    lengths: Any
    table, lengths = np.zeros((1, 1), np.int32), np.full(1, 2, np.int32)
    assert paged_attention(new, cache, cache, table, lengths).dtype == jnp.float32


@pytest.mark.slow
def test_numpy_float64_in_codebooks() -> None:
    quantized, _, metrics, _ = vector_quantise(STATE, normal(3, 2), train=True)
    assert quantized.dtype == metrics["commitment_loss"].dtype == jnp.float32
    state = initial_codebook_state(KEY, 4, 2, codebooks=2)
    assert residual_quantise(state, normal(3, 2), train=True)[0].dtype == jnp.float32


def test_a_convolution_without_results() -> None:
    for channels in (0, 2):
        kernel = jnp.ones((0, channels, 3))
        assert tropical.conv1d(jnp.ones((1, channels, 5)), kernel).shape == (1, 0, 3)


def test_numpy_whole_numbers_are_whole_numbers() -> None:
    one, x = np.int64(1), device_array(normal(3, 8), jnp.float32)
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
    x = device_array(normal(3, 2), jnp.float32)
    inside = update_codebook(STATE, x[:2], jnp.array([0, 3]))
    for outside in (4, -5):
        moved = update_codebook(STATE, x, jnp.array([0, -1, outside]))
        for name, want in inside.items():
            np.testing.assert_array_equal(moved[name], want)
