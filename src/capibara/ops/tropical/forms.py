"""Max-plus products of float32 or float64: the definition, the XLA form, the native kernel.

Each is a pair: ``value(problem, a, b)`` and ``both(problem, a, b)``, the latter with the lowest index that attains
the maximum, or -1 if there is none (an entry of -inf, or NaN).

The XLA form is the plain fused ``max(a + bᵀ)``, a reduction; a ``where`` inside its loop makes it ten times slower.
So infinities of the wrong sign are removed before, and only if there are any: an entry is +inf exactly if one
operand's +inf is combined with a value other than -inf, which an ordinary product of zeros and ones determines.

On CPUs that reduction spends most of its time on JAX's rule that a maximum with NaN is NaN. There, large products are
computed in blocks that stay in the caches, elementwise and sixteen steps of the depth at a time: ``where(term > best,
term, best)`` is one instruction, and NaN is checked before. This is two to three times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.one_device import alike, native_call
from capibara.ops.tropical.problem import TropicalProblem, times

__all__ = [
    "all_finite",
    "careful",
    "native_both",
    "native_check",
    "native_value",
    "reached",
    "reference_both",
    "reference_value",
    "xla_both",
    "xla_value",
]

# Measured on two x86-64 cores with AVX2: eight steps at a time are slower than the reduction, and 32 than sixteen.
# Panels this wide of sixteen rows stay in the innermost cache.
_STEPS = 16
_PANEL = 256
_BLOCK_ENTRIES = 1 << 17
_LEAST_ROWS = 8
_LEAST_BLOCKED = 1 << 20
_LEAST_COLUMNS = 64


def _pairs(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The operands with axes [*batch, rows, columns, inner], the depth contiguous in both."""
    return a[..., :, None, :], jnp.swapaxes(b, -1, -2)[..., None, :, :]


def reached(a: jax.Array, b: jax.Array, value: jax.Array, inner: int) -> jax.Array:
    """The lowest index that attains each value; a row at a time, since XLA may materialise what it could fuse."""

    def row(now: tuple[jax.Array, jax.Array]) -> jax.Array:
        terms = now[0][..., :, None] + b
        at = lax.broadcasted_iota(jnp.int32, terms.shape, terms.ndim - 2)
        return jnp.min(jnp.where(terms == now[1][..., None, :], at, inner), -2, initial=inner)

    first = jnp.moveaxis(lax.map(row, (jnp.moveaxis(a, -2, 0), jnp.moveaxis(value, -2, 0))), 0, -2)
    return jnp.where((value == -jnp.inf) | jnp.isnan(value), -1, first).astype(jnp.int32)


def _mark_nan(value: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """NaN where a row of ``a`` or a column of ``b`` has one: XLA's CPU compiler can lose NaN in a long maximum."""
    nan = jnp.isnan(a).any(-1)[..., :, None] | jnp.isnan(b).any(-2)[..., None, :]
    return jnp.where(nan, jnp.nan, value).astype(value.dtype)


def reference_value(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    return _mark_nan(jnp.max(times(*_pairs(a, b), "max_plus"), -1, initial=-jnp.inf), a, b)


def reference_both(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = reference_value(problem, a, b)
    return value, reached(a, b, value, problem.inner)


def _plain(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of finite operands, or of such that hold -inf; an entry that NaN meets may be anything."""
    rows, inner, columns = *a.shape[-2:], b.shape[-1]
    if rows * columns * inner < _LEAST_BLOCKED or columns < _LEAST_COLUMNS or inner < _STEPS:
        return _reduced(a, b)
    return lax.platform_dependent(a, b, cpu=_blocked, default=_reduced)


def _reduced(a: jax.Array, b: jax.Array) -> jax.Array:
    left, right = _pairs(a, b)
    return jnp.max(left + right, -1, initial=-jnp.inf)


def _blocked(a: jax.Array, b: jax.Array) -> jax.Array:
    rows, inner, columns = *a.shape[-2:], b.shape[-1]
    panels = -(-columns // _PANEL)
    width = -(-columns // panels)
    blocks = -(-rows // max(_LEAST_ROWS, _BLOCK_ENTRIES // width))
    height = -(-rows // blocks)
    # What is added is -inf on the left, so it never is the maximum.
    ends = [(0, 0)] * (a.ndim - 2)
    deep = -inner % _STEPS
    left = jnp.pad(a, [*ends, (0, blocks * height - rows), (0, deep)], constant_values=-jnp.inf)
    left = jnp.swapaxes(left.reshape(-1, blocks, height, inner + deep), -1, -2)
    right = jnp.pad(b, [*ends, (0, deep), (0, panels * width - columns)])
    right = jnp.swapaxes(right.reshape(-1, inner + deep, panels, width), -2, -3)

    def one(now: tuple[jax.Array, jax.Array]) -> jax.Array:
        left, right = now
        return lax.map(lambda panel: lax.map(lambda block: _block(block, panel), left), right)

    out = jnp.moveaxis(lax.map(one, (left, right)), 1, -2)  # [batch, blocks, height, panels, width]
    return out.reshape(*a.shape[:-2], blocks * height, panels * width)[..., :rows, :columns]


def _block(left: jax.Array, right: jax.Array) -> jax.Array:
    """A few rows of the product: ``left`` [inner, rows], ``right`` [inner, columns], inner a multiple of the steps."""

    def deeper(number: jax.Array, best: jax.Array) -> jax.Array:
        some = [lax.dynamic_slice_in_dim(x, number * _STEPS, _STEPS) for x in (left, right)]
        for row, column in zip(*some, strict=True):
            term = row[:, None] + column
            best = jnp.where(term > best, term, best)
        return best

    start = jnp.full((left.shape[1], right.shape[1]), -jnp.inf, left.dtype)
    return lax.fori_loop(0, left.shape[0] // _STEPS, deeper, alike(start, left, right))


Product = Callable[[jax.Array, jax.Array], jax.Array]


def _with_infinities(plain: Product, a: jax.Array, b: jax.Array) -> jax.Array:
    left, right = (x == jnp.inf for x in (a, b))
    some = [(x > -jnp.inf).astype(jnp.float32) for x in (a, b)]
    met = jnp.matmul(left.astype(jnp.float32), some[1]) + jnp.matmul(some[0], right.astype(jnp.float32))
    finite = plain(jnp.where(left, -jnp.inf, a), jnp.where(right, -jnp.inf, b))
    return jnp.where(met > 0, jnp.inf, finite).astype(a.dtype)


def all_finite(a: jax.Array, b: jax.Array) -> jax.Array:
    # Zero times what is not finite is NaN. One sum is a fifth of the time of asking for infinities and NaN, which with
    # few columns is most of the time.
    return (jnp.sum(a * 0) == 0) & (jnp.sum(b * 0) == 0)


def careful(plain: Product, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of any operands, by products that ``_plain`` supports."""
    any_infinite = jnp.any(a == jnp.inf) | jnp.any(b == jnp.inf)
    return _mark_nan(lax.cond(any_infinite, partial(_with_infinities, plain), plain, a, b), a, b)


def xla_value(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    if problem.inner == 0:
        return reference_value(problem, a, b)
    return lax.cond(all_finite(a, b), _plain, partial(careful, _plain), a, b)


def xla_both(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = xla_value(problem, a, b)
    return value, reached(a, b, value, problem.inner)


def native_check(problem: TropicalProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)


def _out(problem: TropicalProblem, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*problem.batch, problem.rows, problem.columns), dtype)


def native_value(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    return native_call("capibara_max_plus", [_out(problem, a.dtype)], a, b)[0]


def native_both(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = [_out(problem, a.dtype), _out(problem, jnp.int32)]
    value, index = native_call("capibara_max_plus_argmax", out, a, b)
    return value, index


# Additions and maxima are not floating-point products: FLOP counts of models leave both out on every implementation.
register_foreign_call("capibara_max_plus", lambda _ins, _outs, _attributes: 0)
register_foreign_call("capibara_max_plus_argmax", lambda _ins, _outs, _attributes: 0)
