"""The selective scan by the compiled loop of :mod:`capibara.native` (CPUs), one position after the other.

Written out like that it takes no more arithmetic than the chunked form, and no exponential of every pair of positions;
what a compiled loop adds to XLA's is that the state stays in the first-level cache.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import native_call
from capibara.ops.scan import xla
from capibara.ops.scan.problem import ScanProblem

__all__ = ["check", "scan"]

_DTYPES = ("float32", "bfloat16", "float16")


def check(problem: ScanProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype not in _DTYPES:
        raise NotImplementedError(f"computes in float32, not {problem.dtype}")
    if problem.chunk_length is not None:
        raise NotImplementedError("has no chunk_length")


# For every number of the state: what is added, and what is read.
register_foreign_call(
    "capibara_selective_scan", lambda ins, _outs, _attributes: 4 * math.prod(ins[0]) * ins[3][-1]
)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scan(problem: ScanProblem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, *_, initial_state = arrays
    wide = [v.astype(jnp.float32) for v in arrays]
    out = [jax.ShapeDtypeStruct(v.shape, jnp.float32) for v in (x, initial_state)]
    y, state = native_call("capibara_selective_scan", out, *wide)
    return y.astype(x.dtype), state


@_scan.defjvp
def _tangent(problem: ScanProblem, primals: Any, tangents: Any) -> Any:
    # Where a derivative is taken the chunked form runs, values and all: its tangents share its products.
    return jax.jvp(partial(xla.scan, problem), primals, tangents)


def scan(problem: ScanProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _scan(problem, *(jnp.asarray(v) for v in arrays))
