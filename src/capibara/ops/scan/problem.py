"""The validated, frozen description of a selective scan."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = ["ScanProblem", "alike_in_speed", "prepare"]


@dataclass(frozen=True)
class ScanProblem:
    """Sizes and options: x [batch, length, heads, width], b and c [batch, length, groups, states]."""

    batch: int
    length: int
    heads: int
    width: int
    groups: int
    states: int
    chunk_size: int | None
    dtype: str
    implementation: str
    starts: bool = False
    tuned: Tuned | None = None

    @property
    def accumulate_dtype(self) -> Any:
        return jnp.float64 if self.dtype == "float64" else jnp.float32

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups


def alike_in_speed(problem: ScanProblem) -> dict[str, int | str] | None:
    """What determines which chunks are fast; None if the caller specified them."""
    if problem.chunk_size is not None:
        return None
    names = ("batch", "length", "heads", "width", "groups", "states")
    return {name: getattr(problem, name) for name in names}


def prepare(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    *,
    initial_state: Any = None,
    starts: Any = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[ScanProblem, tuple[Any, ...]]:
    """Check a call of ``selective_scan``; return its problem and its arrays."""
    named = {"x": (x, 4), "dt": (dt, 3), "a": (a, 1), "b": (b, 4), "c": (c, 4)}
    if initial_state is not None:
        named["initial_state"] = (initial_state, 4)
    for name, (array, rank) in named.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"selective_scan: {name} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OpTypeError(f"selective_scan: {name} must be floating point, got {array.dtype}")
        if len(array.shape) != rank:
            raise OpShapeError(
                f"selective_scan: {name} must have {rank} axes, got shape {tuple(array.shape)}. Expected "
                "x [batch, length, heads, width], dt [batch, length, heads], a [heads], b and c "
                "[batch, length, groups, states], initial_state [batch, heads, width, states]."
            )
    batch, length, heads, width = x.shape
    groups, states = b.shape[2:]
    expected = {"dt": (batch, length, heads), "a": (heads,), "b": (batch, length, groups, states)}
    expected["c"] = expected["b"]
    if initial_state is not None:
        expected["initial_state"] = (batch, heads, width, states)
    for name, shape in expected.items():
        if tuple(named[name][0].shape) != shape:
            raise OpShapeError(
                f"selective_scan: {name} must have shape {shape} to go with x {tuple(x.shape)} and b "
                f"{tuple(b.shape)}, got {tuple(named[name][0].shape)}"
            )
    if starts is not None:
        if not hasattr(starts, "shape") or not jnp.issubdtype(starts.dtype, jnp.bool_):
            found = getattr(starts, "dtype", type(starts).__name__)
            raise OpTypeError(f"selective_scan: starts must be a boolean array, got {found}")
        if tuple(starts.shape) != (batch, length):
            raise OpShapeError(
                f"selective_scan: starts must have shape {(batch, length)} to go with x {tuple(x.shape)}, got "
                f"{tuple(starts.shape)}"
            )
    if groups == 0 or heads % groups:
        raise OpShapeError(
            f"selective_scan: {groups} groups of b and c cannot serve {heads} heads; the number of groups must "
            "divide the number of heads"
        )
    if chunk_size is not None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, numbers.Integral):
            raise OpTypeError(f"selective_scan: chunk_size must be an int or None, got {chunk_size!r}")
        if chunk_size < 1:
            raise OpValueError(f"selective_scan: chunk_size must be at least 1, got {chunk_size}")
    problem = ScanProblem(
        batch=batch,
        length=length,
        heads=heads,
        width=width,
        groups=groups,
        states=states,
        chunk_size=None if chunk_size is None else int(chunk_size),
        dtype=str(jax.dtypes.canonicalize_dtype(x.dtype)),
        implementation=implementation,
        starts=starts is not None,
    )
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, width, states), problem.accumulate_dtype)
    arrays = (x, dt, a, b, c, initial_state)
    return problem, arrays if starts is None else (*arrays, starts)
