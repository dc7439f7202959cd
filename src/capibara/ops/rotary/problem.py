"""The validated, frozen description of a rotation of positions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError

__all__ = ["LAYOUTS", "RotaryProblem", "prepare"]

OP = "rotary"
LAYOUTS = ("halves", "pairs")
_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class RotaryProblem:
    """``shapes`` of the arrays that are turned, each ``[*batch, length, heads, features]``.

    ``dim`` features of a head are turned. ``table`` is the shape of cosines and sines, ``[*batch, length, dim / 2]`` or
    ``[length, dim / 2]``, and ``wide`` their dtype, in which the arithmetic is. Without given tables, ``theta``,
    ``frequencies`` and ``factor`` make them from positions.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dim: int
    table: tuple[int, ...]
    wide: str
    layout: str
    given: bool
    theta: float
    frequencies: tuple[float, ...] | None
    factor: float
    implementation: str


def _float(name: str, array: Any, rank: int, form: str) -> tuple[int, ...]:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise OpTypeError(f"{OP}: {name} must be an array, got {type(array).__name__}")
    if str(array.dtype) not in _FLOATS:
        raise OpTypeError(
            f"{OP}: {name} must be {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, got {array.dtype}. "
            f"Remedy: {name}.astype('float32')."
        )
    shape = tuple(array.shape)
    if len(shape) < rank:
        raise OpShapeError(f"{OP}: {name} must be {form}, got shape {shape}")
    return shape


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OpTypeError(f"{OP}: {name} must be a Python number, got {value!r}")
    if not 0 < float(value) < math.inf:
        raise OpValueError(f"{OP}: {name} must be finite and above 0, got {value!r}")
    return float(value)


def _turned(features: int, dim: Any) -> int:
    """The number of features that are turned."""
    if dim is None:
        dim = features
        if features % 2:
            raise OpShapeError(
                f"{OP}: query has {features} features, which are not pairs. Remedy: dim={features - 1}, which leaves "
                "the last one as it is."
            )
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral):
        raise OpTypeError(f"{OP}: dim must be an int or None, got {dim!r} of type {type(dim).__name__}")
    dim = int(dim)
    if dim < 0 or dim % 2 or dim > features:
        raise OpValueError(
            f"{OP}: dim must be an even number of at most {features}, the features of query, got {dim}"
        )
    return dim


def _frequencies(frequencies: Any, pairs: int) -> tuple[float, ...] | None:
    if frequencies is None:
        return None
    if not isinstance(frequencies, Sequence) or isinstance(frequencies, str):
        raise OpTypeError(
            f"{OP}: frequencies must be a list of Python numbers or None, got {type(frequencies).__name__}"
        )
    for turn in frequencies:
        if isinstance(turn, bool) or not isinstance(turn, numbers.Real) or not math.isfinite(turn):
            raise OpValueError(f"{OP}: frequencies must be finite numbers, got {turn!r}")
    if len(frequencies) != pairs:
        raise OpShapeError(f"{OP}: frequencies has {len(frequencies)} numbers, expected dim / 2 = {pairs}")
    return tuple(map(float, frequencies))


def prepare(
    query: Any,
    key: Any = None,
    *,
    positions: Any = None,
    cos: Any = None,
    sin: Any = None,
    dim: int | None = None,
    theta: float = 10000.0,
    frequencies: Sequence[float] | None = None,
    factor: float = 1.0,
    layout: str = "halves",
    implementation: str = "auto",
) -> tuple[RotaryProblem, tuple[Any, ...]]:
    """Check a call of ``rotary``; return its problem and its arrays: what is turned, then tables or positions."""
    form = "[..., length, heads, features]"
    arrays = [("query", query)] + ([] if key is None else [("key", key)])
    shapes = tuple(_float(name, x, 3, form) for name, x in arrays)
    first = shapes[0]
    if key is not None and (shapes[1][:-2], shapes[1][-1]) != (first[:-2], first[-1]):
        raise OpShapeError(
            f"{OP}: key must be {form} as query {first} in all but its heads, got shape {shapes[1]}"
        )
    if not isinstance(layout, str) or layout not in LAYOUTS:
        error = OpValueError if isinstance(layout, str) else OpTypeError
        hint = did_you_mean(str(layout), LAYOUTS)
        raise error(f"{OP}: layout must be {', '.join(map(repr, LAYOUTS))}; got {layout!r}.{hint}")
    leads = (first[:-2], first[-3:-2])
    if cos is not None or sin is not None:
        if positions is not None or frequencies is not None or cos is None or sin is None:
            raise OpValueError(
                f"{OP}: tables are cos and sin, both, without positions and frequencies. Remedy: pass either cos= and "
                "sin=, or positions=."
            )
        tables = [_float(name, x, 2, "[length, dim / 2]") for name, x in (("cos", cos), ("sin", sin))]
        turned = _turned(first[-1], 2 * tables[0][-1] if dim is None else dim)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            if table not in [(*lead, turned // 2) for lead in leads]:
                raise OpShapeError(
                    f"{OP}: {name} must be {(*leads[1], turned // 2)} or {(*leads[0], turned // 2)} for query {first} "
                    f"with {turned} features turned, got shape {table}"
                )
        if tables[0] != tables[1]:
            raise OpShapeError(f"{OP}: sin must have the shape of cos, {tables[0]}, got {tables[1]}")
        found, table, wide = (cos, sin), tables[0], jnp.promote_types(cos.dtype, sin.dtype)
    else:
        kind = getattr(positions, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.integer):
            got = type(positions).__name__ if kind is None else kind
            raise OpTypeError(
                f"{OP}: positions must be an array of integers (or cos and sin tables), got {got}. "
                "Remedy: jnp.arange(length)."
            )
        if tuple(positions.shape) not in leads:
            raise OpShapeError(
                f"{OP}: positions must be {leads[1]} or {leads[0]} for query {first}, got shape "
                f"{tuple(positions.shape)}"
            )
        turned = _turned(first[-1], dim)
        found, table = (positions,), (*positions.shape, turned // 2)
        wide = jnp.promote_types(query.dtype, "float32")
    names = [str(jax.dtypes.canonicalize_dtype(x.dtype)) for _, x in arrays]
    problem = RotaryProblem(
        shapes=shapes,
        dtypes=tuple(names),
        dim=turned,
        table=tuple(map(int, table)),
        wide=str(jax.dtypes.canonicalize_dtype(jnp.promote_types(wide, "float32"))),
        layout=layout,
        given=cos is not None,
        theta=_number("theta", theta),
        frequencies=_frequencies(frequencies, turned // 2),
        factor=_number("factor", factor),
        implementation=implementation,
    )
    return problem, (*(x for _, x in arrays), *found)
