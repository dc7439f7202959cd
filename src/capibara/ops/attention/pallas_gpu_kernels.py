"""The GPU kernels of attention, in Pallas for Triton: one for the output, one each for the gradients of query and keys.

All three see ``query [batch, heads, rows, dim]`` and ``key``/``value`` ``[batch, kv_heads, keys, dim]``, padded to
whole blocks and to last axes that are powers of two. A program of the grid processes one block of queries (in the
kernel for key and value: of keys) and loops over the visible blocks of the other side, with its sums in registers:
programs share nothing, so they can run in any order and write each result once.

Values per row (the log-sum-exp, and in the backward pass ``sum(out · out_grad)``) are stored as ``[…, rows]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from capibara.ops.attention.pallas_plan import Plan, Range, bend
from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.one_device import kernel_results

__all__ = ["key_value_gradients", "output", "query_gradient"]


def _dot(plan: Plan, a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    contract = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=plan.precision, preferred_element_type=jnp.float32)


def _loop(reach: Range, i: Any, work: Callable[[Any, Any], Any], carry: Any) -> Any:
    """``work(block, carry)`` on every block that block ``i`` reaches."""
    first, last = (jnp.asarray(x, jnp.int32) for x in (reach.first(i), reach.last(i)))
    return lax.fori_loop(first, last + jnp.int32(1), work, carry)


def _scores(
    plan: Plan, query: jax.Array, key: jax.Array, i: Any, j: Any, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """The scores of row block ``i`` on key block ``j``, hidden ones far below all others, and the soft cap's slope."""
    scores, slope = bend(plan, _dot(plan, query, key, (1, 1)))
    seen = plan.visible(i, j, transposed=False)
    if ids:
        seen &= ids[0][:, None] == ids[1][None, :]
    return scores + jnp.where(seen, 0.0, HIDDEN), slope


def _block(j: Any, size: int) -> Any:
    return pl.ds(j * jnp.int32(size), size)


def _output_kernel(plan: Plan, key_blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[3:5] if segments else ()
    query_ref, key_ref, value_ref = refs[:3]
    out_ref, stat_ref = refs[3 + len(ids) :]
    i = pl.program_id(0)
    query = query_ref[...]
    own = (ids[0][...],) if segments else ()

    def work(j: Any, carry: Any) -> Any:
        best, total, acc = carry
        where = _block(j, plan.keys)
        both = (*own, ids[1][where]) if segments else ()
        scores, _ = _scores(plan, query, key_ref[where, :], i, j, both)
        new = jnp.maximum(best, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new[:, None])
        shrink = jnp.exp(best - new)
        value = value_ref[where, :]
        acc = acc * shrink[:, None] + _dot(plan, weights.astype(value.dtype), value)
        return new, total * shrink + jnp.sum(weights, axis=1), acc

    start = (
        jnp.full((plan.rows,), ROW_FLOOR, jnp.float32),
        jnp.zeros((plan.rows,), jnp.float32),
        jnp.zeros(out_ref.shape, jnp.float32),
    )
    best, total, acc = _loop(plan.key_blocks(key_blocks), i, work, start)
    whole = jnp.where(total == 0, 1.0, total)
    out_ref[...] = (acc / whole[:, None]).astype(out_ref.dtype)
    stat_ref[...] = best + jnp.log(whole)


def _query_kernel(plan: Plan, key_blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[6:8] if segments else ()
    query_ref, key_ref, value_ref, out_grad_ref, stat_ref, delta_ref = refs[:6]
    (grad_ref,) = refs[6 + len(ids) :]
    i = pl.program_id(0)
    query, out_grad, stat, delta = (x[...] for x in (query_ref, out_grad_ref, stat_ref, delta_ref))
    own = (ids[0][...],) if segments else ()

    def work(j: Any, acc: Any) -> Any:
        where = _block(j, plan.keys)
        key = key_ref[where, :]
        both = (*own, ids[1][where]) if segments else ()
        scores, slope = _scores(plan, query, key, i, j, both)
        weights = jnp.exp(scores - stat[:, None])
        change = weights * (_dot(plan, out_grad, value_ref[where, :], (1, 1)) - delta[:, None])
        if slope is not None:
            change = change * slope
        return acc + _dot(plan, change.astype(key.dtype), key)

    acc = _loop(plan.key_blocks(key_blocks), i, work, jnp.zeros(grad_ref.shape, jnp.float32))
    grad_ref[...] = (acc * plan.scale).astype(grad_ref.dtype)


def _key_value_kernel(plan: Plan, row_blocks: int, group: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[6:8] if segments else ()
    query_ref, key_ref, value_ref, out_grad_ref, stat_ref, delta_ref = refs[:6]
    key_grad_ref, value_grad_ref = refs[6 + len(ids) :]
    j = pl.program_id(0)
    key, value = key_ref[...], value_ref[...]
    own = (ids[1][...],) if segments else ()

    def head(g: Any, carry: Any) -> Any:
        def work(i: Any, carry: Any) -> Any:
            key_acc, value_acc = carry
            where = _block(i, plan.rows)
            query, out_grad = query_ref[g, where, :], out_grad_ref[g, where, :]
            stat, delta = stat_ref[g, where], delta_ref[g, where]
            both = (ids[0][where], *own) if segments else ()
            scores, slope = _scores(plan, query, key, i, j, both)
            weights = jnp.exp(scores - stat[:, None])
            change = weights * (_dot(plan, out_grad, value, (1, 1)) - delta[:, None])
            if slope is not None:
                change = change * slope
            value_acc = value_acc + _dot(plan, weights.astype(out_grad.dtype), out_grad, (0, 0))
            return key_acc + _dot(plan, change.astype(query.dtype), query, (0, 0)), value_acc

        return _loop(plan.row_blocks(row_blocks), j, work, carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key_grad_ref, value_grad_ref))
    key_acc, value_acc = lax.fori_loop(jnp.int32(0), jnp.int32(group), head, start)
    key_grad_ref[...] = (key_acc * plan.scale).astype(key_grad_ref.dtype)
    value_grad_ref[...] = value_acc.astype(value_grad_ref.dtype)


def _call(name: str, kernel: Callable[..., None], plan: Plan, wide: int, **options: Any) -> Any:
    return pl.pallas_call(
        kernel,
        # Not measured: a warp for each 16 rows of scores where the last axis is wide, so that sums stay in registers.
        compiler_params=plgpu.CompilerParams(num_warps=8 if wide > 64 else 4, num_stages=2),
        interpret=plan.interpret,
        name=f"capibara_attention_{name}",
        **options,
    )


def _widest(query: jax.Array, value: jax.Array) -> int:
    return max(query.shape[-1], value.shape[-1])


def output(plan: Plan, query: Any, key: Any, value: Any, *ids: Any) -> tuple[jax.Array, jax.Array]:
    """The output, like the query, and the rows' log-sum-exp ``[batch, heads, rows]``."""
    specs = _Specs(plan, query, key, value)
    return _call(
        "output",
        functools.partial(_output_kernel, plan, specs.key_blocks, bool(ids)),
        plan,
        _widest(query, value),
        grid=(specs.row_blocks, specs.heads, specs.batch),
        in_specs=[
            specs.rows(query),
            specs.all_keys(key),
            specs.all_keys(value),
            *((specs.row_ids, specs.all_ids(key)) if ids else ()),
        ],
        out_specs=[specs.rows(value), specs.row],
        out_shape=kernel_results(
            (query, key, value, *ids),
            ((*query.shape[:3], value.shape[3]), plan.dtype),
            (query.shape[:3], jnp.float32),
        ),
    )(query, key, value, *ids)


def query_gradient(
    plan: Plan, query: Any, key: Any, value: Any, out_grad: Any, stat: Any, delta: Any, *ids: Any
) -> jax.Array:
    """The gradient of the query."""
    specs = _Specs(plan, query, key, value)
    return _call(
        "query",
        functools.partial(_query_kernel, plan, specs.key_blocks, bool(ids)),
        plan,
        _widest(query, value),
        grid=(specs.row_blocks, specs.heads, specs.batch),
        in_specs=[
            specs.rows(query),
            specs.all_keys(key),
            specs.all_keys(value),
            specs.rows(out_grad),
            specs.row,
            specs.row,
            *((specs.row_ids, specs.all_ids(key)) if ids else ()),
        ],
        out_specs=specs.rows(query),
        out_shape=kernel_results((query, key, value, out_grad, *ids), (query.shape, plan.dtype))[0],
    )(query, key, value, out_grad, stat, delta, *ids)


def key_value_gradients(
    plan: Plan, query: Any, key: Any, value: Any, out_grad: Any, stat: Any, delta: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of key and value, summed over the group of query heads that read them."""
    specs = _Specs(plan, query, key, value)
    of_group = [specs.of_group(x) for x in (query, out_grad, stat)]
    return _call(
        "key_value",
        functools.partial(_key_value_kernel, plan, specs.row_blocks, specs.group, bool(ids)),
        plan,
        _widest(query, value),
        grid=(specs.key_blocks, specs.kv_heads, specs.batch),
        in_specs=[
            of_group[0],
            specs.keys(key),
            specs.keys(value),
            of_group[1],
            of_group[2],
            of_group[2],
            *((specs.all_ids(query), specs.key_ids) if ids else ()),
        ],
        out_specs=[specs.keys(key), specs.keys(value)],
        out_shape=kernel_results(
            (query, key, value, out_grad, *ids), (key.shape, plan.dtype), (value.shape, plan.dtype)
        ),
    )(query, key, value, out_grad, stat, delta, *ids)


class _Specs:
    """Which part of an array a program sees: program ``(i, h, b)`` of a block, a head and an entry of the batch."""

    def __init__(self, plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        self.plan = plan
        self.batch, self.heads, length, _ = query.shape
        self.kv_heads = key.shape[1]
        self.group = self.heads // self.kv_heads
        self.row_blocks, self.key_blocks = length // plan.rows, value.shape[2] // plan.keys
        self.row = pl.BlockSpec((None, None, plan.rows), lambda i, h, b: (b, h, i))
        self.row_ids = pl.BlockSpec((None, plan.rows), lambda i, h, b: (b, i))
        self.key_ids = pl.BlockSpec((None, plan.keys), lambda j, h, b: (b, j))

    def rows(self, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.plan.rows, x.shape[3]), lambda i, h, b: (b, h, i, 0))

    def keys(self, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.plan.keys, x.shape[3]), lambda j, h, b: (b, h, j, 0))

    def all_keys(self, x: jax.Array) -> pl.BlockSpec:
        """All keys of the head that query head ``h`` reads."""
        group = self.group
        return pl.BlockSpec(
            (None, None, *x.shape[2:]), lambda i, h, b: (b, lax.div(h, jnp.int32(group)), 0, 0)
        )

    def all_ids(self, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[2]), lambda i, h, b: (b, 0))

    def of_group(self, x: jax.Array) -> pl.BlockSpec:
        """All rows of the query heads that read key head ``h``."""
        zeros = (0,) * (x.ndim - 2)
        return pl.BlockSpec((None, self.group, *x.shape[2:]), lambda j, h, b: (b, h, *zeros))
