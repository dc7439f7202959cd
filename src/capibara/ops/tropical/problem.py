"""The validated, frozen description of a tropical matrix product, and the two semirings."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = [
    "SEMIRINGS",
    "TropicalProblem",
    "alike_in_speed",
    "check_array",
    "check_semiring",
    "plus",
    "prepare",
    "times",
]

SEMIRINGS = ("max_plus", "min_plus")


@dataclass(frozen=True)
class TropicalProblem:
    """``a [*batch, rows, inner]`` times ``b [*batch, inner, columns]``; sums in ``dtype``, float32 or float64."""

    batch: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    semiring: str
    temperature: float
    dtype: str
    out_dtype: str
    implementation: str
    tuned: Tuned | None = None


def alike_in_speed(problem: TropicalProblem) -> dict[str, int | str]:
    """What determines which implementation is fast."""
    return {
        "batch": math.prod(problem.batch),
        "rows": problem.rows,
        "inner": problem.inner,
        "columns": problem.columns,
        "relaxed": "yes" if problem.temperature else "no",
    }


def check_semiring(op: str, semiring: Any) -> str:
    if not isinstance(semiring, str):
        raise OpTypeError(f"{op}: semiring must be 'max_plus' or 'min_plus', got {semiring!r}")
    if semiring not in SEMIRINGS:
        raise OpValueError(
            f"{op}: semiring must be 'max_plus' or 'min_plus', got {semiring!r}."
            f"{did_you_mean(semiring, SEMIRINGS)}"
        )
    return semiring


def check_array(op: str, name: str, array: Any, least: int) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise OpTypeError(
            f"{op}: {name} must be floating point (integers have no infinity), got {array.dtype}. "
            f"Remedy: {name}.astype('float32')."
        )
    if len(array.shape) < least:
        raise OpShapeError(f"{op}: {name} must have at least {least} axes, got shape {tuple(array.shape)}")


def prepare(
    a: Any,
    b: Any,
    *,
    semiring: str = "max_plus",
    temperature: float = 0.0,
    return_argmax: bool = False,
    implementation: str = "auto",
) -> tuple[TropicalProblem, tuple[Any, ...]]:
    """Check a call of ``matmul``; return its problem and its arrays."""
    op = "tropical.matmul"
    check_array(op, "a", a, 2)
    check_array(op, "b", b, 2)
    check_semiring(op, semiring)
    if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise OpTypeError(f"{op}: temperature must be a number, got {temperature!r}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise OpValueError(f"{op}: temperature must be finite and at least 0, got {temperature}")
    if 0 < temperature < (least := float(jnp.finfo(jnp.float32).tiny)):
        raise OpValueError(f"{op}: temperature must be 0 or at least {least:.3g}, got {temperature}")
    if not isinstance(return_argmax, bool):
        raise OpTypeError(f"{op}: return_argmax must be True or False, got {return_argmax!r}")
    if return_argmax and temperature:
        raise OpValueError(f"{op}: return_argmax=True goes with temperature=0, got {temperature}")
    if a.shape[-1] != b.shape[-2]:
        raise OpShapeError(
            f"{op}: a {tuple(a.shape)} has {a.shape[-1]} columns and b {tuple(b.shape)} {b.shape[-2]} rows; "
            "they must be equal"
        )
    try:
        batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    except ValueError:
        raise OpShapeError(
            f"{op}: the leading axes of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast"
        ) from None
    out_dtype = str(jax.dtypes.canonicalize_dtype(jnp.promote_types(a.dtype, b.dtype)))
    problem = TropicalProblem(
        batch=tuple(batch),
        rows=a.shape[-2],
        inner=a.shape[-1],
        columns=b.shape[-1],
        semiring=semiring,
        temperature=float(temperature),
        dtype="float64" if out_dtype == "float64" else "float32",
        out_dtype=out_dtype,
        implementation=implementation,
    )
    return problem, (a, b)


def times(x: Any, y: Any, semiring: str) -> jax.Array:
    """``x ⊗ y``: the sum, where the semiring's zero wins over the other infinity. NaN stays NaN."""
    zero = -jnp.inf if semiring == "max_plus" else jnp.inf
    return jnp.where((x == -zero) & (y == zero) | (x == zero) & (y == -zero), zero, x + y)


def plus(x: Any, y: Any, semiring: str) -> jax.Array:
    return jnp.maximum(x, y) if semiring == "max_plus" else jnp.minimum(x, y)
