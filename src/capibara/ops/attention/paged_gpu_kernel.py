"""The kernel of attention over pages for GPUs, in Pallas for Triton.

The XLA implementation gathers as many pages of each sequence as the longest one has, in a loop whose length is computed
on the GPU. Here a program of the grid reads the pages of one sequence and one key head where they lie, and stops where
the sequence ends. Where there are too few programs for the GPU, each sequence's keys are divided into parts, whose sums
are added afterwards (Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from capibara.ops.attention.paged_gpu import PagedPlan
from capibara.ops.attention.pallas_calls import pad, round_up
from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.one_device import kernel_results

__all__ = ["output"]


def _dot(a: jax.Array, b: jax.Array, over: int) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (over,)), ((), ())), preferred_element_type=jnp.float32)


def _kernel(plan: PagedPlan, whole: bool, *refs: Any) -> None:
    table_ref, length_ref, query_ref, key_ref, value_ref, out_ref, *sums = refs
    block, part = pl.program_id(0), pl.program_id(1)
    # Far beyond any table; positions after it must not become negative.
    length = jnp.minimum(length_ref[0], (1 << 31) - 1 - plan.new - plan.rows)
    pages, page_size = key_ref.shape[:2]
    end = jnp.minimum(length, table_ref.shape[0] * page_size)
    # Rows are the heads of a group, position by position.
    row = block * plan.rows + lax.iota(jnp.int32, plan.rows)
    mine = length - plan.new + lax.div(row, jnp.int32(plan.group))
    newest = length - plan.new + lax.div((block + 1) * plan.rows - 1, jnp.int32(plan.group))
    oldest = length - plan.new + lax.div(block * plan.rows, jnp.int32(plan.group))
    size = jnp.int32(plan.keys)
    first = jnp.int32(0)
    if plan.window is not None:
        first = lax.div(jnp.maximum(oldest - plan.window + 1, 0), size)
    last = lax.div(jnp.clip(newest + 1, 0, end) + size - 1, size)
    each = lax.div(jnp.maximum(last - first, 0) + plan.parts - 1, jnp.int32(plan.parts))
    begin = first + part * each
    query = query_ref[...]

    def step(i: Any, carry: Any) -> Any:
        best, total, acc = carry
        at = i * size + lax.iota(jnp.int32, plan.keys)
        # A page may hold anything after a sequence's end: its last position is read again instead.
        place = jnp.minimum(at, end - 1)
        # What a table says of pages that are not there is not followed.
        page = jnp.clip(table_ref[lax.div(place, jnp.int32(page_size))], 0, pages - 1)
        within = lax.rem(place, jnp.int32(page_size))
        s = plan.scale * _dot(query, key_ref[page, within, :], 1)
        if plan.softcap is not None:
            s = plan.softcap * jnp.tanh(s / plan.softcap)
        visible = (at[None, :] <= mine[:, None]) & (at < end)[None, :]
        if plan.window is not None:
            visible &= at[None, :] > mine[:, None] - plan.window
        s = s + jnp.where(visible, 0.0, HIDDEN)
        new_best = jnp.maximum(best, jnp.max(s, axis=1))
        weights, shrink = jnp.exp(s - new_best[:, None]), jnp.exp(best - new_best)
        value = value_ref[page, within, :]
        # A weight of 0 does not hide an infinity.
        value = jnp.where((at < end)[:, None], value, jnp.zeros((), value.dtype))
        acc = acc * shrink[:, None] + _dot(weights.astype(value.dtype), value, 0)
        return new_best, total * shrink + jnp.sum(weights, axis=1), acc

    start = (
        jnp.full((plan.rows,), ROW_FLOOR, jnp.float32),
        jnp.zeros((plan.rows,), jnp.float32),
        jnp.zeros(out_ref.shape, jnp.float32),
    )
    best, total, acc = lax.fori_loop(begin, jnp.minimum(begin + each, last), step, start)
    if whole:
        out_ref[...] = (acc / jnp.where(total == 0, 1.0, total)[:, None]).astype(out_ref.dtype)
    else:
        out_ref[...] = acc
        sums[0][...], sums[1][...] = best, total


def output(
    plan: PagedPlan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *sinks: jax.Array,
) -> jax.Array:
    """The output ``[batch, new, heads, value_dim]``.

    Args:
      query: ``[batch, new, heads, dim]``. key, value: pools. table, lengths: integers. sinks: perhaps, ``[heads]``.
    """
    batch, new, heads, dim = query.shape
    kv_heads, group, columns = heads // plan.group, plan.group, value.shape[3]
    # [batch, kv_heads, rows, dim]
    rows = jnp.moveaxis(query.reshape(batch, new, kv_heads, group, dim), 2, 1)
    rows = pad(rows.reshape(batch, kv_heads, new * group, dim), 2, round_up(new * group, plan.rows))
    count = rows.shape[2]
    whole = plan.parts == 1 and not sinks
    given = table.astype(jnp.int32), lengths.astype(jnp.int32), rows, key, value
    shape = batch, kv_heads, plan.parts, count
    shapes = [((*shape, columns), plan.dtype if whole else jnp.float32)]
    shapes += [] if whole else [(shape, jnp.float32)] * 2

    def of_part(block: Any, part: Any, head: Any, sequence: Any) -> Any:
        return sequence, head, part, block

    sums = pl.BlockSpec((None, None, None, plan.rows), of_part)
    found = pl.pallas_call(
        functools.partial(_kernel, plan, whole),
        grid=(count // plan.rows, plan.parts, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, table.shape[1]), lambda i, p, h, b: (b, 0)),
            pl.BlockSpec((1,), lambda i, p, h, b: (b,)),
            pl.BlockSpec((None, None, plan.rows, dim), lambda i, p, h, b: (b, h, i, 0)),
            *(
                pl.BlockSpec((*x.shape[:2], None, x.shape[3]), lambda i, p, h, b: (0, 0, h, 0))
                for x in (key, value)
            ),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, plan.rows, columns), lambda *at: (*of_part(*at), 0)),
            *([] if whole else [sums, sums]),
        ],
        out_shape=kernel_results(given, *shapes),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=plan.interpret,
        name="capibara_paged_attention",
    )(*given)
    out = found[0][:, :, 0] if whole else _together(found[0], found[1], found[2], *sinks)
    out = out[:, :, : new * group].reshape(batch, kv_heads, new, group, columns)
    return jnp.moveaxis(out, 2, 1).reshape(batch, new, heads, columns).astype(plan.dtype)


def _together(acc: jax.Array, best: jax.Array, total: jax.Array, *sinks: jax.Array) -> jax.Array:
    """The outputs of rows from the sums of their parts, ``[batch, kv_heads, parts, rows]``."""
    parts = best.shape[2]
    for each in sinks:
        # One more part: of a logit that has no value.
        group = each.astype(jnp.float32).reshape(best.shape[1], -1)
        logits = jnp.tile(group, -(-best.shape[3] // group.shape[1]))[:, None, : best.shape[3]]
        logits = jnp.broadcast_to(logits, (*best.shape[:2], 1, best.shape[3]))
        best = jnp.concatenate([best, logits], axis=2)
        total = jnp.concatenate([total, jnp.ones_like(logits)], axis=2)
    shrink = jnp.exp(best - jnp.max(best, axis=2, keepdims=True))
    whole = jnp.sum(total * shrink, axis=2)
    out = jnp.sum(acc * shrink[:, :, :parts, :, None], axis=2)
    return out / jnp.where(whole == 0, 1.0, whole)[..., None]
