"""The kernel of attention over pages for TPUs.

It fetches only a sequence's own pages, each once, while it computes on the previous ones. The XLA implementation
first gathers the pages of all sequences into one array, as many as the longest sequence has. The kernel copies page
by page from the pool into on-chip memory, with two alternating blocks of pages, and stops where a sequence ends (the
idea of W. Kwon et al. 2023, arXiv:2309.06180, section 5.1; here for TPUs).

In a block, rows of one head are ``kv_heads`` apart: a strided load gathers them, for 16-bit elements two heads at a
time as the halves of 32-bit words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.attention.paged_tpu import LANES, SUBLANES, PagedPlan
from capibara.ops.attention.pallas_calls import pad, round_up
from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.one_device import kernel_results

__all__ = ["output"]


def _kernel(
    plan: PagedPlan, table: Any, lengths: Any, query: Any, key_pages: Any, value_pages: Any, *refs: Any
) -> None:
    sinks = refs[0] if plan.sinks else None
    out, keys, values, semaphores, best, total, acc = refs[plan.sinks :]
    sequence = pl.program_id(0)
    length = lengths[sequence]
    (pages, page_rows, _), heads = key_pages.shape, query.shape[1]
    page_size = page_rows // heads
    size = plan.together * page_size
    room = table.shape[1] * page_size
    end = jnp.minimum(length, room)
    # `lax.div`, not `//`: what rounds down asks, while it is compiled, which chip this is.
    first = 0 if plan.window is None else lax.div(jnp.maximum(length - plan.new - plan.window + 1, 0), size)
    blocks = pl.cdiv(end, size)

    def copies(block: Any, slot: Any, act: Callable[[Any], None]) -> None:
        begin = block * plan.together

        def one(i: Any, _: Any) -> Any:
            # What a table says of pages that are not there is not followed.
            page = jnp.clip(table[sequence, begin + i], 0, pages - 1)
            for which, (pool, parts) in enumerate(((key_pages, keys), (value_pages, values))):
                for part in range(parts.shape[0]):
                    columns = _columns(part, parts)
                    to = parts.at[part, slot, pl.ds(i * page_rows, page_rows)]
                    act(pltpu.make_async_copy(pool.at[page, :, columns], to, semaphores.at[which, slot]))
            return _

        lax.fori_loop(0, jnp.clip(pl.cdiv(end, page_size) - begin, 0, plan.together), one, 0)

    if sinks is None:
        best[...] = jnp.full(best.shape, ROW_FLOOR, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
    else:
        best[...] = jnp.maximum(sinks[...], ROW_FLOOR)
        total[...] = jnp.exp(sinks[...] - best[...])
    acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(first < blocks)
    def _fetch() -> None:
        copies(first, lax.rem(first, 2), lambda copy: copy.start())

    rows = query.shape[2]
    row = lax.div(lax.broadcasted_iota(jnp.int32, (rows, size), 0), plan.group)
    column = lax.broadcasted_iota(jnp.int32, (rows, size), 1)
    place = lax.broadcasted_iota(jnp.int32, (size, 1), 0)

    def step(block: Any, _: Any) -> Any:
        slot = lax.rem(block, 2)

        @pl.when(block + 1 < blocks)
        def _fetch_next() -> None:
            copies(block + 1, 1 - slot, lambda copy: copy.start())

        copies(block, slot, lambda copy: copy.wait())
        at = block * size + column
        mine = length - plan.new + row
        visible = at <= mine
        if plan.window is not None:
            visible &= at > mine - plan.window
        hidden = jnp.where(visible, 0.0, HIDDEN).astype(jnp.float32)
        there = block * size + place < end  # a page may hold anything after the end
        for head in range(heads):
            s = plan.scale * _products(plan, query, keys, slot, head, there)
            if plan.softcap is not None:
                s = plan.softcap * jnp.tanh(s / plan.softcap)
            s = s + hidden
            new_best = jnp.maximum(best[head], jnp.max(s, axis=1, keepdims=True))
            weights, shrink = jnp.exp(s - new_best), jnp.exp(best[head] - new_best)
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            best[head] = new_best
            for part in range(values.shape[0]):
                value = jnp.where(
                    there, _rows_of(values.at[part, slot], head, heads), jnp.zeros((), values.dtype)
                )
                columns = _columns(part, values)
                more = jnp.dot(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
                acc[head, :, columns] = acc[head, :, columns] * shrink + more
        return _

    lax.fori_loop(first, blocks, step, 0)
    for head in range(heads):
        whole = total[head]
        out[0, head] = (acc[head] / jnp.where(whole == 0, 1.0, whole)).astype(out.dtype)


def _columns(part: int, parts: Any) -> Any:
    """Those of a head that lie in a part: 128, or all where a head has fewer."""
    return pl.ds(part * LANES, parts.shape[3])


def _products(plan: PagedPlan, query: Any, keys: Any, slot: Any, head: int, there: jax.Array) -> jax.Array:
    """Products of a head's queries with its keys [rows, size], float32."""
    out = None
    for part in range(keys.shape[0]):
        known, width = there, plan.key_dim - part * LANES
        if width < keys.shape[3]:  # what pads a row may be anything, too
            known = there & (lax.broadcasted_iota(jnp.int32, (1, keys.shape[3]), 1) < width)
        key = jnp.where(known, _rows_of(keys.at[part, slot], head, query.shape[1]), jnp.zeros((), keys.dtype))
        some = query[0, head, :, _columns(part, keys)]
        more = lax.dot_general(some, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        out = more if out is None else out + more
    assert out is not None
    return out


def _rows_of(block: Any, head: int, heads: int) -> jax.Array:
    """The rows [size, width] of a head, of a block [size * heads, width]."""
    size = block.shape[0] // heads
    if heads == 1:
        return block[...]
    if block.dtype == jnp.float32:
        return block[pl.ds(head, size, stride=heads)]
    # In memory 16-bit rows lie two by two in words, the even one in the lower half.
    words = block.bitcast(jnp.uint32)[pl.ds(head // 2, size, stride=heads // 2)]
    bits = words & jnp.uint32(0xFFFF0000) if head % 2 else words << 16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(block.dtype)


def output(
    plan: PagedPlan, query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, *sinks: Any
) -> jax.Array:
    """The output [batch, new, heads, value_dim], for the arrays of ``paged_attention``."""
    batch, new, all_heads, dim = query.shape
    _, page_size, heads, value_dim = value_pages.shape
    count = new * plan.group
    rows = round_up(count, SUBLANES)
    query = query.reshape(batch, new, heads, plan.group, dim).swapaxes(1, 2).reshape(batch, heads, count, dim)
    query = pad(query.astype(key_pages.dtype), 2, rows)

    def of_rows(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, rows, last), lambda b, *_: (b, 0, 0, 0))

    def block(last: int) -> Any:
        width = min(last, LANES)
        return pltpu.VMEM((last // width, 2, plan.together * page_size * heads, width), key_pages.dtype)

    # A logit for each row of a key head.
    logits = [
        pad(jnp.tile(x.astype(jnp.float32).reshape(heads, plan.group), (1, new))[..., None], 1, rows)
        for x in sinks
    ]
    pools = [x.reshape(x.shape[0], page_size * heads, x.shape[3]) for x in (key_pages, value_pages)]
    moved = key_pages.dtype.itemsize * batch * table.shape[1] * page_size * heads * (dim + value_dim)
    scores = batch * heads * rows * table.shape[1] * page_size
    out = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch,),
            in_specs=[
                of_rows(dim),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
                *[pl.BlockSpec(x.shape, lambda b, *_: (0, 0, 0)) for x in logits],
            ],
            out_specs=of_rows(value_dim),
            scratch_shapes=[
                block(dim),
                block(value_dim),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, value_dim), jnp.float32),
            ],
        ),
        out_shape=kernel_results(
            (query, key_pages, value_pages, table, lengths, *sinks),
            ((batch, heads, rows, value_dim), plan.dtype),
        )[0],
        # Sequences have nothing to do with one another: a chip with two cores shares them out.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (dim + value_dim), transcendentals=scores, bytes_accessed=moved
        ),
        interpret=plan.interpret,
        name="capibara_attention_paged",
    )(table.astype(jnp.int32), lengths.astype(jnp.int32), query, *pools, *logits)
    out = out[:, :, :count].reshape(batch, heads, new, plan.group, value_dim).swapaxes(1, 2)
    return out.reshape(batch, new, all_heads, value_dim)
