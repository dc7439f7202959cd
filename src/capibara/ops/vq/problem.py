"""The validated, frozen description of a search for the nearest code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = ["METRICS", "NearestProblem", "alike_in_speed", "check_metric", "prepare"]

METRICS = ("euclidean", "cosine")


@dataclass(frozen=True)
class NearestProblem:
    """``tokens`` vectors against ``codes`` codes; ``dtype`` is the common one, ``metric`` one of ``METRICS``."""

    tokens: int
    codes: int
    dim: int
    dtype: str
    metric: str
    implementation: str
    block_tokens: int | None = None
    """Vectors that are compared at a time."""
    tuned: Tuned | None = None

    @property
    def wide(self) -> Any:
        """The dtype of products and sums."""
        return jnp.promote_types(self.dtype, jnp.float32)


def alike_in_speed(problem: NearestProblem) -> dict[str, int | str]:
    """What determines which blocks are fast."""
    return {"tokens": problem.tokens, "codes": problem.codes, "dim": problem.dim, "metric": problem.metric}


def check_metric(op: str, metric: Any) -> str:
    if not isinstance(metric, str):
        raise OpTypeError(f"{op}: metric must be {' or '.join(map(repr, METRICS))}, got {metric!r}")
    if metric not in METRICS:
        raise OpValueError(
            f"{op}: metric must be {' or '.join(map(repr, METRICS))}, got {metric!r}."
            f"{did_you_mean(metric, METRICS)}"
        )
    return metric


def prepare(
    x: Any,
    codebook: Any,
    *,
    metric: str = "euclidean",
    return_distance: bool = False,
    implementation: str = "auto",
) -> tuple[NearestProblem, tuple[Any, ...]]:
    """Check a call of ``nearest_code``; return its problem and its arrays."""
    op = "nearest_code"
    for name, array in (("x", x), ("codebook", codebook)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OpTypeError(f"{op}: {name} must be floating point, got {array.dtype}")
    if len(codebook.shape) != 2 or codebook.shape[0] == 0:
        raise OpShapeError(
            f"{op}: codebook must be [codes, dim] with at least one code, got shape {tuple(codebook.shape)}"
        )
    if len(x.shape) < 1 or x.shape[-1] != codebook.shape[1]:
        raise OpShapeError(
            f"{op}: the last axis of x {tuple(x.shape)} must have the codebook's dim, {codebook.shape[1]}"
        )
    check_metric(op, metric)
    if not isinstance(return_distance, bool):
        raise OpTypeError(f"{op}: return_distance must be True or False, got {return_distance!r}")
    problem = NearestProblem(
        tokens=math.prod(x.shape[:-1]),
        codes=codebook.shape[0],
        dim=codebook.shape[1],
        dtype=str(jax.dtypes.canonicalize_dtype(jnp.promote_types(x.dtype, codebook.dtype))),
        metric=metric,
        implementation=implementation,
    )
    return problem, (x, codebook)
