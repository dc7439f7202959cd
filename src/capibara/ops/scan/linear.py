"""Linear recurrences with elementwise or matrix coefficients: the public functions."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import Dims, join_dims, over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.scan.recurrence import recurrence, takes_native

__all__ = ["check_segments", "linear_recurrence", "matrix_linear_recurrence"]


@dataclass(frozen=True)
class RecurrenceProblem:
    """Shapes and options; ``matrix`` says whether the last two axes of ``a`` are a matrix."""

    a: tuple[int, ...]
    x: tuple[int, ...]
    dtype: str
    matrix: bool
    reverse: bool
    num_segments: int | None
    implementation: str


def check_segments(op: str, num_segments: Any) -> int | None:
    if num_segments is None:
        return None
    if isinstance(num_segments, bool) or not isinstance(num_segments, numbers.Integral):
        raise OpTypeError(f"{op}: num_segments must be an int or None, got {num_segments!r}")
    if num_segments < 1:
        raise OpValueError(f"{op}: num_segments must be at least 1, got {num_segments}")
    return int(num_segments)


def _prepare(
    op: str,
    matrix: bool,
    a: Any,
    x: Any,
    initial_state: Any,
    reverse: Any,
    num_segments: Any,
    implementation: str,
) -> tuple[RecurrenceProblem, tuple[Any, ...]]:
    named = {"x": x, "a": a} | ({} if initial_state is None else {"initial_state": initial_state})
    for name, array in named.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
        if array.dtype != x.dtype:
            raise OpTypeError(f"{op}: {name} is {array.dtype} and x is {x.dtype}; they must have one dtype")
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise OpTypeError(f"{op}: x must be numbers, got {x.dtype}")
    if not isinstance(reverse, bool):
        raise OpTypeError(f"{op}: reverse must be True or False, got {reverse!r}")
    a_shape, x_shape = tuple(a.shape), tuple(x.shape)
    if not x_shape:
        raise OpShapeError(f"{op}: x must have an axis of steps, got a number")
    if matrix:
        if len(x_shape) < 2:
            raise OpShapeError(f"{op}: x must be [steps, …, n], got shape {x_shape}")
        n = x_shape[-1]
        wanted = f"[{n}, {n}], or {(*x_shape, n)} (1 where the same for all)"
        fits = a_shape == (n, n) or (
            len(a_shape) == len(x_shape) + 1
            and a_shape[-2:] == (n, n)
            and all(i in (1, j) for i, j in zip(a_shape[:-2], x_shape[:-1], strict=True))
        )
    else:
        wanted = f"{x_shape} (1 where the same for all), or that without the steps"
        fits = a_shape == x_shape[1:] or (
            len(a_shape) == len(x_shape) and all(i in (1, j) for i, j in zip(a_shape, x_shape, strict=True))
        )
    if not fits:
        raise OpShapeError(f"{op}: a must have shape {wanted} to go with x {x_shape}, got {a_shape}")
    if initial_state is not None and tuple(initial_state.shape) != x_shape[1:]:
        raise OpShapeError(
            f"{op}: initial_state must have shape {x_shape[1:]} to go with x {x_shape}, got "
            f"{tuple(initial_state.shape)}"
        )
    problem = RecurrenceProblem(
        a_shape, x_shape, str(x.dtype), matrix, reverse, check_segments(op, num_segments), implementation
    )
    return problem, (a, x, initial_state)


def _arranged(p: RecurrenceProblem, a: Any, x: Any, first: Any) -> tuple[Any, Any, Any]:
    """``a``, ``x`` and the first state as :func:`recurrence` takes them."""
    a, x = jnp.asarray(a), jnp.asarray(x)
    first = jnp.zeros(p.x[1:], x.dtype) if first is None else jnp.asarray(first)
    if not p.matrix:
        return (a if len(p.a) == len(p.x) else a[None]), x, first
    if len(p.a) == 2 or all(n == 1 for n in p.a[1:-2]):
        # One matrix for all: the other axes are columns of one product.
        n, columns = p.x[-1], math.prod(p.x[1:-1])  # where there are no steps, -1 would be any number
        a = a.reshape(1 if len(p.a) == 2 else p.a[0], n, n)
        x = jnp.swapaxes(x.reshape(p.x[0], columns, n), 1, 2)
        return a, x, jnp.swapaxes(first.reshape(columns, n), 0, 1)
    return a, x[..., None], first[..., None]


def _xla(p: RecurrenceProblem, a: Any, x: Any, first: Any) -> tuple[Any, Any]:
    a, x, first = _arranged(p, a, x, first)
    h, last = recurrence(a, x, first, matrix=p.matrix, reverse=p.reverse, segments=p.num_segments)
    if p.matrix and h.ndim == 3 and a.ndim == 3:
        h, last = jnp.swapaxes(h, 1, 2), jnp.swapaxes(last, 0, 1)
    return h.reshape(p.x), last.reshape(p.x[1:])


def _native(p: RecurrenceProblem, a: Any, x: Any, first: Any) -> tuple[Any, Any]:
    return recurrence(*_arranged(p, a, x, first), reverse=p.reverse, native=True)


def _takes_native(p: RecurrenceProblem) -> None:
    takes_native(p.dtype, p.matrix, p.num_segments)


def _reference(p: RecurrenceProblem, a: Any, x: Any, first: Any) -> tuple[Any, Any]:
    x = jnp.asarray(x)
    first = jnp.zeros(p.x[1:], x.dtype) if first is None else jnp.asarray(first)
    full = (*p.x, p.x[-1]) if p.matrix else p.x
    a = jnp.broadcast_to(a, full)
    first = alike(first, a, x)

    def step(h: Any, now: Any) -> tuple[Any, Any]:
        a_t, x_t = now
        h = (jnp.einsum("...ij,...j->...i", a_t, h, precision="highest") if p.matrix else a_t * h) + x_t
        return h, h

    last, h = lax.scan(step, first, (a, x), reverse=p.reverse)
    return h, last


def _prepare_diagonal(
    a: Any,
    x: Any,
    *,
    initial_state: Any = None,
    reverse: bool = False,
    num_segments: int | None = None,
    implementation: str = "auto",
) -> tuple[RecurrenceProblem, tuple[Any, ...]]:
    return _prepare("linear_recurrence", False, a, x, initial_state, reverse, num_segments, implementation)


def _prepare_matrix(
    a: Any,
    x: Any,
    *,
    initial_state: Any = None,
    reverse: bool = False,
    num_segments: int | None = None,
    implementation: str = "auto",
) -> tuple[RecurrenceProblem, tuple[Any, ...]]:
    return _prepare(
        "matrix_linear_recurrence", True, a, x, initial_state, reverse, num_segments, implementation
    )


def _ways() -> list[Implementation]:
    return [
        Implementation("native", {"forward": _native}, ("cpu",), _takes_native, portable=False),
        Implementation("xla", {"forward": _xla}),
        Implementation("reference", {"forward": _reference}),
    ]


DIAGONAL = Op("linear_recurrence", _prepare_diagonal, _ways())
MATRIX = Op("matrix_linear_recurrence", _prepare_matrix, _ways())


def _laid(a: Dims, x: Dims, first: Dims) -> list[Dims]:
    dims = join_dims(x, first, a)
    return [dims, dims[1:]]


def _laid_of_matrices(a: Dims, x: Dims, first: Dims) -> list[Dims]:
    dims = join_dims(x, first, a[:-1])
    return [dims, dims[1:]]


@public(DIAGONAL)
@over_explicit_axes("a", "x", "initial_state", out=_laid)
def linear_recurrence(
    a: jax.Array,
    x: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    num_segments: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """``h[t] = a[t] * h[t-1] + x[t]`` along the first axis, elementwise in the others.

    Equivalent JAX: ``lax.scan(step, initial_state, (a, x))``. Sums of floats may be
    rounded in another order, and those of bfloat16 are kept in float32; integers are exact. Infinities and NaN
    propagate as in that loop. Differentiable (both modes, any order); only the states are stored for the backward
    pass.

    Args:
      a: ``[steps, …]``, with size 1 in dimensions along which it is constant, or without the steps. Same dtype as
        ``x``.
      x: ``[steps, …]``, floating point, complex or integer.
      initial_state: the shape of one step of ``x``; zeros if ``None``.
      reverse: run from the last step to the first.
      num_segments: segments that run in parallel; ``None``: chosen by the sizes (one for wide steps). It affects
        speed and rounding, not the result.
      implementation: ``"auto"``, ``"native"`` (one compiled loop, float32 on CPUs), ``"xla"`` or ``"reference"``
        (one step at a time).

    Returns:
      every state ``[steps, …]``, and the last one.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Blelloch 1990, "Prefix Sums and Their Applications".
    """
    DIAGONAL.check_name(implementation)
    problem, arrays = DIAGONAL.prepare(
        a,
        x,
        initial_state=initial_state,
        reverse=reverse,
        num_segments=num_segments,
        implementation=implementation,
    )
    return DIAGONAL.run("forward", problem, *arrays)


@public(MATRIX)
@over_explicit_axes("a", "x", "initial_state", out=_laid_of_matrices)
def matrix_linear_recurrence(
    a: jax.Array,
    x: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    num_segments: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """``h[t] = a[t] @ h[t-1] + x[t]`` along the first axis, for vectors ``h`` in the last one.

    As :func:`linear_recurrence`, with matrices as coefficients. Segments multiply matrices, which costs more than the
    loop if each step has a large matrix of its own; one segment is chosen then.

    Args:
      a: ``[n, n]``, one matrix for all steps; or ``[steps, …, n, n]``, with size 1 in dimensions along which it is
        constant.
      x: ``[steps, …, n]``.
      initial_state: ``[…, n]``; zeros when ``None``.
      reverse, num_segments, implementation: as in :func:`linear_recurrence`.

    Returns:
      every state ``[steps, …, n]``, and the last one ``[…, n]``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    MATRIX.check_name(implementation)
    problem, arrays = MATRIX.prepare(
        a,
        x,
        initial_state=initial_state,
        reverse=reverse,
        num_segments=num_segments,
        implementation=implementation,
    )
    return MATRIX.run("forward", problem, *arrays)
