"""What language models are made of: products with weights, norms, rotary positions, caches, recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from capibara.compose.backends.cache_room import check_end, check_room
from capibara.compose.backends.jax_ops.elementwise import multiply, silu
from capibara.compose.backends.jax_stacked import read, write, write_places
from capibara.compose.errors import InputError
from capibara.native.levels import NF4

__all__ = [
    "attention",
    "cached_attention",
    "cached_conv",
    "causal_conv",
    "continued_scan",
    "dense",
    "dropout",
    "each_product",
    "fan_out",
    "fold",
    "gated",
    "group_merge",
    "layer_norm",
    "lookup",
    "merge",
    "positions",
    "products",
    "project",
    "quantise",
    "quantised_product",
    "ragged_cached_attention",
    "ragged_cached_conv",
    "ragged_continued_scan",
    "ragged_positions",
    "rms_norm",
    "rotary_table",
    "rotate",
    "segment_attention",
    "segment_conv",
    "segment_scan",
    "selective_scan",
    "unembed",
]

Array = jax.Array


def _dot(x: Array, w: Array, accumulate: str) -> Array:
    """``x [*b, k] @ w [k, n]``, summed in ``accumulate``, returned in the wider of their dtypes."""
    from capibara.ops.linalg import few_rows  # a start that traces nothing goes without it

    # Two axes, not three: the gradient of w then is one plain product, where XLA's CPU compiler would first copy
    # the (fused) gradient of the output into transposed order.
    flat = _joined(x, 0, x.ndim - 1)
    if few_rows.takes(flat, w, accumulate):
        return few_rows.product(flat, w).reshape(*x.shape[:-1], w.shape[1])
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


def each_product(dense: Callable[..., Array], project: Callable[..., Array]) -> Callable[..., Any]:
    """``products(x, *weights, accumulate)``: of each weight by itself."""

    def products(x: Any, *weights: Array, accumulate: str) -> tuple[Array, ...]:
        return tuple((dense if w.ndim == 2 else project)(x, w, accumulate=accumulate) for w in weights)

    return products


products = each_product(dense, project)


def fan_out(x: Array, axis: str) -> Array:
    """``x``, which several products read; on a mesh see :mod:`capibara.compose.backends.jax_fan_out`."""
    return x


def gated(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``; for CPUs see :mod:`capibara.compose.backends.jax_cpu`."""
    return multiply(silu(gate), up)


def merge(x: Array, weight: Array, accumulate: str) -> Array:
    return _dot(_joined(x, x.ndim - 2), _joined(weight, 0, 2), accumulate)


def quantised_product(
    x: Array, codes: Array, scales: Array, kind: str, ins: int, outs: tuple[int, ...], group: int
) -> Array:
    from capibara.ops.linalg import quantised_matmul

    levels = None if kind == "int8" else jnp.asarray(NF4, jnp.float32)
    codes = codes.astype("int8" if kind == "int8" else "uint8")  # as inputs of a model they are int32
    out = quantised_matmul(_joined(x, x.ndim - ins), codes, scales, levels, group=group)
    return out.reshape(*x.shape[: x.ndim - ins], *outs)


def unembed(x: Array, table: Array, accumulate: str) -> Array:
    from capibara.ops.linalg import few_rows

    flat = _joined(x, 0, x.ndim - 1)
    if few_rows.takes(flat, table, accumulate, transposed=True):
        return few_rows.product(flat, table, transposed=True).reshape(*x.shape[:-1], table.shape[0])
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = lax.dot_general(x, table, dims, preferred_element_type=jnp.dtype(accumulate))
    return out.astype(jnp.result_type(x, table))


def lookup(table: Array, indices: Array) -> Array:
    from capibara.ops.linalg import few_rows

    return few_rows.lookup(table, indices)


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
    groups: int = 1,
) -> Array:
    wide, axes = x.astype(accumulate), tuple(range(-dims, 0))
    if groups > 1:
        wide = wide.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)
    out = (wide * inverse).reshape(x.shape)
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


def ragged_positions(segments: Array, start: Array) -> tuple[Array, Array, Array]:
    real = segments != 0
    start = jnp.asarray(start, jnp.int32)
    ends = start[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32)
    return jnp.where(real, ends - 1, 0), jnp.where(real, ends - 1, -1), ends[:, -1]


def rotary_table(
    positions: Array,
    dim: int,
    theta: float,
    accumulate: str,
    frequencies: tuple[float, ...] | None = None,
    factor: float = 1.0,
) -> tuple[Array, Array]:
    from capibara.ops.rotary.table import rotary_table as table

    return table(positions, dim, theta, accumulate, frequencies, factor)


def rotate(
    x: Array,
    cos: Array,
    sin: Array,
    interleaved: bool = False,
    last: bool = False,
    *,
    implementation: str = "xla",
) -> Array:
    # "auto" would only add a choice of platforms to programs for others than TPUs (jax_tpu has it).
    from capibara.ops.rotary import rotary

    layout = "pairs" if interleaved else "halves"
    start = x.shape[-1] - 2 * cos.shape[-1] if last else 0
    # cos and sin stay in the accumulation dtype: positions past 256 are not exact in bfloat16.
    part = x[..., start:] if start else x
    turned = rotary(part, cos=cos, sin=sin, layout=layout, implementation=implementation)
    return jnp.concatenate([x[..., :start], turned], axis=-1) if start else turned


def attention(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None = None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    from capibara.ops.attention import flash_attention

    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "layout": "bshd"}
    return flash_attention(query, key, value, use_causal_mask=causal, sinks=sinks, **options)


def segment_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Array,
    sinks: Array | None = None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    from capibara.ops.attention import flash_attention

    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "layout": "bshd"}
    options |= {"segment_ids": segments, "sinks": sinks}
    return flash_attention(query, key, value, use_causal_mask=causal, **options)


def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    position: Array,
    sinks: Array | None = None,
    *,
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
    if not isinstance(position, Tracer):
        check_room(int(position), new, places)
    position = jnp.asarray(position, jnp.int32)
    zero = jnp.zeros((), jnp.int32)  # a Python 0 would be int64 while 64-bit numbers are on
    start = (zero, zero, position, zero)
    key_cache = write(key_cache, jnp.swapaxes(key, 1, 2), start)
    value_cache = write(value_cache, jnp.swapaxes(value, 1, 2), start)
    at = jnp.broadcast_to(position + jnp.arange(new, dtype=jnp.int32), query.shape[:2])
    # No copies: the products of attention take their operands in any order of dimensions.
    keys, values = (jnp.swapaxes(read(cache), 1, 2) for cache in (key_cache, value_cache))
    out = attend(query, keys, values, at, sinks=sinks, window=window, softcap=softcap, scale=scale)
    return out, key_cache, value_cache


def ragged_cached_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
    sinks: Array | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    from capibara.ops.attention import cached_attention as attend

    places = key_cache.shape[2]
    if not isinstance(slots, Tracer) and slots.size:
        check_end(int(slots.max()), places)
    key_cache = write_places(key_cache, jnp.swapaxes(key, 1, 2), slots)
    value_cache = write_places(value_cache, jnp.swapaxes(value, 1, 2), slots)
    keys, values = (jnp.swapaxes(read(cache), 1, 2) for cache in (key_cache, value_cache))
    at = jnp.maximum(slots, 0)
    out = attend(query, keys, values, at, sinks=sinks, window=window, softcap=softcap, scale=scale)
    return out, key_cache, value_cache


def causal_conv(x: Array, weight: Array, bias: Array | None = None) -> Array:
    from capibara.ops.conv import causal_conv1d

    flat = None if bias is None else _joined(bias, 0)
    out, _ = causal_conv1d(_joined(x, 2), _joined(weight, 1), flat)
    return out.reshape(x.shape)


def cached_conv(x: Array, weight: Array, tail: Array, bias: Array | None = None) -> tuple[Array, Array]:
    from capibara.ops.conv import causal_conv1d

    before = _joined(tail, 2).astype(x.dtype)
    flat = None if bias is None else _joined(bias, 0)
    out, after = causal_conv1d(_joined(x, 2), _joined(weight, 1), flat, state=before)
    return out.reshape(x.shape), after.reshape(tail.shape).astype(tail.dtype)


def _starts(segments: Array) -> Array:
    """Where another run of equal numbers begins; the first position is part of the first run."""
    changes = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(changes, [(0, 0), (min(1, segments.shape[1]), 0)])


def segment_conv(x: Array, weight: Array, segments: Array, bias: Array | None = None) -> Array:
    runs = jnp.cumsum(_starts(segments), axis=1, dtype=jnp.int32)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    each = (..., *[None] * (x.ndim - 2))
    total = x.astype(wide) * weight[-1].astype(wide)
    if bias is not None:
        total = total + bias.astype(wide)
    for back in range(1, min(weight.shape[0], x.shape[1])):
        own = runs[:, back:] == runs[:, :-back]
        past = jnp.where(own[each], x[:, :-back], 0).astype(wide) * weight[-1 - back].astype(wide)
        total = total + jnp.pad(past, [(0, 0), (back, 0)] + [(0, 0)] * (x.ndim - 2))
    return total.astype(x.dtype)


def ragged_cached_conv(
    x: Array, weight: Array, tail: Array, slots: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    length, before = x.shape[1], tail.shape[1]
    each = (..., *[None] * (x.ndim - 2))
    real = slots >= 0
    if length == 1:
        out, after = cached_conv(x, weight, tail, bias)
        return jnp.where(real[each], out, 0), jnp.where(real[each], after, tail)
    # What is real is moved to the end of its row, and the tail before it: then it is a convolution like any other.
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    padding = length - count[:, -1:]
    places = jnp.where(real, before + padding + count - 1, before + length)  # padding goes nowhere
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    whole = jnp.zeros((x.shape[0], before + length, *x.shape[2:]), x.dtype)
    whole = whole.at[rows, padding + jnp.arange(before, dtype=jnp.int32)].set(tail.astype(x.dtype))
    whole = whole.at[rows, places].set(x, mode="drop")
    out, after = cached_conv(whole[:, before:], weight, whole[:, :before], bias)
    out = jnp.take_along_axis(out, (places - before)[each], axis=1, mode="clip")
    return jnp.where(real[each], out, 0), after.astype(tail.dtype)


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


def segment_scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    segments: Array,
    chunk_size: int | None,
) -> Array:
    from capibara.ops.scan import selective_scan as scan

    step = jnp.where(segments[..., None] == 0, 0, step)
    starts = _starts(segments)
    return scan(x, step, rate, write, read, starts=starts, chunk_size=chunk_size)[0].astype(x.dtype)


def ragged_continued_scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    memory: Array,
    slots: Array,
    chunk_size: int | None,
) -> tuple[Array, Array]:
    # A step of 0 leaves the state as it is.
    step = jnp.where(slots[..., None] < 0, 0, step)
    return continued_scan(x, step, rate, write, read, memory, chunk_size)


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
