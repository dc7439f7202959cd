"""Attention on TPUs by the kernels of ``pallas_tpu_kernels``: what they take, padding, gradients.

XLA cannot split a kernel over devices. In a program for several devices the kernels run inside ``jax.shard_map``;
outside of it the XLA form runs.

On other platforms an explicit ``implementation="pallas_tpu"`` runs the kernels interpreted: right, and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.ops.attention import xla
from capibara.ops.attention.problem import AttentionProblem, from_bhsd, to_bhsd
from capibara.ops.one_device import on_one_device

if TYPE_CHECKING:  # Pallas takes long to import, and only TPUs need it
    from capibara.ops.attention.pallas_tpu_kernels import Plan

__all__ = ["backward", "check", "forward"]

LANES = 128
BLOCK = 512
# Of 16 MiB on the smallest chip: what blocks of operands, sums and scores may take.
VMEM_BYTES = 10 << 20
_FAST = (None, jax.lax.Precision.DEFAULT, "default", "fastest", "bfloat16")
_EXACT = (jax.lax.Precision.HIGHEST, "highest", "float32")


def check(problem: AttentionProblem) -> None:
    operand = problem.operand_dtype or problem.dtype
    if problem.dtype not in ("float32", "bfloat16") or operand not in ("float32", "bfloat16"):
        raise NotImplementedError(f"computes in float32 or bfloat16, not {operand}")
    if operand == "float32" and problem.precision not in (*_FAST, *_EXACT):
        raise NotImplementedError(f"has no precision {problem.precision}, only the fastest and the highest")
    if problem.bias_shape is not None:
        raise NotImplementedError("has no bias")
    if _block(problem, LANES) < LANES:
        raise NotImplementedError(
            f"its blocks do not fit into {VMEM_BYTES >> 20} MiB with a last axis of "
            f"{max(problem.head_dim, problem.value_dim)}"
        )


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _block(problem: AttentionProblem, wanted: int) -> int:
    """The largest block size up to ``wanted`` that fits; 0 when none does."""
    size = 2 if (problem.operand_dtype or problem.dtype) == "bfloat16" else 4
    dims = _up(problem.head_dim, LANES) + _up(problem.value_dim, LANES)
    for block in range(_up(wanted, LANES), 0, -LANES):
        # In the backward pass: two copies of four operands and of the results, the sums, five arrays of scores.
        if block * (2 * 2 * size * dims + 2 * 4 * dims + 4 * dims + 5 * 4 * block) <= VMEM_BYTES:
            return block
    return 0


def _cut(length: int, block: int) -> tuple[int, int]:
    """Size and number of the blocks that cover ``length``."""
    count = -(-length // block)
    return _up(-(-length // count), LANES), count


def _plan(problem: AttentionProblem, interpret: bool) -> tuple[Plan, int, int]:
    """The kernels' plan and the padded lengths."""
    from capibara.ops.attention.pallas_tpu_kernels import Plan

    block = _block(problem, problem.block_size or BLOCK)
    rows, row_blocks = _cut(problem.q_len, block)
    keys, key_blocks = _cut(problem.kv_len, block)
    exact = problem.precision in _EXACT and (problem.operand_dtype or problem.dtype) == "float32"
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


def _pad(x: jax.Array, axis: int, length: int, value: int = 0) -> jax.Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def _run(
    problem: AttentionProblem, work: Callable[..., Any], otherwise: Callable[..., Any], *arrays: Any
) -> Any:
    """``work(problem, interpret, *arrays)``: compiled on TPUs, interpreted elsewhere if that was asked for."""
    compiled = partial(on_one_device, partial(work, problem, False), partial(otherwise, problem))
    if problem.implementation == "auto":  # which takes this implementation on TPUs only
        return compiled(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=compiled, default=partial(work, problem, True))


def _split_forward(problem: AttentionProblem, *arrays: Any) -> Any:
    return xla.forward(problem, *arrays[:3], None, *(arrays[3:] or (None, None)))


def _split_backward(problem: AttentionProblem, *arrays: Any) -> Any:
    given = (*arrays[:3], None, *(arrays[6:] or (None, None)))
    return xla.backward(problem, given, *arrays[3:6])[:3]


def _operands(
    problem: AttentionProblem, rows: int, keys: int, query: Any, key: Any, value: Any, ids: tuple[Any, ...]
) -> tuple[Any, ...]:
    operand = problem.operand_dtype or problem.dtype
    q, k, v = (to_bhsd(x, problem.layout).astype(operand) for x in (query, key, value))
    q = _grouped(problem, _pad(q, 2, rows))
    ids = tuple(_pad(x.astype(jnp.int32), 1, n)[:, None] for x, n in zip(ids, (rows, keys), strict=False))
    return q, _pad(k, 2, keys), _pad(v, 2, keys), ids


def _grouped(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], problem.kv_heads, problem.group, *x.shape[2:])


def _ungrouped(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], problem.heads, *x.shape[3:])


def _forward(
    problem: AttentionProblem, interpret: bool, query: Any, key: Any, value: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    from capibara.ops.attention import pallas_tpu_kernels as kernels

    plan, rows, keys = _plan(problem, interpret)
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    out, stat = kernels.output(plan, q, k, v, *ids)
    out = _ungrouped(problem, out)[:, :, : problem.q_len]
    return from_bhsd(out, problem.layout), _ungrouped(problem, stat)[:, :, 0, : problem.q_len]


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
    from capibara.ops.attention import pallas_tpu_kernels as kernels

    plan, rows, keys = _plan(problem, interpret)
    q, k, v, ids = _operands(problem, rows, keys, query, key, value, ids)
    do, out = to_bhsd(out_grad, problem.layout), to_bhsd(out, problem.layout)
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    do = _grouped(problem, _pad(do.astype(q.dtype), 2, rows))
    stat, delta = (_grouped(problem, _pad(x, 2, rows)[:, :, None]) for x in (stat, delta))
    given = (q, k, v, do, stat, delta, *ids)
    dq = kernels.query_gradient(plan, *given)
    dk, dv = kernels.key_value_gradients(plan, *given)
    dq = _ungrouped(problem, dq)[:, :, : problem.q_len]
    grads = (dq, dk[:, :, : problem.kv_len], dv[:, :, : problem.kv_len])
    return tuple(from_bhsd(x, problem.layout) for x in grads)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, ...]:
    return _run(problem, _backward, _split_backward, *arrays)


def _gradients_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
    return _gradients(problem, *arrays), arrays


def _gradients_backward(problem: AttentionProblem, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    # The output and the statistic are functions of query, key and value: taken as such in the XLA form, they get
    # no gradient of their own.
    query, key, value, _out, _stat, out_grad, *ids = arrays

    def gradients(query: Any, key: Any, value: Any, out_grad: Any) -> Any:
        given = (query, key, value, None, *(ids or (None, None)))
        return xla.backward(problem, given, *xla.forward(problem, *given), out_grad)[:3]

    pulled: Any = jax.vjp(gradients, query, key, value, out_grad)[1](tuple(cotangents))
    query, key, value, out_grad = pulled
    return query, key, value, None, None, out_grad, *(None for _ in ids)


_gradients.defvjp(_gradients_forward, _gradients_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _output(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _run(problem, _forward, _split_forward, *arrays)


def _output_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
    results: Any = _output(problem, *arrays)
    return results, (*arrays, *results)


def _output_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # Only `_gradients` reads the statistic, and gives it no gradient; so there is one for the output alone.
    query, key, value, *ids, out, stat = residuals
    grads: Any = _gradients(problem, query, key, value, out, stat, cotangents[0], *ids)
    return *grads, *(None for _ in ids)


_output.defvjp(_output_forward, _output_backward)


def _ids(problem: AttentionProblem, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arrays[4:6]) if problem.has_segments else ()


def forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output in the caller's layout, and the log-sum-exp of each row's scores [batch, heads, q_len]."""
    return _output(problem, *arrays[:3], *_ids(problem, arrays))


def backward(
    problem: AttentionProblem, arrays: tuple[Any, ...], out: jax.Array, stat: jax.Array, out_grad: jax.Array
) -> tuple[Any, ...]:
    """Gradients of query, key, value and (none) of the bias, in the caller's layout and dtype."""
    return *_gradients(problem, *arrays[:3], out, stat, out_grad, *_ids(problem, arrays)), None
