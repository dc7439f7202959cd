"""Recurrences ``h[t] = (a[t] ⊗ h[t-1]) ⊕ b[t]`` in semirings: sums, maxima, minima, log-sum-exp."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import did_you_mean
from capibara.ops import tropical
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import join_dims, over_explicit_axes
from capibara.ops.scan.linear import linear_recurrence

__all__ = ["semiring_scan"]

SEMIRINGS = ("sum_product", "max_plus", "min_plus", "log_sum_exp")


def _check(b: Any, a: Any, semiring: Any, axis: Any, reverse: Any) -> None:
    op = "semiring_scan"
    if semiring not in SEMIRINGS:
        hint = did_you_mean(semiring, SEMIRINGS) if isinstance(semiring, str) else ""
        raise OpValueError(f"{op}: semiring must be one of {', '.join(SEMIRINGS)}; got {semiring!r}.{hint}")
    for name, array in (("b", b), ("a", a)):
        if name == "a" and array is None:
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
        if array.dtype != b.dtype:
            raise OpTypeError(f"{op}: a is {array.dtype} and b is {b.dtype}; they must have one dtype")
        if tuple(array.shape) != tuple(b.shape):
            raise OpShapeError(f"{op}: a {tuple(array.shape)} and b {tuple(b.shape)} must have one shape")
        wanted = jnp.floating if semiring == "log_sum_exp" else jnp.number
        if not jnp.issubdtype(array.dtype, wanted):
            raise OpTypeError(f"{op}: {name} must be {wanted.__name__} for {semiring}, got {array.dtype}")
    if isinstance(axis, bool) or not isinstance(axis, numbers.Integral):
        raise OpTypeError(f"{op}: axis must be an int, got {axis!r}")
    if not -len(b.shape) <= int(axis) < len(b.shape):
        raise OpValueError(f"{op}: axis {axis} is not one of the {len(b.shape)} axes of b")
    if not isinstance(reverse, bool):
        raise OpTypeError(f"{op}: reverse must be True or False, got {reverse!r}")


@over_explicit_axes("b", "a", out=join_dims)
def semiring_scan(
    b: jax.Array,
    a: jax.Array | None = None,
    *,
    semiring: str = "sum_product",
    axis: int = 0,
    reverse: bool = False,
) -> jax.Array:
    """``h[t] = (a[t] ⊗ h[t-1]) ⊕ b[t]`` along ``axis``, from the semiring's zero; elementwise in the other axes.

    ``semiring``: ``"sum_product"`` (``a h + b``), ``"max_plus"`` (``max(a + h, b)``), ``"min_plus"`` or
    ``"log_sum_exp"`` (``log(exp(a + h) + exp(b))``, the probabilities of a chain in log space). If ``a`` is omitted
    it is the semiring's one, and the result is the running sum, maximum, minimum or log-sum-exp of ``b``:
    ``jax.lax.cumsum``, ``cummax``, ``cummin`` and ``cumlogsumexp``. With ``a``, they are :func:`linear_recurrence`
    and :func:`capibara.ops.tropical.scan`; log-sum-exp is ``lax.associative_scan``. Sums of floats may be rounded in
    a different order.

    Args:
      b, a: arrays of the same shape and dtype; floating point for ``"log_sum_exp"`` and, with ``a``, for the tropical
        semirings.
      axis: the axis of the steps.
      reverse: run from the last step to the first.

    Returns:
      ``h``, of the shape and dtype of ``b``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    _check(b, a, semiring, axis, reverse)
    b = jnp.asarray(b)
    axis = int(axis) % b.ndim
    if b.size == 0:
        return b
    if a is None:
        running = {
            "sum_product": lax.cumsum,
            "max_plus": lax.cummax,
            "min_plus": lax.cummin,
            "log_sum_exp": lax.cumlogsumexp,
        }
        return running[semiring](b, axis=axis, reverse=reverse)
    if semiring == "sum_product":
        h, _ = linear_recurrence(jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0), reverse=reverse)
        return jnp.moveaxis(h, 0, axis)
    if semiring != "log_sum_exp":
        return tropical.scan(a, b, axis=axis, semiring=semiring, reverse=reverse)

    def join(first: Any, then: Any) -> Any:
        (a1, b1), (a2, b2) = first, then
        return a1 + a2, jnp.logaddexp(a2 + b1, b2)

    wide = jnp.promote_types(b.dtype, jnp.float32)
    pair = jnp.asarray(a).astype(wide), b.astype(wide)
    return lax.associative_scan(join, pair, reverse=reverse, axis=axis)[1].astype(b.dtype)
