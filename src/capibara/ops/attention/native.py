"""Attention by the compiled kernels of :mod:`capibara.native` (float32 on CPUs)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.attention import cpu, xla
from capibara.ops.attention.problem import AttentionProblem

__all__ = ["backward", "check", "forward"]

_NO_LIMIT = 1 << 40


def check(problem: AttentionProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype != "float32" or problem.operand_dtype is not None:
        raise NotImplementedError(f"computes in float32, not {problem.operand_dtype or problem.dtype}")
    given = {
        "bias": problem.bias_shape is not None,
        "segment_ids": problem.has_segments,
        "softcap": problem.softcap is not None,
        "block_size": problem.block_size is not None,
    }
    if any(given.values()):
        raise NotImplementedError(f"has no {' and no '.join(name for name, there in given.items() if there)}")


def _attributes(problem: AttentionProblem) -> dict[str, int | float]:
    return {
        "layout": 0 if problem.layout == "bhsd" else 1,
        "left": _NO_LIMIT if problem.left is None else problem.left,
        "right": _NO_LIMIT if problem.right is None else problem.right,
        "scale": problem.scale,
    }


def _cost(ins: list[tuple[int, ...]], products: tuple[int, int], attributes: Mapping[str, Any]) -> int:
    """FLOP of the pairs that are visible, of so many products over the last axis of the query and of the value."""
    query, key, value = ins[:3]
    sequence = -2 if attributes["layout"] == 0 else -3
    heads = -3 if attributes["layout"] == 0 else -2
    left, right, kv_len = int(attributes["left"]), int(attributes["right"]), key[sequence]
    pairs = sum(max(0, min(i + right + 1, kv_len) - max(i - left, 0)) for i in range(query[sequence]))
    work = products[0] * query[-1] + products[1] * value[-1]
    return 2 * math.prod(query[:-3]) * query[heads] * pairs * work


register_foreign_call("capibara_attention_forward", lambda ins, _, attributes: _cost(ins, (1, 1), attributes))
register_foreign_call(
    "capibara_attention_backward", lambda ins, _, attributes: _cost(ins, (3, 2), attributes)
)


def _like(x: jax.Array, last: int | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], last or x.shape[-1]), jnp.float32)


def _differentiable(problem: AttentionProblem) -> ModuleType:
    """The XLA form that the kernel's own gradient is taken of."""
    try:
        cpu.check(problem)
    except NotImplementedError:
        return xla
    return cpu


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(problem: AttentionProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    out = tuple(_like(x) for x in arrays[:3])
    return native.call("capibara_attention_backward", out, *arrays, **_attributes(problem))


def _gradients_forward(problem: AttentionProblem, *arrays: jax.Array) -> tuple[Any, Any]:
    query, key, value, _out, _stat, out_grad = arrays
    return _gradients(problem, *arrays), (query, key, value, out_grad)


def _gradients_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # The output and the statistic are functions of query, key and value: taken as such here, they get no
    # gradient of their own.
    form = _differentiable(problem)

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, out_grad: jax.Array) -> Any:
        arrays = (query, key, value, None, None, None)
        return form.backward(problem, arrays, *form.forward(problem, *arrays), out_grad)[:3]

    _, pull = jax.vjp(gradients, *residuals)
    pulled: Any = pull(tuple(cotangents))
    query, key, value, out_grad = pulled
    return query, key, value, None, None, out_grad


_gradients.defvjp(_gradients_forward, _gradients_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _output(problem: AttentionProblem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    stat = jax.ShapeDtypeStruct((problem.batch, problem.heads, problem.q_len), jnp.float32)
    out = (_like(arrays[0], problem.value_dim), stat)
    return native.call("capibara_attention_forward", out, *arrays, **_attributes(problem))


def _output_forward(problem: AttentionProblem, *arrays: jax.Array) -> tuple[Any, Any]:
    results: Any = _output(problem, *arrays)
    return results, (*arrays, *results)


def _output_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # Only `_gradients` reads the statistic, and gives it no gradient; so there is one for the output alone.
    return _gradients(problem, *residuals, cotangents[0])


_output.defvjp(_output_forward, _output_backward)


def forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output in the caller's layout, and the rows' log2-sum-exp2 [batch, heads, q_len]."""
    return _output(problem, *arrays[:3])


def backward(
    problem: AttentionProblem, arrays: tuple[Any, ...], out: jax.Array, stat: jax.Array, out_grad: jax.Array
) -> tuple[Any, ...]:
    """Gradients of query, key, value and (none) of the bias, in the caller's layout."""
    return *_gradients(problem, *arrays[:3], out, stat, out_grad), None
