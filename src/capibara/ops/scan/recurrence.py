"""The recurrence ``h[t] = a[t] h[t-1] + x[t]`` as a primitive, parallel over segments of the steps.

The final state of a segment is affine in its initial one: ``h_out = P h_in + e``, with ``P`` the product of its
coefficients. A first loop runs over all segments in parallel and computes every ``P`` and ``e``; a short one
propagates the state from segment to segment; a last one, again over all segments in parallel, writes the states.
Loops are short and their steps wide, which suits vector units, at the cost of two loops instead of one. If a step is
already wide, one plain loop is faster and is used.

If a ``P`` or ``e`` is not finite, the composition could differ from the plain loop (an overflowing product times a
state of zero is NaN); then the plain loop runs instead, so that infinities and NaN are the same.

Derivatives are the primitive's: with the state carried *late* (``y[t] = x[t] + u``, then ``u = a[t] y[t]``) the
transpose of a recurrence is the late one in reverse, with ``a`` in memory order; and the transpose of the late one is
this one. Only the states are stored for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from capibara import native as compiled
from capibara.ops.one_device import alike, compile_calls

__all__ = ["previous", "recurrence", "takes_native"]

WIDE = 4096  # numbers in a step of all segments together, beyond which more segments do not pay

_primitive = jax.extend.core.Primitive("capibara_recurrence")
_primitive.multiple_results = True


def recurrence(
    a: jax.Array,
    x: jax.Array,
    first: jax.Array,
    *,
    matrix: bool = False,
    reverse: bool = False,
    late: bool = False,
    segments: int | None = None,
    native: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``h[t] = a[t] h[t-1] + x[t]`` over the first axis: every ``h`` and the last one.

    Args:
      a: ``[steps or 1, …]`` of the rank of ``x``, broadcasting to it; as ``matrix`` ``[steps or 1, …, n, n]``.
      x: ``[steps, …]``; as ``matrix`` ``[steps, …, n, columns]``.
      first: ``h`` before the first step, of the shape of one step of ``x``.
      late: return ``x[t] + u`` and then set ``u = a[t] (x[t] + u)``, from ``u = first``; the second result is ``u``.
      native: on CPUs, use the compiled loop of :mod:`capibara.native`; only if :func:`takes_native` accepts it.
    """
    if x.size == 0:
        return x, first
    a, x, first = alike((a, x, first), a, x, first)
    options = {"matrix": matrix, "reverse": reverse, "late": late, "segments": segments, "native": native}
    return _bind(a, x, first, **options)


def _bind(a: Any, x: Any, first: Any, **options: Any) -> tuple[Any, Any]:
    """For arrays that vary over the same mesh axes already: :func:`alike` is not linear in its arguments."""
    y, last = _primitive.bind(a, x, first, **options)
    return y, last


def previous(h: jax.Array, first: jax.Array, reverse: bool = False) -> jax.Array:
    """The state before each step: ``first``, then all of ``h`` but the last."""
    parts = (h[1:], first[None]) if reverse else (first[None], h[:-1])
    return jnp.concatenate(parts)


def _times(a: Any, h: Any, matrix: bool) -> Any:
    return jnp.matmul(a, h, precision=lax.Precision.HIGHEST) if matrix else a * h


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def choose_segments(a_shape: tuple[int, ...], x_shape: tuple[int, ...], matrix: bool) -> int:
    """The number of segments: enough for wide steps and two loops that are short together, or one."""
    steps, width = x_shape[0], math.prod(x_shape[1:])
    if matrix and a_shape[0] != 1 and a_shape[-1] > 8 * x_shape[-1]:
        return 1  # products of matrices would cost more than the recurrence
    found = min(WIDE // max(width, 1), math.isqrt(2 * steps))
    return found if found >= 8 and steps >= 4 * found else 1


def takes_native(dtype: str, matrix: bool, segments: int | None) -> None:
    """Raise ``NotImplementedError`` with the reason if the compiled loop does not support a problem."""
    reason = compiled.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if matrix:
        raise NotImplementedError("has no matrices for coefficients")
    if dtype != "float32":
        raise NotImplementedError(f"computes in float32, not {dtype}")
    if segments is not None:
        raise NotImplementedError("has no num_segments: it needs none to be as fast as memory")


def _compute_on_cpu(a: Any, x: Any, first: Any, *, native: bool, **options: Any) -> Any:
    if not native:
        return _compute(a, x, first, native=native, **options)
    a = jnp.broadcast_to(a, (a.shape[0], *x.shape[1:]))
    out = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, first)]
    switches = {name: int(options[name]) for name in ("reverse", "late")}
    return list(compiled.call("capibara_recurrence", out, a, x, first, **switches))


def _compute(
    a: Any,
    x: Any,
    first: Any,
    *,
    matrix: bool,
    reverse: bool,
    late: bool,
    segments: int | None,
    native: bool,
) -> Any:
    del native  # is for CPUs
    wide = _wide(x.dtype)
    steps = x.shape[0]
    fixed = a.shape[0] == 1
    count = choose_segments(a.shape, x.shape, matrix) if segments is None else min(segments, steps)

    def step(h: Any, a_t: Any, x_t: Any) -> tuple[Any, Any]:
        a_t, x_t = a_t.astype(wide), x_t.astype(wide)
        if late:
            y = x_t + h
            return _times(a_t, y, matrix), y
        h = _times(a_t, h, matrix) + x_t
        return h, h

    def plain(a: Any, x: Any, first: Any) -> Any:
        def body(h: Any, now: Any) -> tuple[Any, Any]:
            h, y = step(h, a[0] if fixed else now[1], now[0])
            return h, y.astype(x.dtype)

        last, y = lax.scan(body, first, (x, None if fixed else a), reverse=reverse)
        return y, last

    def composed(a: Any, x: Any, first: Any) -> Any:
        length = x.shape[0] // count
        # One more axis after that of the segments, so that a state broadcasts against coefficients as before.
        cut_x = x.reshape(count, length, *x.shape[1:])
        cut_a = a[None] if fixed else a.reshape(count, length, *a.shape[1:])

        def at(row: Any) -> tuple[Any, Any]:
            x_l = lax.dynamic_index_in_dim(cut_x, row, 1, keepdims=False)
            return (cut_a[:, 0] if fixed else lax.dynamic_index_in_dim(cut_a, row, 1, keepdims=False)).astype(
                wide
            ), x_l

        def ends(carry: Any, row: Any) -> tuple[Any, None]:
            total, end = carry
            a_l, x_l = at(row)
            return (_times(a_l, total, matrix), step(end, a_l, x_l)[0]), None

        shape = cut_a.shape[:1] + cut_a.shape[2:]
        one = jnp.broadcast_to(jnp.eye(shape[-1], dtype=wide), shape) if matrix else jnp.ones(shape, wide)
        zero = jnp.zeros((count, *first.shape), wide)
        order = jnp.arange(length)
        (total, end), _ = lax.scan(ends, alike((one, zero), a, x, first), order, reverse=reverse)

        def hand_on(h: Any, now: Any) -> tuple[Any, Any]:
            total_s = total[0] if fixed else now[1]
            return _times(total_s, h, matrix) + now[0], h

        last, entering = lax.scan(hand_on, first, (end, None if fixed else total), reverse=reverse)

        def write(carry: Any, row: Any) -> tuple[Any, None]:
            h, out = carry
            h, y = step(h, *at(row))
            return (h, lax.dynamic_update_index_in_dim(out, y.astype(out.dtype), row, 1)), None

        def states(_: Any) -> Any:
            begin = (entering, jnp.zeros_like(cut_x))
            (_, out), _ = lax.scan(write, alike(begin, a, x, first), order, reverse=reverse)
            return out.reshape(x.shape), last

        if not jnp.issubdtype(wide, jnp.inexact):
            return states(None)
        good = jnp.all(jnp.isfinite(total)) & jnp.all(jnp.isfinite(end)) & jnp.all(jnp.isfinite(first))
        return lax.cond(good, states, lambda _: plain(a, x, first), None)

    first = first.astype(wide)
    if count == 1:
        y, last = plain(a, x, first)
        return [y, last.astype(x.dtype)]
    rest = steps % count
    whole = steps - rest
    main = slice(rest, None) if reverse else slice(whole)
    other = slice(rest) if reverse else slice(whole, None)

    def part(v: Any, where: slice) -> Any:
        return v if v.shape[0] == 1 or not rest else v[where]

    y, last = composed(part(a, main), part(x, main), first)
    if rest:
        y_rest, last = plain(part(a, other), x[other], last)
        y = jnp.concatenate((y_rest, y) if reverse else (y, y_rest))
    return [y, last.astype(x.dtype)]


compile_calls(_primitive)


@_primitive.def_abstract_eval
def _shapes(a: Any, x: Any, first: Any, **_: Any) -> Any:
    return [x, first]


mlir.register_lowering(_primitive, mlir.lower_fun(_compute, multiple_results=True))
mlir.register_lowering(_primitive, mlir.lower_fun(_compute_on_cpu, multiple_results=True), platform="cpu")


def _tangent(primals: Any, tangents: Any, **options: Any) -> Any:
    a, x, first = primals
    out = _bind(a, x, first, **options)
    da, dx, dfirst = tangents
    if all(isinstance(t, ad.Zero) for t in tangents):
        return out, tuple(ad.Zero(jax.typeof(o).to_tangent_aval()) for o in out)
    push = jnp.zeros_like(x) if isinstance(dx, ad.Zero) else dx
    begin = jnp.zeros_like(first) if isinstance(dfirst, ad.Zero) else dfirst
    matrix, reverse, late = options["matrix"], options["reverse"], options["late"]
    if isinstance(da, ad.Zero):
        return out, _bind(a, push, begin, **options)
    if not late:
        push = push + _times(da, previous(out[0], first, reverse), matrix)
        return out, _bind(a, push, begin, **options)
    # Late, what a step adds to the state is seen by the next one.
    extra = _times(da, out[0], matrix)
    y, last = _bind(a, push + previous(extra, jnp.zeros_like(first), reverse), begin, **options)
    return out, (y, last + extra[0 if reverse else -1])


ad.primitive_jvps[_primitive] = _tangent


def _transposed(
    cotangents: Any, a: Any, x: Any, first: Any, *, late: bool, reverse: bool, **options: Any
) -> Any:
    if ad.is_undefined_primal(a):
        raise NotImplementedError("the recurrence is not linear in its coefficients and states together")
    dy, dlast = (alike(ad.instantiate_zeros(ct), a) if isinstance(ct, ad.Zero) else ct for ct in cotangents)
    turned = jnp.swapaxes(a, -1, -2) if options["matrix"] else a
    dx, dfirst = _bind(turned, dy, dlast, late=not late, reverse=not reverse, **options)
    return None, dx if ad.is_undefined_primal(x) else None, dfirst if ad.is_undefined_primal(first) else None


ad.primitive_transposes[_primitive] = _transposed


def _map(arrays: Any, axes: Any, **options: Any) -> Any:
    a, x, first = arrays
    size = next(v.shape[d] for v, d in zip(arrays, axes, strict=True) if d is not None)

    def put(v: Any, axis: Any, at: int, full: bool) -> Any:
        if axis is not None:
            return jnp.moveaxis(v, axis, at)
        v = jnp.expand_dims(v, at)
        return jnp.broadcast_to(v, (*v.shape[:at], size, *v.shape[at + 1 :])) if full else v

    out = _bind(put(a, axes[0], 1, False), put(x, axes[1], 1, True), put(first, axes[2], 0, True), **options)
    return out, (1, 0)


batching.primitive_batchers[_primitive] = _map
