"""What language models are made of: products with weights, norms, rotary positions, caches, recurrences."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from capibara.compose.backends.jax_stacked import read, write
from capibara.compose.errors import InputError

__all__ = [
    "attention",
    "cached_attention",
    "cached_conv",
    "causal_conv",
    "continued_scan",
    "dense",
    "dropout",
    "fold",
    "group_merge",
    "layer_norm",
    "lookup",
    "merge",
    "positions",
    "project",
    "quantise",
    "rms_norm",
    "rotary_table",
    "rotate",
    "selective_scan",
    "unembed",
]

Array = jax.Array


def _dot(x: Array, w: Array, accumulate: str) -> Array:
    """``x [*b, k] @ w [k, n]``, summed in ``accumulate``, returned in the wider of their dtypes."""
    # Two axes, not three: the gradient of w then is one plain product, where XLA's CPU compiler would first copy
    # the (fused) gradient of the output into transposed order.
    flat = _joined(x, 0, x.ndim - 1)
    out = lax.dot_general(flat, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.dtype(accumulate))
    return out.astype(jnp.result_type(x, w)).reshape(*x.shape[:-1], w.shape[1])


def dense(x: Array, weight: Array, accumulate: str) -> Array:
    return _dot(x, weight, accumulate)


def _joined(x: Array, first: int, last: int | None = None) -> Array:
    """``x`` with its dimensions ``first … last - 1`` made one (no ``-1``, which arrays without elements refuse)."""
    shape = x.shape
    last = len(shape) if last is None else last
    return x.reshape(*shape[:first], math.prod(shape[first:last]), *shape[last:])


def project(x: Array, weight: Array, accumulate: str) -> Array:
    # One plain matrix product, not a contraction onto two dimensions: it is what every backend does fastest.
    flat = _joined(weight, 1)
    return _dot(x, flat, accumulate).reshape(*x.shape[:-1], *weight.shape[1:])


def merge(x: Array, weight: Array, accumulate: str) -> Array:
    return _dot(_joined(x, x.ndim - 2), _joined(weight, 0, 2), accumulate)


def unembed(x: Array, table: Array, accumulate: str) -> Array:
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = lax.dot_general(x, table, dims, preferred_element_type=jnp.dtype(accumulate))
    return out.astype(jnp.result_type(x, table))


def lookup(table: Array, indices: Array) -> Array:
    return jnp.take(table, indices, axis=0, mode="clip")


def _scaled(x: Array, scale: Array | None, offset: float) -> Array:
    """``x * (scale + offset)`` in x's dtype."""
    if scale is None:
        return x
    wide = scale.astype(x.dtype)
    return x * (wide + offset if offset else wide)


def rms_norm(
    x: Array,
    scale: Array | None = None,
    *,
    epsilon: float,
    accumulate: str,
    offset: float = 0.0,
    dims: int = 1,
) -> Array:
    wide, axes = x.astype(accumulate), tuple(range(-dims, 0))
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)
    out = wide * inverse
    return _scaled(out, scale, offset).astype(x.dtype)


def layer_norm(
    x: Array,
    scale: Array | None = None,
    *,
    epsilon: float,
    accumulate: str,
    offset: float = 0.0,
    dims: int = 1,
) -> Array:
    wide, axes = x.astype(accumulate), tuple(range(-dims, 0))
    wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)
    out = wide * inverse
    return _scaled(out, scale, offset).astype(x.dtype)


def positions(like: Array, start: Array) -> tuple[Array, Array]:
    start = jnp.asarray(start, jnp.int32)
    count = like.shape[-1]
    return start + jnp.arange(count, dtype=jnp.int32), start + count


def rotary_table(
    positions: Array,
    dim: int,
    theta: float,
    accumulate: str,
    frequencies: tuple[float, ...] | None = None,
    factor: float = 1.0,
) -> tuple[Array, Array]:
    if frequencies is None:
        inverse = jnp.asarray(theta, accumulate) ** (-jnp.arange(0, dim, 2, dtype=accumulate) / dim)
    else:
        inverse = jnp.asarray(frequencies, accumulate)
    angle = positions[..., None].astype(accumulate) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    # cos and sin stay in the accumulation dtype: positions past 256 are not exact in bfloat16.
    turned, wide = 2 * cos.shape[-1], x.astype(cos.dtype)
    a, b = jnp.split(wide if turned == x.shape[-1] else wide[..., :turned], 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if turned < x.shape[-1]:
        parts.append(wide[..., turned:])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def attention(
    query: Array,
    key: Array,
    value: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    from capibara.ops.attention import flash_attention

    return flash_attention(
        query, key, value, use_causal_mask=causal, window=window, softcap=softcap, scale=scale, layout="bshd"
    )


def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    position: Array,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    from capibara.ops.attention import cached_attention as attend

    new, places = query.shape[1], key_cache.shape[2]
    if new > places:
        raise InputError(
            f"{new} tokens do not fit a cache of {places} positions: make a longer cache "
            "(init_cache(batch_size, max_length)) or feed fewer tokens"
        )
    _check_room(position, new, places)
    position = jnp.asarray(position, jnp.int32)
    zero = jnp.zeros((), jnp.int32)  # a Python 0 would be int64 while 64-bit numbers are on
    start = (zero, zero, position, zero)
    key_cache = write(key_cache, jnp.swapaxes(key, 1, 2), start)
    value_cache = write(value_cache, jnp.swapaxes(value, 1, 2), start)
    at = jnp.broadcast_to(position + jnp.arange(new, dtype=jnp.int32), query.shape[:2])
    # No copies: the products of attention take their operands in any order of dimensions.
    keys, values = (jnp.swapaxes(read(cache), 1, 2) for cache in (key_cache, value_cache))
    out = attend(query, keys, values, at, window=window, softcap=softcap, scale=scale)
    return out, key_cache, value_cache


def _check_room(position: Any, new: int, places: int) -> None:
    """Refuse rows past the end of a cache, which would be written over its last ones, if the position is known."""
    if isinstance(position, Tracer):
        return
    at = int(position)
    if not 0 <= at <= places - new:
        raise InputError(
            f"position {at} and {new} new token{'s' * (new != 1)} need {at + new} places, the cache has {places}: "
            "make a longer cache (init_cache(batch_size, max_length)), or start a new one from the last tokens"
        )


def causal_conv(x: Array, weight: Array, bias: Array) -> Array:
    from capibara.ops.conv import causal_conv1d

    out, _ = causal_conv1d(_joined(x, 2), _joined(weight, 1), _joined(bias, 0))
    return out.reshape(x.shape)


def cached_conv(x: Array, weight: Array, bias: Array, tail: Array) -> tuple[Array, Array]:
    from capibara.ops.conv import causal_conv1d

    before = _joined(tail, 2).astype(x.dtype)
    out, after = causal_conv1d(_joined(x, 2), _joined(weight, 1), _joined(bias, 0), state=before)
    return out.reshape(x.shape), after.reshape(tail.shape).astype(tail.dtype)


def selective_scan(
    x: Array, step: Array, rate: Array, write: Array, read: Array, chunk_size: int | None
) -> Array:
    from capibara.ops.scan import selective_scan as scan

    return scan(x, step, rate, write, read, chunk_size=chunk_size)[0].astype(x.dtype)


def continued_scan(
    x: Array, step: Array, rate: Array, write: Array, read: Array, memory: Array, chunk_size: int | None
) -> tuple[Array, Array]:
    from capibara.ops.scan import selective_scan as scan

    out, after = scan(x, step, rate, write, read, initial_state=memory, chunk_size=chunk_size)
    return out.astype(x.dtype), after.astype(memory.dtype)


def group_merge(x: Array) -> Array:
    return _joined(x, x.ndim - 2)


def fold(key: Array | None, index: int) -> Array | None:
    """The key of one operation, from the key of the call."""
    return None if key is None else jax.random.fold_in(key, index)


def dropout(x: Array, rate: float, key: Array | None, train: bool) -> Array:
    if not train or rate == 0.0:
        return x
    if key is None:
        raise InputError("a model with dropout needs randomness in training: pass key=jax.random.key(…)")
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def quantise(
    x: Array,
    codebook: Array,
    cluster_size: Array,
    codebook_sum: Array,
    decay: float,
    commitment_weight: float,
    dead_code_threshold: float,
    epsilon: float,
    implementation: str,
    key: Array | None,
    train: bool,
) -> tuple[Array, ...]:
    from capibara.ops.vq import vector_quantise

    state = {"codebook": codebook, "cluster_size": cluster_size, "codebook_sum": codebook_sum}
    quantized, indices, metrics, after = vector_quantise(
        state,
        x,
        train=train,
        decay=decay,
        commitment_weight=commitment_weight,
        dead_code_threshold=dead_code_threshold,
        epsilon=epsilon,
        implementation=implementation,
        key=key,
    )
    return (
        quantized,
        indices,
        metrics["commitment_loss"],
        metrics["perplexity"],
        metrics["usage"],
        after["codebook"],
        after["cluster_size"],
        after["codebook_sum"],
    )
