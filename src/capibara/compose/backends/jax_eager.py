"""Functions of JAX for a backend's methods, beside the operations of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.compose.backends.conversion import as_numbers

Array = jax.Array

tangent, expm1, log1p, log2, rsqrt, round_even = jnp.tan, jnp.expm1, jnp.log1p, jnp.log2, lax.rsqrt, jnp.round
is_infinite, is_finite = jnp.isinf, jnp.isfinite
product, outer = jnp.matmul, jnp.outer
log_softmax = jax.nn.log_softmax
transform_jit, transform_grad, transform_value_and_grad = jax.jit, jax.grad, jax.value_and_grad
transform_vmap, transform_jacrev, transform_jacfwd = jax.vmap, jax.jacrev, jax.jacfwd


def transform_vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]:
    return jax.vjp(fn, *primals, has_aux=has_aux)


def array(values: Any, dtype: str) -> Array:
    return jnp.array(values, dtype)


def linspace(start: float, stop: float, count: int, dtype: str) -> Array:
    return jnp.linspace(start, stop, count, dtype=dtype)


def true_divide(left: Any, right: Any, dtype: str) -> Array:
    whole = not any(jnp.issubdtype(jnp.result_type(v), jnp.floating) for v in (left, right))
    return jnp.divide(left, right).astype(dtype) if whole else jnp.divide(left, right)


def total(x: Array, axis: Any, keepdims: bool) -> Array:
    return jnp.sum(x, axis=axis, keepdims=keepdims, dtype=jnp.int32 if x.dtype == bool else x.dtype)


def average(x: Array, axis: Any, keepdims: bool, dtype: str) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(dtype)
    return jnp.mean(x, axis=axis, keepdims=keepdims)


def cumulative_sum(x: Array, axis: int) -> Array:
    return jnp.cumsum(x, axis=axis, dtype=jnp.int32 if x.dtype == bool else x.dtype)


def sort(x: Array, axis: int, descending: bool) -> Array:
    return jnp.sort(x, axis=axis, descending=descending)


def argsort(x: Array, axis: int, descending: bool) -> Array:
    return jnp.argsort(x, axis=axis, descending=descending).astype(jnp.int32)


def top_k(x: Array, k: int) -> Array:
    return lax.top_k(x, k)[0]


def reverse(x: Array, axis: int) -> Array:
    return jnp.flip(x, axis)


def unique_values(x: Array, inverse: bool, counts: bool) -> Any:
    found = jnp.unique(x, return_inverse=inverse, return_counts=counts)
    if not (inverse or counts):
        return found
    return (found[0], *(v.astype(jnp.int32) for v in found[1:]))


def split_key(key: Array, num: int) -> Array:
    return jax.random.split(key, num)


def draw_normal(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def draw_uniform(key: Array, shape: tuple[int, ...], low: float, high: float, dtype: str) -> Array:
    return jax.random.uniform(key, shape, jnp.dtype(dtype), low, high)


def draw_integers(key: Array, shape: tuple[int, ...], low: int, high: int, dtype: str) -> Array:
    return jax.random.randint(key, shape, low, high, jnp.dtype(dtype))


def choose(probs: Array, uniform: Array, count: int, replacement: bool) -> Array:
    # Gumbel's noise makes the largest score a draw (replacement: one row of noise a draw), the k largest k draws.
    noise = -jnp.log(-jnp.log(jnp.clip(uniform, 1e-20, 1 - 6e-8)))
    logs = jnp.log(probs.astype(noise.dtype))
    if replacement:
        return jnp.argmax(logs[..., None, :] + noise, axis=-1).astype(jnp.int32)
    return lax.top_k(logs + noise, count)[1].astype(jnp.int32)


def to_host(x: Array) -> np.ndarray:
    return np.array(x)


def as_array(value: Any, dtype: str | None, default: str) -> Array:
    """``dtype`` None: floats become ``default``, integers int32, bools stay."""
    if isinstance(value, jax.Array):
        if dtype is None:
            kind = jnp.issubdtype
            dtype = (
                default if kind(value.dtype, jnp.floating) else ("bool" if value.dtype == bool else "int32")
            )
        return jnp.array(value, dtype)
    return jnp.array(as_numbers(value, dtype, default))
