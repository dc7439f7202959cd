"""Attention on NVIDIA GPUs: problems that ``pallas_gpu_kernels`` supports, blocks and padding.

They were tested in interpret mode and compiled for an H100, but not measured on a GPU: ``"auto"`` chooses them only
if ``capibara tune`` found them to be faster than the XLA implementation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.attention.pallas_calls import EXACT, FAST, Kernels, pad, round_up
from capibara.ops.attention.pallas_plan import Plan
from capibara.ops.attention.problem import AttentionProblem, from_bhsd, to_bhsd

__all__ = ["backward", "check", "forward"]

SMALLEST, LARGEST = 16, 128  # what Triton multiplies, and what registers hold
WIDEST = 256
_DTYPES = ("float32", "bfloat16", "float16")


def check(problem: AttentionProblem) -> None:
    operand = problem.operand_dtype or problem.dtype
    if problem.dtype not in _DTYPES or operand not in _DTYPES:
        raise NotImplementedError(f"computes in float32, bfloat16 or float16, not {operand}")
    if operand == "float32" and problem.precision not in (*FAST, *EXACT):
        raise NotImplementedError(f"has no precision {problem.precision}, only the fastest and the highest")
    if problem.bias_shape is not None:
        raise NotImplementedError("has no bias")
    wide = max(problem.head_dim, problem.value_dim)
    if wide > WIDEST:
        raise NotImplementedError(f"takes a last axis of at most {WIDEST}, not {wide}")


def _power(n: int) -> int:
    """The least power of two of at least ``n`` that Triton multiplies."""
    return max(SMALLEST, 1 << (n - 1).bit_length())


def _block(problem: AttentionProblem) -> int:
    """A power of two: the greatest up to what was asked for, else what fits into the memory of a multiprocessor."""
    wide = _power(max(problem.head_dim, problem.value_dim))
    narrow = (problem.operand_dtype or problem.dtype) != "float32"
    # The kernel for key and value holds four operands and two sums of a block.
    most = min(LARGEST, (8192 if narrow else 4096) // wide)
    wanted = problem.block_size or 64
    return max(SMALLEST, min(most, 1 << (wanted.bit_length() - 1)))


def _plan(problem: AttentionProblem, interpret: bool) -> tuple[Plan, int, int]:
    """The kernels' plan and the padded lengths."""
    block = _block(problem)
    rows, keys = (min(block, _power(n)) for n in (problem.q_len, problem.kv_len))
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
    return plan, round_up(problem.q_len, rows), round_up(problem.kv_len, keys)


def _operand(problem: AttentionProblem, x: Any, length: int) -> jax.Array:
    x = to_bhsd(x, problem.layout).astype(problem.operand_dtype or problem.dtype)
    return pad(pad(x, 2, length), 3, _power(x.shape[3]))


def _operands(
    problem: AttentionProblem, rows: int, keys: int, query: Any, key: Any, value: Any, ids: tuple[Any, ...]
) -> tuple[Any, ...]:
    padded = (_operand(problem, x, n) for x, n in ((query, rows), (key, keys), (value, keys)))
    return *padded, tuple(pad(x.astype(jnp.int32), 1, n) for x, n in zip(ids, (rows, keys), strict=False))


def _forward(
    problem: AttentionProblem, interpret: bool, query: Any, key: Any, value: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    from capibara.ops.attention import pallas_gpu_kernels as kernels

    plan, rows, keys = _plan(problem, interpret)
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    out, stat = kernels.output(plan, q, k, v, *ids)
    out = out[:, :, : problem.q_len, : problem.value_dim]
    return from_bhsd(out, problem.layout), stat[:, :, : problem.q_len]


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
    from capibara.ops.attention import pallas_gpu_kernels as kernels

    plan, rows, keys = _plan(problem, interpret)
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    do, out = to_bhsd(out_grad, problem.layout), to_bhsd(out, problem.layout)
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    do = _operand(problem, out_grad, rows)
    given = (q, k, v, do, pad(stat, 2, rows), pad(delta, 2, rows), *ids)
    dq = kernels.query_gradient(plan, *given)
    dk, dv = kernels.key_value_gradients(plan, *given)
    grads = (
        dq[:, :, : problem.q_len, : problem.head_dim],
        dk[:, :, : problem.kv_len, : problem.head_dim],
        dv[:, :, : problem.kv_len, : problem.value_dim],
    )
    return tuple(from_bhsd(x, problem.layout) for x in grads)


_KERNELS = Kernels("cuda", _forward, _backward)
forward, backward = _KERNELS.forward, _KERNELS.backward
