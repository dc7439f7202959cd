"""The selective scan by the compiled loop of :mod:`capibara.native` (CPUs), one position after the other.

This needs no more arithmetic than the chunked form, and no exponential for every pair of positions; unlike an XLA
loop, a compiled loop keeps the state in the first-level cache. Its gradient is a second such loop, which recomputes
the states and stores one for every 64 positions. Forward-mode and second derivatives are those of the chunked form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import native_call
from capibara.ops.scan import xla
from capibara.ops.scan.problem import ScanProblem
from capibara.ops.scan.pulled import linear_with_transpose

__all__ = ["check", "scan"]

_DTYPES = ("float32", "bfloat16", "float16")


def check(problem: ScanProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype not in _DTYPES:
        raise NotImplementedError(f"computes in float32, not {problem.dtype}")
    if problem.chunk_size is not None:
        raise NotImplementedError("has no chunk_size")
    if problem.starts:
        raise NotImplementedError("does not begin anew within a row (starts)")


# For every number of the state: what is added, and what is read.
register_foreign_call(
    "capibara_selective_scan", lambda ins, _outs, _attributes: 4 * math.prod(ins[0]) * ins[3][-1]
)


register_foreign_call(
    # The same for the state and its gradient, and what it gives to those of x, b, c and the decay.
    "capibara_selective_scan_backward",
    lambda ins, _outs, _attributes: 12 * math.prod(ins[0]) * ins[3][-1],
)


def _wide(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [v.astype(jnp.float32) for v in arrays]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scan(problem: ScanProblem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, *_, initial_state = arrays
    out = [jax.ShapeDtypeStruct(v.shape, jnp.float32) for v in (x, initial_state)]
    y, state = native_call("capibara_selective_scan", out, *_wide(arrays))
    return y.astype(x.dtype), state


@_scan.defjvp
def _tangent(problem: ScanProblem, primals: Any, tangents: Any) -> Any:
    def pushed(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(partial(xla.scan, problem), tuple(primals), tuple(tangents))[1]

    return _scan(problem, *primals), linear_with_transpose(
        pushed, partial(_pull, problem), tuple(primals), tuple(tangents)
    )


def _pull(
    problem: ScanProblem, arrays: Sequence[jax.Array], grads: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    return _gradient(problem, *arrays, *grads)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradient(problem: ScanProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of the six arrays; after these, those of the two results are given."""
    inputs = arrays[:6]
    shapes = [v.shape for v in inputs]
    shapes[2] = (problem.batch, problem.heads)
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = list(native_call("capibara_selective_scan_backward", out, *_wide(arrays)))
    grads[2] = jnp.sum(grads[2], axis=0)
    return tuple(g.astype(v.dtype) for g, v in zip(grads, inputs, strict=True))


@_gradient.defjvp
def _gradient_tangent(problem: ScanProblem, primals: Any, tangents: Any) -> Any:
    # Second derivatives are the chunked form's.
    def plain(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(partial(xla.scan, problem), *arrays[:6])[1](arrays[6:])

    return jax.jvp(plain, primals, tangents)


def scan(problem: ScanProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _scan(problem, *(jnp.asarray(v) for v in arrays))
