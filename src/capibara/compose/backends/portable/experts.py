"""Mixtures of experts: see :mod:`capibara.compose.backends.jax_ops.experts`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from capibara.compose.backends.portable.elementwise import clip, gelu, silu, softmax
from capibara.compose.backends.portable.indexing import one_hot
from capibara.compose.backends.portable.space import space
from capibara.compose.primitives.experts import expert_extras

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
    logits: Array,
    bias: Array | None = None,
    *,
    top: int,
    router: str,
    normalise: bool,
    scale: float,
    accumulate: str,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
) -> tuple[Array, Array]:
    xp = space(logits)
    wide = xp.astype(logits, accumulate)
    scores = softmax(wide, -1) if router == "softmax" else xp.sigmoid(wide)
    choice = xp.stop(scores)
    if bias is not None:
        choice = choice + xp.astype(xp.stop(bias), accumulate)
    experts = xp.argsort(_in_best_groups(choice, groups, top_groups, group_score), -1, True)[:, :top]
    weights = xp.take_along_axis(scores, experts, -1)
    if normalise:
        total = xp.sum(weights, -1, True)
        weights = weights / xp.where(total < 1e-20, xp.constant(1e-20, total), total)
    return xp.astype(weights * scale, xp.dtype_of(logits)), experts


def _in_best_groups(scores: Array, groups: int, top_groups: int, group_score: str) -> Array:
    """``scores [n, e]``, and -inf for experts of other groups than the ``top_groups`` best ones."""
    if top_groups == groups:
        return scores
    xp = space(scores)
    apart = xp.reshape(scores, (scores.shape[0], groups, scores.shape[1] // groups))
    order = xp.argsort(apart, -1, True)[..., : 1 if group_score == "max" else 2]
    best = xp.argsort(xp.sum(xp.take_along_axis(apart, order, -1), -1), -1, True)[:, :top_groups]
    chosen = xp.sum(one_hot(best, groups, "int32"), 1)
    return xp.reshape(
        xp.where(chosen[:, :, None] > 0, apart, xp.constant(-math.inf, apart)), tuple(scores.shape)
    )


_ACTIVATIONS = {
    "silu": silu,
    "gelu": partial(gelu, approximate=False),
    "gelu_tanh": partial(gelu, approximate=True),
    "relu": lambda x: space(x).relu(x),
}


def clamped_swiglu(gate: Array, up: Array, limit: float, alpha: float) -> Array:
    gate, up = clip(gate, None, limit), clip(up, -limit, limit)
    return gate * space(gate).sigmoid(alpha * gate) * (up + 1)


def expert_mlp(
    x: Array,
    weights: Array,
    experts: Array,
    gate: Array,
    up: Array,
    down: Array,
    *more: Array,
    activation: str,
    accumulate: str,
    limit: float = 7.0,
    alpha: float = 1.702,
    adapters: tuple[str, ...] = (),
    adapter_scale: float = 1.0,
) -> Array:
    xp = space(x)
    wide, own, top = xp.wide(x, accumulate), xp.dtype_of(x), experts.shape[1]

    biases, low = expert_extras(more, adapters)

    def product(rows: Array, matrix: Array) -> Array:
        return xp.astype(xp.matmul(xp.astype(rows, wide), xp.astype(matrix, wide)), own)

    def linear(rows: Array, expert: int, matrices: Array, part: str) -> Array:
        out = product(rows, matrices[expert])
        if part in low:
            a, b = low[part]
            out = out + product(product(rows, a[expert]), b[expert]) * adapter_scale
        return out + xp.astype(biases[part][expert], own) if part in biases else out

    def gated(gates: Array, ups: Array) -> Array:
        if activation == "swiglu_clamped":
            return clamped_swiglu(gates, ups, limit, alpha)
        return _ACTIVATIONS[activation](gates) * ups

    flat = xp.reshape(experts, (-1,))
    order = xp.argsort(flat, -1)
    rows = xp.take(x, order // top, 0)
    parts, start = [xp.full((0, x.shape[-1]), 0, own, x)], 0
    for expert, size in enumerate(xp.to_numpy(xp.bincount(flat, gate.shape[0])).tolist()):
        if size:
            mine = rows[start : start + size]
            inner = gated(linear(mine, expert, gate, "gate"), linear(mine, expert, up, "up"))
            parts.append(linear(inner, expert, down, "down"))
            start += size
    each = xp.take(xp.concatenate(parts, 0), xp.argsort(order, -1), 0)
    each = xp.reshape(xp.astype(each, wide), (*weights.shape, x.shape[-1]))
    weights = xp.reshape(xp.astype(weights, wide), (*weights.shape, 1))
    return xp.astype(xp.sum(each * weights, 1), own)


def rows(x: Array) -> Array:
    return space(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def unflatten(x: Array, like: Array) -> Array:
    return space(x).reshape(x, (*like.shape[:-1], x.shape[-1]))
