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


def _operands(
    problem: AttentionProblem, rows: int, keys: int, query: Any, key: Any, value: Any, ids: tuple[Any, ...]
) -> tuple[Any, ...]:
    operand = problem.operand_dtype or problem.dtype
    q, k, v = (to_bhsd(x, problem.layout).astype(operand) for x in (query, key, value))
    q = grouped(problem, pad(q, 2, rows))
    ids = tuple(pad(x.astype(jnp.int32), 1, n)[:, None] for x, n in zip(ids, (rows, keys), strict=False))
    return q, pad(k, 2, keys), pad(v, 2, keys), ids


def _forward(
    problem: AttentionProblem, interpret: bool, query: Any, key: Any, value: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    from capibara.ops.attention import pallas_tpu_kernels as kernels

    plan, rows, keys = output_plan(problem, interpret)
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    out, stat = kernels.output(plan, q, k, v, *ids)
    out = ungrouped(problem, out)[:, :, : problem.q_len]
    return from_bhsd(out, problem.layout), ungrouped(problem, stat)[:, :, 0, : problem.q_len]


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
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    do, out = to_bhsd(out_grad, problem.layout), to_bhsd(out, problem.layout)
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    do = grouped(problem, pad(do.astype(q.dtype), 2, rows))
    stat, delta = (grouped(problem, pad(x, 2, rows)[:, :, None]) for x in (stat, delta))
    given = (q, k, v, do, stat, delta, *ids)
    if fused:
        dq, dk, dv = pallas_tpu_fused.gradients(plan, *given)
    else:
        dq = kernels.query_gradient(plan, *given)
        dk, dv = kernels.key_value_gradients(plan, *given)
    dq = ungrouped(problem, dq)[:, :, : problem.q_len]
    grads = (dq, dk[:, :, : problem.kv_len], dv[:, :, : problem.kv_len])
    return tuple(from_bhsd(x, problem.layout) for x in grads)


_KERNELS = Kernels("tpu", _forward, _backward)
forward, backward = _KERNELS.forward, _KERNELS.backward
