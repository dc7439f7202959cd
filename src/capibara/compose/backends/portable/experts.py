"""Mixtures of experts: see :mod:`capibara.compose.backends.jax_ops.experts`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from capibara.compose.backends.portable.elementwise import gelu, silu, softmax
from capibara.compose.backends.portable.indexing import one_hot
from capibara.compose.backends.portable.space import space

Array = Any


def moe_route(
    logits: Array, top: int, capacity_factor: float, normalise: bool, accumulate: str
) -> tuple[Array, Array, Array]:
    xp = space(logits)
    tokens, experts = logits.shape
    capacity = max(1, math.ceil(top * tokens * capacity_factor / experts))
    probability = softmax(xp.astype(logits, accumulate), -1)
    chosen = xp.argsort(xp.stop(probability), -1, True)[:, :top]
    gate = xp.take_along_axis(probability, chosen, -1)
    if normalise:
        gate = gate / xp.sum(gate, -1, True)
    seat = one_hot(xp.reshape(xp.transpose(chosen), (-1,)), experts, "int32")
    place = xp.sum((xp.cumsum(seat, 0) - 1) * seat, -1)
    dtype = xp.dtype_of(probability)
    place = one_hot(place, capacity, dtype)
    seats = xp.astype(seat, dtype)
    taken = xp.reshape(seats[:, :, None] * place[:, None, :], (top, tokens, experts, capacity))
    dispatch = xp.sum(taken, 0)
    combine = xp.sum(taken * xp.transpose(gate)[:, :, None, None], 0)
    share = xp.sum(seats, 0) / seats.shape[0]
    balance = experts * xp.sum(share * (xp.sum(probability, 0) / tokens))
    own = xp.dtype_of(logits)
    return xp.astype(dispatch, own), xp.astype(combine, own), balance


def moe_dispatch(x: Array, dispatch: Array) -> Array:
    """``td, tec → ecd``."""
    xp = space(x)
    tokens, experts, capacity = dispatch.shape
    flat = xp.transpose(xp.reshape(dispatch, (tokens, experts * capacity)))
    return xp.reshape(xp.matmul(flat, x), (experts, capacity, x.shape[-1]))


def moe_combine(x: Array, combine: Array) -> Array:
    """``ecd, tec → td``."""
    xp = space(x)
    tokens = combine.shape[0]
    return xp.matmul(xp.reshape(combine, (tokens, -1)), xp.reshape(x, (-1, x.shape[-1])))


def expert_dense(x: Array, weight: Array, accumulate: str) -> Array:
    xp = space(x)
    wide = xp.wide(x, accumulate)
    return xp.astype(xp.matmul(xp.astype(x, wide), xp.astype(weight, wide)), xp.dtype_of(x))


def choose_experts(
    logits: Array, top: int, router: str, normalise: bool, scale: float, accumulate: str
) -> tuple[Array, Array]:
    xp = space(logits)
    wide = xp.astype(logits, accumulate)
    scores = softmax(wide, -1) if router == "softmax" else xp.sigmoid(wide)
    experts = xp.argsort(xp.stop(scores), -1, True)[:, :top]
    weights = xp.take_along_axis(scores, experts, -1)
    if normalise:
        weights = weights / xp.sum(weights, -1, True)
    return xp.astype(weights * scale, xp.dtype_of(logits)), experts


_ACTIVATIONS = {
    "silu": silu,
    "gelu": partial(gelu, approximate=False),
    "gelu_tanh": partial(gelu, approximate=True),
    "relu": lambda x: space(x).relu(x),
}


def expert_mlp(
    x: Array,
    weights: Array,
    experts: Array,
    gate: Array,
    up: Array,
    down: Array,
    activation: str,
    accumulate: str,
) -> Array:
    xp = space(x)
    wide, own, top = xp.wide(x, accumulate), xp.dtype_of(x), experts.shape[1]

    def product(rows: Array, matrix: Array) -> Array:
        return xp.astype(xp.matmul(xp.astype(rows, wide), xp.astype(matrix, wide)), own)

    flat = xp.reshape(experts, (-1,))
    order = xp.argsort(flat, -1)
    rows = xp.take(x, order // top, 0)
    parts, start = [xp.full((0, x.shape[-1]), 0, own, x)], 0
    for expert, size in enumerate(xp.to_numpy(xp.bincount(flat, gate.shape[0])).tolist()):
        if size:
            mine = rows[start : start + size]
            inner = _ACTIVATIONS[activation](product(mine, gate[expert])) * product(mine, up[expert])
            parts.append(product(inner, down[expert]))
            start += size
    each = xp.take(xp.concatenate(parts, 0), xp.argsort(order, -1), 0)
    each = xp.reshape(xp.astype(each, wide), (*weights.shape, x.shape[-1]))
    weights = xp.reshape(xp.astype(weights, wide), (*weights.shape, 1))
    return xp.astype(xp.sum(each * weights, 1), own)


def rows(x: Array) -> Array:
    return space(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def unflatten(x: Array, like: Array) -> Array:
    return space(x).reshape(x, (*like.shape[:-1], x.shape[-1]))
