"""Attention over pages on CPUs, by the compiled kernels of :mod:`capibara.native` (float32 and bfloat16).

XLA gathers pages of all sequences into one array, as many as the longest one has. The kernel reads each sequence's own
pages where they lie, and no more of them than it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import alike

if TYPE_CHECKING:
    from capibara.ops.attention.paged import PagedProblem

__all__ = ["check", "forward"]

_DTYPES = ("float32", "bfloat16")


def _cost(ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], attributes: Mapping[str, Any]) -> int:
    """FLOP if every page of the table is full: how long sequences are is data."""
    query, keys, _, table, *_ = ins
    seen = table[-1] * keys[-3]
    seen = min(seen, int(attributes["window"]) or seen)
    return 2 * math.prod(query[:-1]) * seen * (query[-1] + outs[0][-1])


register_foreign_call("capibara_paged_attention", _cost)


def check(problem: PagedProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.coded:
        raise NotImplementedError("takes pages of numbers, not of codes")
    for dtype in (problem.dtype, *problem.pages_dtypes):
        if dtype not in _DTYPES:
            raise NotImplementedError(f"takes float32 and bfloat16, not {dtype}")
    if problem.pages == 0 or problem.page_size == 0:
        raise NotImplementedError("there are no pages")


def forward(
    problem: PagedProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *sinks: jax.Array,
) -> jax.Array:
    dim, columns = problem.used
    out = jax.ShapeDtypeStruct((*query.shape[:-1], columns), query.dtype)
    logits = sinks[0].astype(jnp.float32) if sinks else jnp.zeros(0, jnp.float32)
    arrays = query[..., :dim], key, value, table.astype(jnp.int32), lengths, logits
    found = native.call_one_by_one(
        "capibara_paged_attention",
        (out,),
        *arrays,
        window=problem.window or 0,
        scale=float(problem.scale),
        softcap=float(problem.softcap or 0.0),
    )[0]
    found = alike(found, arrays)
    return jnp.pad(found, ((0, 0), (0, 0), (0, 0), (0, problem.value_dim - columns)))
