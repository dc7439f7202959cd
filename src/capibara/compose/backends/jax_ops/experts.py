"""Mixtures of experts: which token goes to which expert, and there and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose.primitives.experts import expert_extras

__all__ = [
    "choose_experts",
    "clamped_swiglu",
    "expert_dense",
    "expert_mlp",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "rows",
    "unflatten",
]

Array = jax.Array


def moe_route(
    logits: Array, top: int, capacity_factor: float, normalise: bool, accumulate: str
) -> tuple[Array, Array, Array]:
    """``logits [tokens, experts]`` → ``dispatch``, ``combine [tokens, experts, capacity]``, ``balance``.

    Each expert has ``capacity`` places. First choices are seated before second ones, earlier tokens before later
    ones; who finds no place is dropped by that expert.
    """
    tokens, experts = logits.shape
    capacity = max(1, math.ceil(top * tokens * capacity_factor / experts))
    probability = jax.nn.softmax(logits.astype(accumulate), axis=-1)
    gate, chosen = jax.lax.top_k(probability, top)
    if normalise:
        gate = gate / jnp.sum(gate, axis=-1, keepdims=True)
    seat = jax.nn.one_hot(chosen.T.reshape(-1), experts, dtype=jnp.int32)  # choice by choice, token by token
    place = jnp.sum((jnp.cumsum(seat, axis=0, dtype=jnp.int32) - 1) * seat, axis=-1)
    place = jax.nn.one_hot(place, capacity, dtype=probability.dtype)  # all 0 past the last place
    taken = (seat[:, :, None] * place[:, None, :]).reshape(top, tokens, experts, capacity)
    dispatch = jnp.sum(taken, axis=0)
    combine = jnp.sum(taken * gate.T[:, :, None, None], axis=0)
    share = jnp.mean(seat.astype(probability.dtype), axis=0)
    balance = experts * jnp.sum(share * jnp.mean(probability, axis=0))
    return dispatch.astype(logits.dtype), combine.astype(logits.dtype), balance


def moe_dispatch(x: Array, dispatch: Array) -> Array:
    return jnp.einsum("td,tec->ecd", x, dispatch)


def moe_combine(x: Array, combine: Array) -> Array:
    return jnp.einsum("ecd,tec->td", x, combine)


def expert_dense(x: Array, weight: Array, accumulate: str) -> Array:
    wide = jnp.dtype(accumulate)
    return jnp.einsum("eci,eio->eco", x, weight, preferred_element_type=wide).astype(x.dtype)


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
    wide = logits.astype(accumulate)
    scores = jax.nn.softmax(wide, axis=-1) if router == "softmax" else jax.nn.sigmoid(wide)
    if bias is None and top_groups == groups:
        weights, experts = jax.lax.top_k(scores, top)
    else:
        choice = scores if bias is None else scores + bias.astype(accumulate)
        choice = _in_best_groups(jax.lax.stop_gradient(choice), groups, top_groups, group_score)
        experts = jax.lax.top_k(choice, top)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        # Sigmoids can all be 0.
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-20)
    return (weights * scale).astype(logits.dtype), experts


def _in_best_groups(scores: Array, groups: int, top_groups: int, group_score: str) -> Array:
    """``scores [n, e]``, and -inf for experts of other groups than the ``top_groups`` best ones."""
    if top_groups == groups:
        return scores
    apart = scores.reshape(scores.shape[0], groups, scores.shape[1] // groups)
    first = jax.lax.top_k(apart, min(1 if group_score == "max" else 2, apart.shape[-1]))[0]
    best = jax.lax.top_k(jnp.sum(first, axis=-1), top_groups)[1]
    chosen = jnp.sum(jax.nn.one_hot(best, groups, dtype=jnp.int32), axis=1)
    return jnp.where(chosen[:, :, None] > 0, apart, -jnp.inf).reshape(scores.shape)


@jax.custom_vjp
def _permuted(x: Array, order: Array, back: Array) -> Array:
    """``x[order]``, whose gradient is a look-up too: in ``back``, the inverse."""
    return jnp.take(x, order, axis=0, mode="clip")


def _permuted_forward(x: Array, order: Array, back: Array) -> tuple[Array, Any]:
    return _permuted(x, order, back), (order, back)


def _permuted_backward(kept: Any, slope: Array) -> tuple[Any, ...]:
    order, back = kept
    return _permuted(slope, back, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def clamped_swiglu(gate: Array, up: Array, limit: float, alpha: float) -> Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@jax.custom_vjp
def _entries(table: Array, places: Array) -> Array:
    """``table[places]``, and 0 for places that it does not have.

    Its gradient is a product with the places' indicators, which TPUs compute faster than scattered sums.
    """
    return jnp.take(table, places, axis=0, mode="fill", fill_value=0)


def _entries_forward(table: Array, places: Array) -> tuple[Array, Any]:
    return _entries(table, places), (places, table.shape[0])


def _entries_backward(kept: Any, slope: Array) -> tuple[Any, ...]:
    places, count = kept
    chosen = jax.nn.one_hot(places, count, dtype=slope.dtype)
    wide = jnp.promote_types(slope.dtype, jnp.float32)
    found = jnp.einsum("ne,nd->ed", chosen, slope, precision="highest", preferred_element_type=wide)
    return found.astype(slope.dtype), None


_entries.defvjp(_entries_forward, _entries_backward)


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
    first: Array | None = None,
) -> Array:
    """With ``first``, the matrices are those of the experts from this one on; other experts give 0."""
    from capibara.ops.linalg import grouped_matmul
    from capibara.ops.one_device import alike

    count, top = gate.shape[0], experts.shape[1]
    biases, low = expert_extras(more, adapters)
    if first is not None:
        experts = experts - first
        experts = jnp.where((experts >= 0) & (experts < count), experts, count)
    flat = experts.reshape(math.prod(experts.shape))
    order = jnp.argsort(flat, stable=True)
    back = jnp.argsort(order)
    sizes = jnp.sum(jax.nn.one_hot(flat, count, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    product = partial(grouped_matmul, group_sizes=sizes, accumulate_dtype=accumulate)
    owners = jnp.take(flat, order, mode="clip")

    def linear(rows: Array, matrices: Array, part: str) -> Array:
        out = product(rows, matrices)
        if part in low:
            down, up = low[part]
            out = out + adapter_scale * product(product(rows, down), up)
        if part in biases:
            out = out + _entries(alike(biases[part], owners), owners).astype(out.dtype)
        return out

    rows = _permuted(jnp.repeat(x, top, axis=0), order, back)
    gates, ups = linear(rows, gate, "gate"), linear(rows, up, "up")
    if activation == "swiglu_clamped":
        inner = clamped_swiglu(gates, ups, limit, alpha)
    else:
        inner = _ACTIVATIONS[activation](gates) * ups
    each = _permuted(linear(inner, down, "down"), back, order).reshape(*weights.shape, x.shape[-1])
    wide = jnp.dtype(accumulate)
    return jnp.einsum("nkd,nk->nd", each, weights, preferred_element_type=wide).astype(x.dtype)


def rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflatten(x: Array, like: Array) -> Array:
    return x.reshape(*like.shape[:-1], x.shape[-1])
