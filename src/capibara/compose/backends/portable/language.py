"""What language models are made of: see :mod:`capibara.compose.backends.jax_ops.language`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capibara.compose.backends.cache_room import check_end, check_room
from capibara.compose.backends.portable.indexing import one_hot
from capibara.compose.backends.portable.linalg import masked_softmax
from capibara.compose.backends.portable.space import space
from capibara.compose.errors import InputError
from capibara.native.levels import NF4

Array = Any


def joined(x: Array, first: int, last: int | None = None) -> Array:
    """``x`` with its dimensions ``first … last - 1`` made one."""
    shape = tuple(x.shape)
    last = len(shape) if last is None else last
    return space(x).reshape(x, (*shape[:first], math.prod(shape[first:last]), *shape[last:]))


def dense(x: Array, weight: Array, accumulate: str) -> Array:
    """``x [*b, k] @ w [k, n]``, summed in ``accumulate``, returned in x's dtype."""
    xp = space(x)
    wide = xp.wide(x, accumulate)
    flat = xp.matmul(xp.astype(joined(x, 0, x.ndim - 1), wide), xp.astype(weight, wide))
    return xp.reshape(xp.astype(flat, xp.dtype_of(x)), (*x.shape[:-1], weight.shape[1]))


def project(x: Array, weight: Array, accumulate: str) -> Array:
    out = dense(x, joined(weight, 1), accumulate)
    return space(x).reshape(out, (*x.shape[:-1], *weight.shape[1:]))


def merge(x: Array, weight: Array, accumulate: str) -> Array:
    return dense(joined(x, x.ndim - 2), joined(weight, 0, 2), accumulate)


def quantised_product(
    x: Array, codes: Array, scales: Array, kind: str, ins: int, outs: tuple[int, ...], group: int
) -> Array:
    xp = space(x)
    inner = math.prod(x.shape[x.ndim - ins :])
    wide = xp.wide(x)
    if kind == "nf4":
        pairs = xp.stack([codes & 15, codes >> 4], -1)
        places = joined(xp.astype(pairs, "int32"), 1)[:, :inner]
        weight = xp.take(xp.asarray(NF4, wide, x), places, 0)
    else:
        weight = xp.astype(codes, wide)
    of = xp.arange(0, inner, 1, "int32", x) // group
    weight = weight * xp.astype(xp.take(scales, of, 1), wide)
    out = xp.matmul(xp.astype(joined(x, x.ndim - ins), wide), xp.transpose(weight))
    return xp.reshape(xp.astype(out, xp.dtype_of(x)), (*x.shape[: x.ndim - ins], *outs))


def unembed(x: Array, table: Array, accumulate: str) -> Array:
    return dense(x, space(table).transpose(table), accumulate)


def lookup(table: Array, indices: Array) -> Array:
    return space(table).take(table, indices, 0)


def _scaled(x: Array, scale: Array | None, offset: float, accumulate: str) -> Array:
    """``x * (scale + offset)``, where x is in the accumulation dtype."""
    if scale is None:
        return x
    wide = space(x).astype(scale, accumulate)
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
    if dims > 1:
        flat = None if scale is None else joined(scale, 0)
        out = rms_norm(joined(x, x.ndim - dims), flat, epsilon=epsilon, accumulate=accumulate, offset=offset)
        return space(x).reshape(out, tuple(x.shape))
    xp = space(x)
    wide, shape = xp.astype(x, accumulate), tuple(x.shape)
    if groups > 1:
        wide = xp.reshape(wide, (*shape[:-1], groups, shape[-1] // groups))
    inverse = 1 / xp.sqrt(xp.sum(wide * wide, -1, True) / wide.shape[-1] + epsilon)
    out = xp.reshape(wide * inverse, shape)
    return xp.astype(_scaled(out, scale, offset, accumulate), xp.dtype_of(x))


def layer_norm(
    x: Array,
    scale: Array | None = None,
    *,
    epsilon: float,
    accumulate: str,
    offset: float = 0.0,
    dims: int = 1,
) -> Array:
    if dims > 1:
        flat = None if scale is None else joined(scale, 0)
        out = layer_norm(
            joined(x, x.ndim - dims), flat, epsilon=epsilon, accumulate=accumulate, offset=offset
        )
        return space(x).reshape(out, tuple(x.shape))
    xp = space(x)
    wide = xp.astype(x, accumulate)
    wide = wide - xp.sum(wide, -1, True) / x.shape[-1]
    inverse = 1 / xp.sqrt(xp.sum(wide * wide, -1, True) / x.shape[-1] + epsilon)
    out = wide * inverse
    return xp.astype(_scaled(out, scale, offset, accumulate), xp.dtype_of(x))


def positions(like: Array, start: Array) -> tuple[Array, Array]:
    xp = space(like, start)
    count = like.shape[-1]
    start = xp.asarray(start, "int32", like)
    return start + xp.arange(0, count, 1, "int32", like), start + count


def ragged_positions(segments: Array, start: Array) -> tuple[Array, Array, Array]:
    xp = space(segments, start)
    real = segments != 0
    ends = start[:, None] + xp.astype(xp.cumsum(xp.astype(real, "int32"), 1), "int32")
    count = xp.astype(real, "int32")
    return (ends - 1) * count, ends * count - 1, ends[:, -1]


def rotary_table(
    positions: Array,
    dim: int,
    theta: float,
    accumulate: str,
    frequencies: tuple[float, ...] | None = None,
    factor: float = 1.0,
) -> tuple[Array, Array]:
    xp = space(positions)
    if frequencies is None:
        places = xp.arange(0, dim, 2, accumulate, positions)
        inverse = xp.power(xp.constant(theta, places), -places / dim)
    else:
        inverse = xp.asarray(frequencies, accumulate, positions)
    angle = xp.astype(positions, accumulate)[..., None] * inverse
    cos, sin = xp.cos(angle), xp.sin(angle)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False, last: bool = False) -> Array:
    xp = space(x)
    half, size = cos.shape[-1], x.shape[-1]
    wide = xp.astype(x, xp.dtype_of(cos))
    start = size - 2 * half if last else 0
    end = start + 2 * half
    if interleaved:
        pairs = xp.reshape(wide[..., start:end], (*x.shape[:-1], half, 2))
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = wide[..., start : start + half], wide[..., start + half : end]
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = [a * cos - b * sin, b * cos + a * sin]
    if interleaved:
        turned = [xp.reshape(xp.stack(turned, -1), (*x.shape[:-1], 2 * half))]
    if start:
        turned.insert(0, wide[..., :start])
    if end < size:
        turned.append(wide[..., end:])
    return xp.astype(xp.concatenate(turned, -1), xp.dtype_of(x))


def _heads_first(x: Array, groups: int, accumulate: str) -> Array:
    """``[b, s, h, d]`` → ``[b, groups, h / groups, s, d]``."""
    xp = space(x)
    b, s, h, d = x.shape
    return xp.transpose(xp.reshape(xp.astype(x, accumulate), (b, s, groups, h // groups, d)), (0, 2, 3, 1, 4))


def attend(
    query: Array,
    key: Array,
    value: Array,
    seen: Array,
    softcap: float | None,
    scale: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention in [batch, sequence, heads, dim]; ``seen`` broadcasts to [batch, query, key]."""
    xp = space(query)
    wide = xp.wide(query)
    groups = key.shape[2]
    q = _heads_first(query, groups, wide)
    k, v = (_heads_first(x, groups, wide) for x in (key, value))
    scores = xp.matmul(q, xp.swapaxes(k, -1, -2))
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    if seen.ndim == 3:
        seen = xp.reshape(seen, (seen.shape[0], 1, 1, *seen.shape[1:]))
    if sinks is None:
        weights = masked_softmax(scores, seen)
    else:
        last = (*scores.shape[:-1], 1)
        column = xp.reshape(xp.astype(sinks, wide), (1, groups, -1, 1, 1))
        seen = xp.concatenate([xp.broadcast_to(seen, scores.shape), xp.full(last, True, "bool", query)], -1)
        weights = masked_softmax(xp.concatenate([scores, xp.broadcast_to(column, last)], -1), seen)[..., :-1]
    out = xp.matmul(weights, v)
    shape = (*query.shape[:3], value.shape[-1])
    return xp.astype(xp.reshape(xp.transpose(out, (0, 3, 1, 2, 4)), shape), xp.dtype_of(query))


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
    return attend(query, key, value, _seen(query, key, causal, window), softcap, scale, sinks)


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
    same = segments[:, :, None] == segments[:, None, :]
    return attend(query, key, value, same & _seen(query, key, causal, window), softcap, scale, sinks)


def _seen(query: Array, key: Array, causal: bool, window: int | None) -> Array:
    xp = space(query)
    rows = xp.arange(0, query.shape[1], 1, "int32", query)[:, None]
    columns = xp.arange(0, key.shape[1], 1, "int32", query)[None, :]
    seen = columns <= rows if causal else columns < key.shape[1] + 0 * rows
    if window is not None:
        # A window of w sees w places, the query's own among them; without a mask also w - 1 to the right.
        seen = seen & (columns > rows - window)
        if not causal:
            seen = seen & (columns < rows + window)
    return seen


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
    xp = space(query)
    new, places = query.shape[1], key_cache.shape[2]
    at = int(xp.to_numpy(position))
    check_room(at, new, places)

    def written(cache: Array, rows: Array) -> Array:
        rows = xp.astype(xp.swapaxes(rows, 1, 2), xp.dtype_of(cache))
        return xp.concatenate([cache[:, :, :at], rows, cache[:, :, at + new :]], 2)

    key_cache, value_cache = written(key_cache, key), written(value_cache, value)
    rows = xp.arange(at, at + new, 1, "int32", query)[:, None]
    # Not beyond: 0 times what lies in a place that nobody wrote could be NaN.
    columns = xp.arange(0, at + new, 1, "int32", query)[None, :]
    seen = columns <= rows
    if window is not None:
        seen = seen & (columns > rows - window)
    keys, values = (xp.swapaxes(cache[:, :, : at + new], 1, 2) for cache in (key_cache, value_cache))
    return attend(query, keys, values, seen, softcap, scale, sinks), key_cache, value_cache


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
    xp = space(query)
    places = key_cache.shape[2]
    if 0 not in slots.shape:
        check_end(int(xp.to_numpy(slots).max()), places)
    columns = xp.arange(0, places, 1, "int32", query)
    # [batch, cache, new]: which new token goes to a place.
    goes = slots[:, None, :] == columns[None, :, None]

    def written(cache: Array, new: Array) -> Array:
        chosen = xp.astype(goes, xp.dtype_of(cache))
        rows = xp.astype(xp.swapaxes(new, 1, 2), xp.dtype_of(cache))
        return xp.where(xp.any(goes, 2)[:, None, :, None], xp.matmul(chosen[:, None], rows), cache)

    key_cache, value_cache = written(key_cache, key), written(value_cache, value)
    at = slots[:, :, None]
    seen = columns[None, None, :] <= at * xp.astype(at >= 0, "int32")
    if window is not None:
        seen = seen & (columns[None, None, :] > at - window)
    keys, values = (xp.swapaxes(cache, 1, 2) for cache in (key_cache, value_cache))
    return attend(query, keys, values, seen, softcap, scale, sinks), key_cache, value_cache


def _convolved(x: Array, weight: Array, bias: Array | None, before: Array) -> tuple[Array, Array]:
    xp = space(x)
    wide = xp.wide(x)
    past = xp.concatenate([xp.astype(before, xp.dtype_of(x)), x], 1)
    length, taps = x.shape[1], weight.shape[0]
    products = [
        xp.astype(past[:, tap : tap + length], wide) * xp.astype(weight[tap], wide) for tap in range(taps)
    ]
    total = sum(products[1:], products[0])
    if bias is not None:
        total = total + xp.astype(bias, wide)
    return xp.astype(total, xp.dtype_of(x)), past[:, length:]


def causal_conv(x: Array, weight: Array, bias: Array | None = None) -> Array:
    xp = space(x)
    before = xp.full((x.shape[0], weight.shape[0] - 1, *x.shape[2:]), 0, xp.dtype_of(x), x)
    return _convolved(x, weight, bias, before)[0]


def cached_conv(x: Array, weight: Array, tail: Array, bias: Array | None = None) -> tuple[Array, Array]:
    out, after = _convolved(x, weight, bias, tail)
    return out, space(x).astype(after, space(x).dtype_of(tail))


def segment_conv(x: Array, weight: Array, segments: Array, bias: Array | None = None) -> Array:
    xp = space(x)
    changes = segments[:, 1:] != segments[:, : max(segments.shape[1] - 1, 0)]
    # The number of a position's run of equal numbers.
    runs = xp.concatenate([0 * segments[:, :1], xp.cumsum(xp.astype(changes, "int32"), 1)], 1)
    wide = xp.wide(x)
    total = xp.astype(x, wide) * xp.astype(weight[-1], wide)
    if bias is not None:
        total = total + xp.astype(bias, wide)
    for back in range(1, min(weight.shape[0], x.shape[1])):
        own = runs[:, back:] == runs[:, : runs.shape[1] - back]
        own = xp.reshape(own, (*own.shape, *[1] * (x.ndim - 2)))
        past = xp.astype(x[:, : x.shape[1] - back], wide)
        past = xp.where(own, past, 0 * past) * xp.astype(weight[-1 - back], wide)
        start = xp.full((x.shape[0], back, *x.shape[2:]), 0, wide, x)
        total = total + xp.concatenate([start, past], 1)
    return xp.astype(total, xp.dtype_of(x))


def ragged_cached_conv(
    x: Array, weight: Array, tail: Array, slots: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    xp = space(x)
    outs, afters = [], []
    for row in range(x.shape[0]):
        # One row after the other: what is real, what it gives, and where that belongs.
        here = np.asarray(xp.to_numpy(slots))[row]
        real = np.flatnonzero(here >= 0)
        places = xp.asarray(real, "int32", x)
        kept = xp.take(x[row : row + 1], places, 1)
        out, after = cached_conv(kept, weight, tail[row : row + 1], bias)
        zero = xp.full((1, 1, *x.shape[2:]), 0, xp.dtype_of(x), x)
        back = np.where(here >= 0, np.searchsorted(real, np.arange(len(here))), len(real))
        outs.append(xp.take(xp.concatenate([out, zero], 1), xp.asarray(back, "int32", x), 1))
        afters.append(after)
    return xp.concatenate(outs, 0), xp.concatenate(afters, 0)


def _scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    memory: Array | None,
    segments: Array | None = None,
) -> Any:
    xp = space(x)
    wide = xp.wide(x)
    batch, length, heads, dim = x.shape
    groups, states = write.shape[2:]
    x, step, rate, write, read = (xp.astype(v, wide) for v in (x, step, rate, write, read))
    each = heads // groups
    if memory is None:
        memory = xp.full((batch, heads, dim, states), 0, wide, x)
    h = xp.astype(memory, wide)
    keep = xp.exp(step * rate)
    if segments is not None:
        same = segments[:, 1:] == segments[:, : max(length - 1, 0)]
        stays = xp.concatenate([keep[:, :1], keep[:, 1:] * xp.astype(same, wide)[..., None]], 1)
        keep = stays if length else keep
    scaled = step[..., None] * x

    def spread(v: Array) -> Array:
        row = xp.broadcast_to(v[:, :, None], (batch, groups, each, states))
        return xp.reshape(row, (batch, heads, 1, states))

    out = []
    for t in range(length):
        h = keep[:, t][..., None, None] * h + scaled[:, t][..., None] * spread(write[:, t])
        out.append(xp.sum(h * spread(read[:, t]), -1))
    if not out:
        return xp.full((batch, 0, heads, dim), 0, wide, x), h
    return xp.stack(out, 1), h


def selective_scan(
    x: Array, step: Array, rate: Array, write: Array, read: Array, chunk_size: int | None
) -> Array:
    """One position after the other, whatever ``chunk_size``: it changes JAX's speed, and no result."""
    return space(x).astype(_scan(x, step, rate, write, read, None)[0], space(x).dtype_of(x))


def continued_scan(
    x: Array, step: Array, rate: Array, write: Array, read: Array, memory: Array, chunk_size: int | None
) -> tuple[Array, Array]:
    xp = space(x)
    out, after = _scan(x, step, rate, write, read, memory)
    return xp.astype(out, xp.dtype_of(x)), xp.astype(after, xp.dtype_of(memory))


def segment_scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    segments: Array,
    chunk_size: int | None,
) -> Array:
    xp = space(x)
    step = step * xp.astype(segments != 0, xp.dtype_of(step))[..., None]
    return xp.astype(_scan(x, step, rate, write, read, None, segments)[0], xp.dtype_of(x))


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
    step = step * space(x).astype(slots >= 0, space(x).dtype_of(step))[..., None]
    return continued_scan(x, step, rate, write, read, memory, chunk_size)


def group_merge(x: Array) -> Array:
    return joined(x, x.ndim - 2)


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
    key: Any,
    train: bool,
) -> tuple[Array, ...]:
    """As :func:`capibara.ops.vq.vector_quantise`; ``implementation`` names JAX kernels, there is one way here."""
    from capibara.compose.backends.philox import integers

    xp = space(x)
    if math.prod(x.shape) == 0:
        raise InputError(f"quantise: x {tuple(x.shape)} has no vectors")
    own = xp.dtype_of(codebook)
    codebook, cluster_size, codebook_sum = (xp.stop(v) for v in (codebook, cluster_size, codebook_sum))
    codes, dim = codebook.shape
    wide = xp.wide(x)
    vectors = xp.reshape(xp.stop(x), (-1, dim))
    table = xp.astype(codebook, wide)
    scores = 0.5 * xp.sum(table * table, 1) - xp.matmul(xp.astype(vectors, wide), xp.transpose(table))
    flat = xp.argmin(scores, 1)
    indices = xp.reshape(flat, x.shape[:-1])
    chosen = xp.take(codebook, indices, 0)
    away = xp.astype(x, wide) - xp.astype(chosen, wide)
    error = xp.sum(away * away) / math.prod(x.shape)
    quantized = x + xp.stop(xp.astype(chosen, xp.dtype_of(x)) - xp.stop(x))
    hits = one_hot(flat, codes, own)
    counts = xp.sum(hits, 0)
    share = xp.astype(counts / vectors.shape[0], "float32")
    logs = xp.log(xp.where(share > 0, share, xp.constant(1, share)))
    perplexity = xp.exp(-xp.sum(share * logs))
    usage = xp.sum(xp.astype(counts > 0, "float32")) / codes
    after = codebook, cluster_size, codebook_sum
    if train:
        sums = xp.matmul(xp.transpose(hits), xp.astype(vectors, own))
        size = decay * cluster_size + (1 - decay) * counts
        total_sum = decay * codebook_sum + (1 - decay) * sums
        total = xp.sum(size)
        smoothed = (size + epsilon) / (total + codes * epsilon) * total
        moved = total_sum / smoothed[:, None]
        if dead_code_threshold > 0 and key is not None:
            dead = size < dead_code_threshold
            drawn = xp.from_numpy(integers(key, (codes,), 0, vectors.shape[0]), x)
            fresh = xp.astype(xp.take(vectors, drawn, 0), own)
            count = 2.0 * dead_code_threshold
            moved = xp.where(dead[:, None], fresh, moved)
            size = xp.where(dead, xp.constant(count, size), size)
            total_sum = xp.where(dead[:, None], fresh * count, total_sum)
        after = moved, size, total_sum
    return quantized, indices, commitment_weight * error, perplexity, usage, *after
