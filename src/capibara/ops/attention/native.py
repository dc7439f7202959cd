"""Attention by the compiled kernels of :mod:`capibara.native` (float32, bfloat16 and float16 on CPUs)."""

from __future__ import annotations

import dataclasses
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
from capibara.ops.attention.sinks import sinks_gradient, with_sinks
from capibara.ops.one_device import native_call

__all__ = ["backward", "check", "forward"]

_NO_LIMIT = 1 << 40
# What is rounded to 16 bits when it is read and written; all sums are float32.
_DTYPES = ("float32", "bfloat16", "float16")


def check(problem: AttentionProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype not in _DTYPES:
        raise NotImplementedError(f"computes in float32, not {problem.dtype}")


def _attributes(problem: AttentionProblem) -> dict[str, int | float]:
    return {
        "layout": 0 if problem.layout == "bhsd" else 1,
        "left": _NO_LIMIT if problem.left is None else problem.left,
        "right": _NO_LIMIT if problem.right is None else problem.right,
        "scale": problem.scale,
        "softcap": problem.softcap or 0.0,
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
register_foreign_call("capibara_attention_bias", lambda ins, _, attributes: _cost(ins, (1, 1), attributes))


def _like(x: jax.Array, last: int | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], last or x.shape[-1]), x.dtype)


def _inputs(arrays: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Query, key, value, bias and segments as the library takes them: an empty array stands for none."""
    *qkv, bias, query_ids, key_ids, _sinks = arrays
    bias = jnp.zeros((0,), jnp.float32) if bias is None else bias.astype(jnp.float32)
    ids = [jnp.zeros((0,), jnp.int32) if x is None else x for x in (query_ids, key_ids)]
    return *qkv, bias, *ids


def _small_ids(query_ids: Any, key_ids: Any) -> tuple[Any, Any]:
    """The same segments by numbers of 32 bits."""
    if query_ids is None:
        return None, None
    if max(query_ids.dtype.itemsize, key_ids.dtype.itemsize) < 8:
        return query_ids.astype(jnp.int32), key_ids.astype(jnp.int32)
    # Numbers of 64 bits: by their rank, since two of them may agree in their lower halves.
    count = query_ids.shape[1]
    both = jnp.concatenate([query_ids, key_ids], axis=1)
    _, rank = jnp.unique(both, return_inverse=True, size=both.size)
    rank = rank.reshape(both.shape).astype(jnp.int32)
    return rank[:, :count], rank[:, count:]


def _differentiable(problem: AttentionProblem) -> ModuleType:
    """The XLA form that the kernel's own gradient is taken of."""
    try:
        cpu.check(problem)
    except NotImplementedError:
        return xla
    return cpu


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(problem: AttentionProblem, *arrays: Any) -> tuple[Any, ...]:
    """Gradients of query, key, value, bias and sinks."""
    *arguments, out, stat, out_grad = arrays
    inputs, attributes = _inputs(tuple(arguments)), _attributes(problem)
    results = tuple(_like(x) for x in inputs[:3])
    more = (out, stat, out_grad)
    gradients = native_call("capibara_attention_backward", results, *inputs, *more, **attributes)
    bias: jax.Array | None = arguments[3]
    sinks: jax.Array | None = arguments[6]
    of_sinks = None if sinks is None else sinks_gradient(problem, sinks, *more, binary=True)
    if bias is None:
        return *gradients, None, of_sinks
    shape = (jax.ShapeDtypeStruct(bias.shape, jnp.float32),)
    # A call of its own, which XLA leaves out where nobody asks for its result.
    (bias_gradient,) = native_call("capibara_attention_bias", shape, *inputs, *more, **attributes)
    return *gradients, bias_gradient.astype(bias.dtype), of_sinks


def _gradients_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
    *arguments, _out, _stat, out_grad = arrays
    return _gradients(problem, *arrays), (*arguments, out_grad)


def _gradients_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # The output and the statistic are functions of query, key, value, bias and sinks: taken as such here, they get no
    # gradient of their own.
    form = _differentiable(problem)
    query, key, value, bias, query_ids, key_ids, sinks, out_grad = residuals

    def gradients(query: Any, key: Any, value: Any, bias: Any, sinks: Any, out_grad: Any) -> Any:
        arrays = (query, key, value, bias, query_ids, key_ids, sinks)
        return form.backward(problem, arrays, *form.forward(problem, *arrays), out_grad)

    _, pull = jax.vjp(gradients, query, key, value, bias, sinks, out_grad)
    *pulled, sinks_pulled, out_pulled = pull(tuple(cotangents))
    return *pulled, None, None, sinks_pulled, None, None, out_pulled


_gradients.defvjp(_gradients_forward, _gradients_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _output(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    stat = jax.ShapeDtypeStruct((problem.batch, problem.heads, problem.q_len), jnp.float32)
    out = (_like(arrays[0], problem.value_dim), stat)
    out, stat = native_call("capibara_attention_forward", out, *_inputs(arrays), **_attributes(problem))
    sinks: jax.Array | None = arrays[6]
    return (out, stat) if sinks is None else with_sinks(problem, sinks, out, stat, binary=True)


def _output_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
    results: Any = _output(problem, *arrays)
    return results, (*arrays, *results)


def _output_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # Only `_gradients` reads the statistic, and gives it no gradient; so there is one for the output alone.
    found: Any = _gradients(problem, *residuals, cotangents[0])
    *gradients, of_sinks = found
    return *gradients, None, None, of_sinks


_output.defvjp(_output_forward, _output_backward)


def _taken(problem: AttentionProblem, arrays: tuple[Any, ...]) -> tuple[AttentionProblem, tuple[Any, ...]]:
    """The problem with its operands rounded, where the caller wants that, in a dtype that the library reads."""
    *qkv, bias, query_ids, key_ids, sinks = arrays
    if problem.operand_dtype is not None:
        qkv = [x.astype(problem.operand_dtype).astype(problem.dtype) for x in qkv]
    if problem.dtype == "float16":
        qkv = [x.astype(jnp.float32) for x in qkv]
    mine = dataclasses.replace(problem, dtype=str(qkv[0].dtype), operand_dtype=None)
    return mine, (*qkv, bias, *_small_ids(query_ids, key_ids), sinks)


def forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output in the caller's layout, and the rows' log2-sum-exp2 [batch, heads, q_len]."""
    mine, taken = _taken(problem, arrays)
    results: Any = _output(mine, *taken)
    out, stat = results
    return out.astype(problem.dtype), stat


def backward(
    problem: AttentionProblem, arrays: tuple[Any, ...], out: jax.Array, stat: jax.Array, out_grad: jax.Array
) -> tuple[Any, ...]:
    """Gradients of query, key, value, bias and sinks (``None`` without them), in the caller's layout and dtype."""
    mine, taken = _taken(problem, arrays)
    results: Any = _gradients(mine, *taken, out.astype(mine.dtype), stat, out_grad.astype(mine.dtype))
    *gradients, of_bias, of_sinks = results
    return *(g.astype(problem.dtype) for g in gradients), of_bias, of_sinks
