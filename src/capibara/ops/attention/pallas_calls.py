"""Calls of attention's Pallas kernels: platforms, devices, padding, gradients.

XLA cannot partition a kernel. In a program for several devices the kernels run inside ``jax.shard_map``; outside of
it the XLA implementation runs. On other platforms, an explicit request runs the kernels interpreted: correct, but
slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.attention import xla
from capibara.ops.attention.problem import AttentionProblem
from capibara.ops.attention.sinks import sinks_gradient, with_sinks
from capibara.ops.one_device import on_platform

__all__ = ["EXACT", "FAST", "Kernels", "grouped", "pad", "round_up", "ungrouped"]

FAST = (None, jax.lax.Precision.DEFAULT, "default", "fastest", "bfloat16")
EXACT = (jax.lax.Precision.HIGHEST, "highest", "float32")


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def pad(x: jax.Array, axis: int, length: int, value: int = 0) -> jax.Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def grouped(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    """[batch, heads, …] → [batch, kv_heads, group, …]."""
    return x.reshape(x.shape[0], problem.kv_heads, problem.group, *x.shape[2:])


def ungrouped(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], problem.heads, *x.shape[3:])


def _split_forward(problem: AttentionProblem, *arrays: Any) -> Any:
    return xla.forward(problem, *arrays[:3], None, *(arrays[3:] or (None, None)), None)


def _split_backward(problem: AttentionProblem, *arrays: Any) -> Any:
    given = (*arrays[:3], None, *(arrays[6:] or (None, None)), None)
    return xla.backward(problem, given, *arrays[3:6])[:3]


class Kernels:
    """The entry points of a kernel implementation, twice differentiable.

    Args:
      platform: Where they are compiled, by its name in lowering.
      forward: ``(problem, interpret, query, key, value, *ids) → (output, log-sum-exp of the rows)``.
      backward: ``(problem, interpret, query, key, value, output, log-sum-exp, output's gradient, *ids) →`` gradients
        of query, key and value.
    """

    def __init__(self, platform: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        def run(
            problem: AttentionProblem, work: Callable[..., Any], otherwise: Callable[..., Any], *arrays: Any
        ) -> Any:
            kernel, split = partial(work, problem), partial(otherwise, problem)
            return on_platform(platform, problem.implementation, kernel, split, *arrays)

        @partial(jax.custom_vjp, nondiff_argnums=(0,))
        def gradients(problem: AttentionProblem, sinks: Any, *arrays: Any) -> tuple[Any, ...]:
            """Of query, key, value and sinks."""
            found = run(problem, backward, _split_backward, *arrays)
            return *found, None if sinks is None else sinks_gradient(problem, sinks, *arrays[3:6])

        def gradients_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
            return gradients(problem, *arrays), arrays

        def gradients_backward(problem: AttentionProblem, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
            # The output and the statistic are functions of query, key, value and sinks: taken as such in the XLA form,
            # they get no gradient of their own.
            sinks, query, key, value, _out, _stat, out_grad, *ids = arrays

            def again(sinks: Any, query: Any, key: Any, value: Any, out_grad: Any) -> Any:
                given = (query, key, value, None, *(ids or (None, None)), sinks)
                *found, _, of_sinks = xla.backward(problem, given, *xla.forward(problem, *given), out_grad)
                return *found, of_sinks

            pulled: Any = jax.vjp(again, sinks, query, key, value, out_grad)[1](tuple(cotangents))
            *pulled, out_grad = pulled
            return *pulled, None, None, out_grad, *(None for _ in ids)

        gradients.defvjp(gradients_forward, gradients_backward)

        @partial(jax.custom_vjp, nondiff_argnums=(0,))
        def output(problem: AttentionProblem, sinks: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
            out, stat = run(problem, forward, _split_forward, *arrays)
            return (out, stat) if sinks is None else with_sinks(problem, sinks, out, stat)

        def output_forward(problem: AttentionProblem, *arrays: Any) -> tuple[Any, Any]:
            results: Any = output(problem, *arrays)
            return results, (*arrays, *results)

        def output_backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            # Only `gradients` reads the statistic, and gives it no gradient; so there is one for the output alone.
            sinks, query, key, value, *ids, out, stat = residuals
            found: Any = gradients(problem, sinks, query, key, value, out, stat, cotangents[0], *ids)
            *grads, of_sinks = found
            return of_sinks, *grads, *(None for _ in ids)

        output.defvjp(output_forward, output_backward)
        self._output, self._gradients = output, gradients

    def forward(self, problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        """The output in the caller's layout, and the log-sum-exp of each row's scores [batch, heads, q_len]."""
        return self._output(problem, arrays[6], *arrays[:3], *_ids(problem, arrays))

    def backward(
        self,
        problem: AttentionProblem,
        arrays: tuple[Any, ...],
        out: jax.Array,
        stat: jax.Array,
        out_grad: jax.Array,
    ) -> tuple[Any, ...]:
        """Gradients of query, key, value, (none) of the bias, and of the sinks, in the caller's layout and dtype."""
        given = (*arrays[:3], out, stat, out_grad, *_ids(problem, arrays))
        found: Any = self._gradients(problem, arrays[6], *given)
        *gradients, of_sinks = found
        return *gradients, None, of_sinks


def _ids(problem: AttentionProblem, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arrays[4:6]) if problem.has_segments else ()
