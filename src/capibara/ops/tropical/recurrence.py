"""Linear recurrences in a tropical semiring, in parallel over their steps."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import join_dims, over_explicit_axes
from capibara.ops.tropical.problem import check_array, check_semiring, plus, times

__all__ = ["scan"]


@over_explicit_axes("a", "b", out=join_dims)
def scan(
    a: jax.Array, b: jax.Array, *, axis: int = 0, semiring: str = "max_plus", reverse: bool = False
) -> jax.Array:
    """``h[t] = max(a[t] + h[t-1], b[t])`` along ``axis``, from the semiring's zero; elementwise in the other axes.

    With ``a = 0`` it is the running maximum; with durations ``a`` and earliest starts ``b`` it is a schedule. Put a
    start value into the first entry of ``b``. Equivalent JAX: a ``lax.scan`` of that step; the implementation is
    ``lax.associative_scan`` over pairs ``(a, b)``, so sums may be rounded in a different order. If two terms are
    equal, ``jnp.maximum`` shares the gradient between them. The semiring's zero wins over the other infinity.

    Args:
      a, b: arrays of the same shape and dtype, floating point.
      axis: the axis of the steps.
      semiring: ``"max_plus"`` or ``"min_plus"``.
      reverse: run from the last step to the first.

    Returns:
      ``h``, of the shape and dtype of ``b``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Blelloch 1990, "Prefix Sums and Their Applications".
    """
    op = "tropical.scan"
    check_array(op, "a", a, 1)
    check_array(op, "b", b, 1)
    check_semiring(op, semiring)
    if tuple(a.shape) != tuple(b.shape):
        raise OpShapeError(f"{op}: a {tuple(a.shape)} and b {tuple(b.shape)} must have one shape")
    if a.dtype != b.dtype:
        raise OpTypeError(f"{op}: a is {a.dtype} and b is {b.dtype}; they must have one dtype")
    if isinstance(axis, bool) or not isinstance(axis, numbers.Integral):
        raise OpTypeError(f"{op}: axis must be an int, got {axis!r}")
    if not -len(b.shape) <= axis < len(b.shape):
        raise OpValueError(f"{op}: axis {axis} is not one of the {len(b.shape)} axes of b")
    axis = int(axis) % len(b.shape)  # lax.associative_scan cannot reverse along a negative axis
    if not isinstance(reverse, bool):
        raise OpTypeError(f"{op}: reverse must be True or False, got {reverse!r}")

    def join(first: Any, then: Any) -> Any:
        (a1, b1), (a2, b2) = first, then
        return times(a2, a1, semiring), plus(times(a2, b1, semiring), b2, semiring)

    steps, starts = jnp.asarray(a), jnp.asarray(b)
    wide = jnp.promote_types(starts.dtype, jnp.float32)
    _, h = lax.associative_scan(join, (steps.astype(wide), starts.astype(wide)), reverse=reverse, axis=axis)
    return h.astype(starts.dtype)
