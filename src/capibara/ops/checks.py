"""Checks of single arguments that operations of several categories share."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError

__all__ = ["check_flag", "check_key", "check_precision", "check_scale", "check_sinks", "check_softcap"]

_PRECISIONS = ("default", "high", "highest")


def check_flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise OpTypeError(f"{op}: {name} must be True or False, got {value!r}")
    return bool(value)


def check_key(op: str, key: Any) -> None:
    """Refuse what is not one key of ``jax.random``, of the new kind or the old."""
    kind = getattr(key, "dtype", None)
    typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    if not (typed and key.shape == ()) and not (kind == jnp.uint32 and key.ndim == 1):
        raise OpTypeError(f"{op}: key must be one key of jax.random.key(seed), got {key!r}")


def check_precision(op: str, precision: Any) -> None:
    """Refuse what ``jnp.matmul`` does not take as its ``precision``."""
    number = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        # JAX knows which strings and algorithms these are in its version.
        jax.eval_shape(partial(jnp.matmul, precision=precision), number, number)
    except (TypeError, ValueError):
        error = OpValueError if isinstance(precision, str | tuple) else OpTypeError
        hint = did_you_mean(precision, _PRECISIONS) if isinstance(precision, str) else ""
        raise error(
            f"{op}: precision must be {', '.join(map(repr, _PRECISIONS))}, another that jnp.matmul takes, a pair of "
            f"these, or None; got {precision!r}.{hint}"
        ) from None


def _number(op: str, name: str, value: Any, remedy: str) -> float:
    if isinstance(value, Tracer):
        raise OpTypeError(
            f"{op}: {name} must be a number that is known while tracing, or None; got {value!r}. Kernels are compiled "
            f"for it, and no derivative reaches it. Remedy: {remedy}."
        )
    kind = getattr(value, "dtype", None)
    if kind is None:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    else:  # numbers of NumPy and JAX, arrays without axes, are numbers too
        real = isinstance(value, np.ndarray | np.generic | jax.Array) and value.shape == ()
        real = real and (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer))
    if not real:
        raise OpTypeError(f"{op}: {name} must be a number or None, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats, which is as little of use
        return math.inf


def check_scale(op: str, scale: Any) -> float | None:
    """The factor on attention's scores; None where there is to be the usual one."""
    if scale is None:
        return None
    number = _number(
        op,
        "scale",
        scale,
        "scale=1.0 and a query multiplied by it; or a Python number (static_argnames of jax.jit)",
    )
    if not math.isfinite(number):
        raise OpValueError(f"{op}: scale must be a finite number, got {scale!r}")
    return number


def check_softcap(op: str, softcap: Any) -> float | None:
    """What attention's scores are bent below; None for no cap. An infinite one would be inf · tanh(0), which is NaN."""
    if softcap is None:
        return None
    number = _number(op, "softcap", softcap, "a Python number (static_argnames of jax.jit)")
    if not 0 < number < math.inf:
        raise OpValueError(f"{op}: softcap must be finite and above 0 (or None for no cap), got {softcap!r}")
    return number


def check_sinks(op: str, sinks: Any, heads: int) -> None:
    """Refuse what is not one floating-point number per head.

    Raises:
      OpTypeError, OpShapeError: the message names ``sinks``.
    """
    if sinks is None:
        return
    if not hasattr(sinks, "shape") or not hasattr(sinks, "dtype"):
        raise OpTypeError(
            f"{op}: sinks must be an array, got {type(sinks).__name__}. Remedy: jax.numpy.asarray(sinks)."
        )
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise OpTypeError(f"{op}: sinks must be floating point, got {sinks.dtype}")
    if tuple(sinks.shape) != (heads,):
        raise OpShapeError(
            f"{op}: sinks must have one logit per query head, shape {(heads,)}, got {tuple(sinks.shape)}"
        )
