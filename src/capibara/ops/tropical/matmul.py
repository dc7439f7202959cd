"""Tropical matrix products, exact or relaxed, with their derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError
from capibara.ops.explicit import Dims, join_dims, over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tropical import forms, pallas_tpu, specs
from capibara.ops.tropical.problem import TropicalProblem, alike_in_speed, check_array, prepare
from capibara.ops.tuning import Tuning

__all__ = ["matmul", "matvec"]

OP = Op(
    "tropical_matmul",
    prepare,
    [
        Implementation(
            "native",
            {"value": forms.native_value, "both": forms.native_both},
            platforms=("cpu",),
            check=forms.native_check,
            portable=False,
        ),
        Implementation(
            "pallas_tpu",
            {"value": pallas_tpu.value, "both": pallas_tpu.both},
            platforms=("tpu",),
            check=pallas_tpu.check,
        ),
        Implementation("xla", {"value": forms.xla_value, "both": forms.xla_both}),
        Implementation("reference", {"value": forms.reference_value, "both": forms.reference_both}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed),
)


def _gathered(problem: TropicalProblem, index: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """``a[i, index] + b[index, j]``, 0 where the index is -1."""
    index = jnp.where(index < 0, problem.inner, index)  # out of range: the fill value
    left = jnp.take_along_axis(a, index, -1, mode="fill", fill_value=0)
    return left + jnp.take_along_axis(b, index, -2, mode="fill", fill_value=0)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reached(
    problem: TropicalProblem, value: jax.Array, index: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    """``value``, whose derivative is that of the terms at ``index``."""
    return value


@_reached.defjvp
def _reached_jvp(problem: TropicalProblem, primals: Any, tangents: Any) -> Any:
    return _reached(problem, *primals), _gathered(problem, primals[1], *tangents[2:])


def _both(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, index = OP.run("both", problem, lax.stop_gradient(a), lax.stop_gradient(b))
    return _reached(problem, value, index, a, b), index


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _value(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    return OP.run("value", problem, a, b)


@_value.defjvp
def _value_jvp(problem: TropicalProblem, primals: Any, tangents: Any) -> Any:
    value, index = _both(problem, *primals)
    return value, _gathered(problem, index, *tangents)


def _weights(terms: jax.Array, shift: jax.Array, temperature: float) -> jax.Array:
    """``exp((terms - shift) / temperature)``; an infinite term, or -inf + inf, has no weight."""
    gap = terms - jnp.where(jnp.isinf(shift), 0, shift)
    return jnp.where(jnp.isnan(terms) | jnp.isinf(terms), 0, jnp.exp(gap / temperature))


def _each(function: Any, arrays: tuple[jax.Array, ...], axis: int = -2) -> jax.Array:
    """``function`` of the slices along ``axis`` one by one: XLA would keep an array of all terms otherwise."""
    return jnp.moveaxis(lax.map(function, tuple(jnp.moveaxis(x, axis, 0) for x in arrays)), 0, -2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _relaxed(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> jax.Array:
    best = OP.run("value", problem, a, b)

    def row(now: Any) -> jax.Array:
        terms = now[0][..., :, None] + b
        return jnp.sum(_weights(terms, now[1][..., None, :], problem.temperature), -2)

    total = _each(row, (a, best))
    return jnp.where(jnp.isfinite(best), best + problem.temperature * jnp.log(total), best)


def _relaxed_forward(problem: TropicalProblem, a: jax.Array, b: jax.Array) -> Any:
    out = _relaxed(problem, a, b)
    return out, (a, b, out)


def _relaxed_backward(problem: TropicalProblem, residuals: Any, grad: jax.Array) -> Any:
    a, b, out = residuals
    grad = jnp.where(jnp.isinf(out), 0, grad)

    def row(now: Any) -> jax.Array:
        left, out_i, grad_i = now
        weight = _weights(left[..., :, None] + b, out_i[..., None, :], problem.temperature)
        return jnp.sum(weight * grad_i[..., None, :], -1)

    def inner(now: Any) -> jax.Array:
        left, right = now
        weight = _weights(left[..., :, None] + right[..., None, :], out, problem.temperature)
        return jnp.sum(weight * grad, -2)

    grad_a = _each(row, (a, out, grad))
    grad_b = _each(inner, (jnp.swapaxes(a, -1, -2), b))
    return grad_a, grad_b


_relaxed.defvjp(_relaxed_forward, _relaxed_backward)


def _laid(a: Dims, b: Dims) -> Dims:
    return (*join_dims(a[:-2], b[:-2]), *a[-2:-1], *b[-1:])


@public(OP)
@over_explicit_axes("a", "b", out=_laid)
def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    semiring: str = "max_plus",
    temperature: float = 0.0,
    return_argmax: bool = False,
    implementation: str = "auto",
) -> Any:
    """The tropical product: ``out[i, j] = max over k of a[i, k] + b[k, j]`` (or the minimum).

    Equivalent JAX: ``jnp.max(a[..., :, :, None] + b[..., None, :, :], axis=-2)``, without the intermediate array of
    all terms.

    The zero of the semiring (-inf for ``max_plus``, +inf for ``min_plus``) wins over the other infinity: ``-inf ⊗ inf``
    is -inf in ``max_plus``, not NaN. A NaN in a row of ``a`` or a column of ``b`` makes every entry of that row or
    column NaN. With ``inner == 0`` every entry is the zero.

    Differentiable in both operands, forward and reverse: an entry's gradient goes entirely to the *lowest* ``k`` that
    attains it (a subgradient if several do), and nowhere if the entry is the semiring's zero or NaN. With a
    temperature, only reverse mode is supported.

    Args:
      a: ``[*batch, rows, inner]``, floating point. Leading axes broadcast with those of ``b``.
      b: ``[*batch, inner, columns]``.
      semiring: ``"max_plus"`` or ``"min_plus"``.
      temperature: if above 0, the relaxation ``temperature * logsumexp((a + b) / temperature)`` over ``k`` (for
        ``min_plus`` the negative of that of the negatives), which is smooth and tends to the maximum from above.
      return_argmax: also return the lowest ``k`` that attains each entry, int32; -1 if there is none.
      implementation: ``"auto"``, ``"native"`` (compiled for CPUs), ``"pallas_tpu"`` (interpreted, slowly, on other
        platforms), ``"xla"`` or ``"reference"``.

    Returns:
      ``[*batch, rows, columns]`` in the operands' common dtype (sums are float32, float64 for float64), or a pair of
      that and the indices.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Butkovič 2010, "Max-linear Systems".
    """
    OP.check_name(implementation)
    problem, _ = OP.prepare(
        a,
        b,
        semiring=semiring,
        temperature=temperature,
        return_argmax=return_argmax,
        implementation=implementation,
    )
    sign = 1 if semiring == "max_plus" else -1

    def whole(x: Any) -> jax.Array:
        x = jnp.asarray(x).astype(problem.dtype)
        x = jnp.broadcast_to(x, (*problem.batch, *x.shape[-2:]))
        return x if sign == 1 else -x

    # A relaxed product's derivative has to vary over a mesh as its operands do, which may differ.
    left, right = alike((whole(a), whole(b)), a, b)
    shape = (*problem.batch, problem.rows, problem.columns)
    if problem.inner == 0 or 0 in shape:
        # JAX forgets of products of nothing over which mesh axes they vary.
        none = alike(jnp.full(shape, -sign * jnp.inf, problem.out_dtype), left, right)
        return (none, alike(jnp.full(shape, -1, jnp.int32), left, right)) if return_argmax else none
    if return_argmax:
        value, index = _both(problem, left, right)
        return (sign * value).astype(problem.out_dtype), index
    value: Any = (_relaxed if problem.temperature else _value)(problem, left, right)
    return (sign * value).astype(problem.out_dtype)


def matvec(
    a: jax.Array,
    x: jax.Array,
    *,
    semiring: str = "max_plus",
    temperature: float = 0.0,
    implementation: str = "auto",
) -> jax.Array:
    """``out[i] = max over k of a[i, k] + x[k]``: :func:`matmul` with one column, with the same properties.

    Equivalent JAX: ``jnp.max(a + x[..., None, :], axis=-1)``.

    Args:
      a: ``[*batch, rows, inner]``.
      x: ``[*batch, inner]``.

    Returns:
      ``[*batch, rows]``.
    """
    check_array("tropical.matvec", "a", a, 2)
    check_array("tropical.matvec", "x", x, 1)
    if a.shape[-1] != x.shape[-1]:
        raise OpShapeError(
            f"tropical.matvec: a {tuple(a.shape)} has {a.shape[-1]} columns and x has {x.shape[-1]} entries; "
            "they must be equal"
        )
    out = matmul(a, x[..., None], semiring=semiring, temperature=temperature, implementation=implementation)
    return out[..., 0]
