"""Running one block n times: a loop in the compiled program, or n copies of it.

A loop (``lax.scan``) compiles in the time of one block, whatever the depth. Unrolled, the compiler sees across
layers and keeps each layer's residuals where they are; on CPU a scanned backward pass spends most of its time
copying stacked residuals, and unrolling a few layers is nearly twice as fast. Decoding has no backward pass, and what
it takes is reading the weights: unrolled on CPU all of them are first cut out of their stacks, a loop cuts out those
of one layer, which then stay in the processor's cache.

States come and go as arrays of all repetitions. In training each repetition takes its part of them and gives a new one.
In decoding (``in_place``) the whole arrays go from repetition to repetition, and each writes its new rows into them: if
they are donated, nothing as large as they are is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from capibara.compose.backends.jax_stacked import Layers, Row, read, replace
from capibara.compose.errors import CompileError

__all__ = ["PRODUCT", "UNROLL_LIMIT_CPU", "choose_mode", "keep_products", "repeat"]

UNROLL_LIMIT_CPU = 12
"""Deepest model that is unrolled on CPU by default: past it, compile time outweighs the faster step."""

PRODUCT = "product"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of what counts as the result of a matrix product with a weight."""


def keep_products(offload_to: str | None = None) -> Callable[..., Any]:
    """A policy of ``jax.checkpoint``: the results of matrix products with weights are kept, all else is computed again.

    Equivalent JAX: ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable`` (with ``offload_to``,
    ``offload_dot_with_no_batch_dims``), and what has the name :data:`PRODUCT`: on a mesh a product may be one of
    several devices' parts of a weight, which are a batch.

    Args:
        offload_to: the memory that they are moved to until they are needed, ``"pinned_host"``; None: they stay.
    """
    policies = jax.checkpoint_policies
    if offload_to is None:
        plain, named = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(PRODUCT)
    else:
        plain = policies.offload_dot_with_no_batch_dims("device", offload_to)
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[PRODUCT],
            offload_src="device",
            offload_dst=offload_to,
        )

    def policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
        return (named if primitive.name == "name" else plain)(primitive, *inputs, **parameters)

    return policy


def choose_mode(mode: str, count: int, platform: str, *, decodes: bool = False) -> str:
    """``"auto"`` resolved to ``"scan"`` or ``"unroll"`` for a platform, a depth, and whether the block decodes."""
    if mode not in ("auto", "scan", "unroll"):
        raise CompileError(f"mode={mode!r} must be 'auto', 'scan' or 'unroll'")
    if mode != "auto":
        return mode
    few = platform == "cpu" and count <= UNROLL_LIMIT_CPU and not decodes
    return "unroll" if count == 1 or few else "scan"


def checkpointed(body: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Mark a function for rematerialisation: its intermediate values are computed again in the backward pass."""
    if remat == "none":
        return body
    policy = keep_products() if remat == "dots" else None
    return jax.checkpoint(body, policy=policy, static_argnums=(5,))  # 5: train


def repeat(
    body: Callable[..., Any],
    params: Any,
    carry: Any,
    shared: Any,
    state: Any,
    key: jax.Array | None,
    train: bool,
    *,
    count: int,
    mode: str,
    remat: str,
    in_place: Collection[tuple[str, ...]] | None = None,
) -> tuple[Any, Any, Any]:
    """``carry, state[i], extra[i] = body(params[i], carry, shared, state[i], key[i], train)`` for i = 0 … count-1.

    Args:
        body: the block. params, state: nested dicts of arrays stacked along a leading dimension of ``count``, or
            parameters that are :class:`~capibara.compose.backends.jax_stacked.Layers`.
        carry: what goes through all repetitions. shared: what each of them sees.
        key: split into one key a repetition, or None.
        in_place: None, or for a block that decodes the places in ``state`` of what its body takes and gives as a
            :class:`~capibara.compose.backends.jax_stacked.Row`.

    Returns:
        ``(carry, state, extra)`` with state and extra stacked.
    """
    keys = None if key is None else jax.random.split(key, count)
    run = checkpointed(body, remat)
    # Outside of a trace nothing is written in place: `count` writes would copy the whole array each.
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state))
    if any(map(_is_apart, jax.tree.leaves(params, is_leaf=_is_apart))):
        mode = "unroll"
    if in_place is not None and traced:
        return _in_place(run, params, carry, shared, state, keys, train, count, mode, in_place)

    # There a loop is traced and compiled anew each time it is called.
    if mode == "scan" and (in_place is None or count > UNROLL_LIMIT_CPU):

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            p, s, k = xs
            carry, s, extra = run(p, carry, shared, s, k, train)
            return carry, (s, extra)

        carry, (state, extra) = lax.scan(step, carry, (params, state, keys), length=count)
        return carry, state, extra

    layers = _unstack((params, state), count)
    states, extras = [], []
    for i, (p, s) in enumerate(layers):
        carry, s, extra = run(p, carry, shared, s, None if keys is None else keys[i], train)
        states.append(s)
        extras.append(extra)
    return carry, _stack(states), _stack(extras)


def _in_place(
    run: Callable[..., Any],
    params: Any,
    carry: Any,
    shared: Any,
    state: Any,
    keys: Any,
    train: bool,
    count: int,
    mode: str,
    in_place: Collection[tuple[str, ...]],
) -> tuple[Any, Any, Any]:
    places = set(in_place)

    def given(path: Any, stack: jax.Array, index: Any) -> Any:
        row = Row(stack, index)
        return row if tuple(step.key for step in path) in places else read(row)

    def kept(stack: jax.Array, before: Any, after: Any, index: Any) -> jax.Array:
        if isinstance(after, Row):
            return after.stack
        return stack if after is before else replace(Row(stack, index), after)

    def one(carry: Any, state: Any, index: Any, p: Any, k: Any) -> tuple[Any, Any, Any]:
        before = jax.tree_util.tree_map_with_path(partial(given, index=index), state)
        carry, after, extra = run(p, carry, shared, before, k, train)
        return carry, jax.tree.map(partial(kept, index=index), state, before, after), extra

    if mode == "scan":

        def step(both: tuple[Any, Any], xs: Any) -> tuple[Any, Any]:
            carry, state, extra = one(*both, *xs)
            return (carry, state), extra

        xs = (jnp.arange(count, dtype=jnp.int32), params, keys)
        (carry, state), extra = lax.scan(step, (carry, state), xs, length=count)
        return carry, state, extra
    extras = []
    # Traced once for all repetitions, which are the same but for their number.
    same = jax.jit(one)
    for i, p in enumerate(_unstack(params, count)):
        carry, state, extra = same(carry, state, jnp.int32(i), p, None if keys is None else keys[i])
        extras.append(extra)
    return carry, state, _stack(extras)


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Layers)


def _unstack(tree: Any, count: int) -> list[Any]:
    # lax.split, because its transpose is one concatenation; indexing would add up `count` padded arrays.
    def rows(leaf: jax.Array | Layers) -> Sequence[jax.Array]:
        if isinstance(leaf, Layers):
            return leaf.arrays
        return [jnp.squeeze(part, 0) for part in lax.split(leaf, [1] * count, axis=0)]

    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_apart)
    columns = [rows(leaf) for leaf in leaves]
    return [jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)]


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
