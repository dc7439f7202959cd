"""Attention on TPUs: problems that ``pallas_tpu_kernels`` supports, blocks and padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.attention.pallas_calls import EXACT, FAST, Kernels, grouped, pad, round_up, ungrouped
from capibara.ops.attention.pallas_plan import Plan
from capibara.ops.attention.problem import AttentionProblem, from_bhsd, to_bhsd

__all__ = ["backward", "check", "forward", "gradient_plan", "output_plan"]

LANES = 128
BLOCK = 512
# Of 16 MiB on the smallest chip: what blocks of operands, sums and scores may take by our estimates, which are more
# than what the compiler takes; the one of a kernel that keeps the sums of all keys the most.
VMEM_BYTES, OUTPUT_BYTES, SUMS_BYTES = 13 << 20, 14 << 20, 16 << 20


def check(problem: AttentionProblem) -> None:
    operand = problem.operand_dtype or problem.dtype
    if problem.dtype not in ("float32", "bfloat16") or operand not in ("float32", "bfloat16"):
        raise NotImplementedError(f"computes in float32 or bfloat16, not {operand}")
    if operand == "float32" and problem.precision not in (*FAST, *EXACT):
        raise NotImplementedError(f"has no precision {problem.precision}, only the fastest and the highest")
    if problem.bias_shape is not None:
        raise NotImplementedError("has no bias")
    if _block(problem, LANES) < LANES:
        raise NotImplementedError(
            f"its blocks do not fit into {VMEM_BYTES >> 20} MiB with a last axis of "
            f"{max(problem.head_dim, problem.value_dim)}"
        )


def _block(problem: AttentionProblem, wanted: int, *, backward: bool = True) -> int:
    """The largest block size up to ``wanted`` that fits; 0 when none does."""
    size = 2 if (problem.operand_dtype or problem.dtype) == "bfloat16" else 4
    value_dim = round_up(problem.value_dim, LANES)
    dims = round_up(problem.head_dim, LANES) + value_dim
    for block in range(round_up(wanted, LANES), 0, -LANES):
        if backward:
            # Two copies of four operands and of the results, the sums, and of at most 512 columns three arrays of
            # scores in float32 and two as they are multiplied.
            held = 2 * 2 * size * dims + 2 * 4 * dims + 4 * dims + (3 * 4 + 2 * size) * min(block, BLOCK)
        else:
            # Two copies of three operands and of the output, its sum, two values a row in all lanes, and scores.
            held = 2 * 2 * size * dims + 4 * value_dim + 2 * 4 * LANES + 2 * 4 * block
        if block * held <= (VMEM_BYTES if backward else OUTPUT_BYTES):
            # Between the two sizes a sequence would be padded more.
            return BLOCK if BLOCK < block < round_up(wanted, LANES) else block
    return 0


def _cut(length: int, block: int) -> tuple[int, int]:
    """Size and number of the blocks that cover ``length``."""
    count = -(-length // block)
    return round_up(-(-length // count), LANES), count


def output_plan(problem: AttentionProblem, interpret: bool) -> tuple[Plan, int, int]:
    """The forward pass' plan and padded lengths."""
    block = _block(problem, problem.block_size or BLOCK, backward=False)
    # Between its two products a block waits for the maxima of its rows. In short blocks twice as many keys wait half as
    # often: blocks of 256 take 4 to 39 % fewer bundles.
    keys = _block(problem, 2 * block, backward=False) if block <= BLOCK // 2 else block
    return _plan(problem, interpret, block, keys)


def _plan(
    problem: AttentionProblem, interpret: bool, block: int, most_keys: int | None = None
) -> tuple[Plan, int, int]:
    rows, row_blocks = _cut(problem.q_len, block)
    keys, key_blocks = _cut(problem.kv_len, most_keys or block)
    exact = problem.precision in EXACT and (problem.operand_dtype or problem.dtype) == "float32"
    plan = Plan(
        rows=rows,
        keys=keys,
        kv_len=problem.kv_len,
        left=problem.left,
        right=problem.right,
        scale=problem.scale,
        softcap=problem.softcap,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        dtype=problem.dtype,
        interpret=interpret,
        heads=_beside(problem),
    )
    return plan, rows * row_blocks, keys * key_blocks


def gradient_plan(problem: AttentionProblem, interpret: bool) -> tuple[Plan, int, int, bool]:
    """The backward pass' plan and padded lengths, and whether one kernel computes all three gradients."""
    from capibara.ops.attention.pallas_tpu_fused import vmem_bytes

    # Larger blocks would leave less room for the sums.
    wanted = problem.block_size or BLOCK
    plan, rows, keys = _plan(problem, interpret, _block(problem, min(wanted, BLOCK)))
    blocks = keys // plan.keys
    size = jnp.dtype(problem.operand_dtype or problem.dtype).itemsize
    held = vmem_bytes(plan, keys, size, problem.head_dim, problem.value_dim)
    # Under a window that is shorter than the keys, blocks of queries reach fewer of them.
    if plan.key_blocks(blocks).steps == blocks and held <= SUMS_BYTES:
        return plan, rows, keys, True
    return *_plan(problem, interpret, _block(problem, wanted)), False


def _beside(problem: AttentionProblem) -> tuple[int, int] | None:
    """``Plan.heads``: whether the kernels read the heads where they are, as ``[batch, sequence, heads * dim]``."""
    whole = problem.head_dim % LANES == 0 and problem.value_dim % LANES == 0
    return (problem.kv_heads, problem.group) if problem.layout == "bshd" and whole else None


def _of_queries(problem: AttentionProblem, plan: Plan, x: Any, rows: int) -> Any:
    """An array with the query's heads as the kernels take it, padded to ``rows``."""
    if plan.heads is None:
        return grouped(problem, pad(to_bhsd(x, problem.layout), 2, rows))
    return pad(x.reshape(*x.shape[:2], -1), 1, rows)


def _of_keys(problem: AttentionProblem, plan: Plan, x: Any, keys: int) -> Any:
    if plan.heads is None:
        return pad(to_bhsd(x, problem.layout), 2, keys)
    return pad(x.reshape(*x.shape[:2], -1), 1, keys)


def _to_caller(problem: AttentionProblem, plan: Plan, x: Any, length: int, heads: int) -> Any:
    """A kernel's result with ``heads`` heads, of ``length`` positions, in the caller's layout."""
    if plan.heads is not None:
        return x[:, :length].reshape(x.shape[0], length, heads, -1)
    split = x if x.ndim == 4 else ungrouped(problem, x)
    return from_bhsd(split[:, :, :length], problem.layout)


def _operands(
    problem: AttentionProblem,
    plan: Plan,
    rows: int,
    keys: int,
    query: Any,
    key: Any,
    value: Any,
    ids: tuple[Any, ...],
) -> tuple[Any, ...]:
    q, k, v = (x.astype(problem.operand_dtype or problem.dtype) for x in (query, key, value))
    ids = tuple(pad(x.astype(jnp.int32), 1, n)[:, None] for x, n in zip(ids, (rows, keys), strict=False))
    of_keys = (_of_keys(problem, plan, x, keys) for x in (k, v))
    return _of_queries(problem, plan, q, rows), *of_keys, ids


def _forward(
    problem: AttentionProblem, interpret: bool, query: Any, key: Any, value: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    from capibara.ops.attention import pallas_tpu_kernels as kernels

    plan, rows, keys = output_plan(problem, interpret)
    q, k, v, ids = _operands(problem, plan, rows, keys, query, key, value, ids)
    out, stat = kernels.output(plan, q, k, v, *ids)
    out = _to_caller(problem, plan, out, problem.q_len, problem.heads)
    return out, ungrouped(problem, stat)[:, :, 0, : problem.q_len]


def _backward(
    problem: AttentionProblem,
    interpret: bool,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    stat: Any,
    out_grad: Any,
    *ids: Any,
) -> tuple[jax.Array, ...]:
    from capibara.ops.attention import pallas_tpu_fused
    from capibara.ops.attention import pallas_tpu_kernels as kernels

    plan, rows, keys, fused = gradient_plan(problem, interpret)
    q, k, v, ids = _operands(problem, plan, rows, keys, query, key, value, ids)
    do = _of_queries(problem, plan, out_grad.astype(q.dtype), rows)
    stat = grouped(problem, pad(stat, 2, rows)[:, :, None])
    if fused and plan.heads is not None and out.dtype == out_grad.dtype == q.dtype:
        # Where heads stand side by side, XLA would transpose both for their sums over a head.
        delta = _of_queries(problem, plan, out, rows)
    else:
        both = out_grad.astype(jnp.float32) * out.astype(jnp.float32)
        delta = jnp.sum(to_bhsd(both, problem.layout), axis=-1)
        delta = grouped(problem, pad(delta, 2, rows)[:, :, None])
    given = (q, k, v, do, stat, delta, *ids)
    if fused:
        dq, dk, dv = pallas_tpu_fused.gradients(plan, *given)
    else:
        dq = kernels.query_gradient(plan, *given)
        dk, dv = kernels.key_value_gradients(plan, *given)
    sizes = (problem.q_len, problem.heads), *((problem.kv_len, problem.kv_heads),) * 2
    return tuple(_to_caller(problem, plan, x, *each) for x, each in zip((dq, dk, dv), sizes, strict=True))


_KERNELS = Kernels("tpu", _forward, _backward)
forward, backward = _KERNELS.forward, _KERNELS.backward
