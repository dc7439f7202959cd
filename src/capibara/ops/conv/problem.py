"""The validated, frozen description of a two-dimensional convolution, and shared checks."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = [
    "Conv2dProblem",
    "Pads",
    "alike_in_speed",
    "check_array",
    "check_precision",
    "explicit_padding",
    "prepare",
    "whole_numbers",
]

TILES = (2, 4)
Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Conv2dProblem:
    """``inputs [batch, *size, in_channels]`` by ``filters [*taps, in_channels, out_channels]``."""

    batch: int
    size: tuple[int, int]
    in_channels: int
    out_channels: int
    taps: tuple[int, int]
    strides: tuple[int, int]
    padding: Pads
    tile: tuple[int, int]
    dtype: str
    precision: jax.lax.Precision | None
    implementation: str
    tile_given: bool = False
    tuned: Tuned | None = None

    @property
    def out_size(self) -> tuple[int, int]:
        height, width = (
            max((n + low + high - k) // s + 1, 0)
            for n, k, s, (low, high) in zip(self.size, self.taps, self.strides, self.padding, strict=True)
        )
        return height, width

    @property
    def wide(self) -> Any:
        """The dtype of sums."""
        return jnp.promote_types(self.dtype, jnp.float32)


def alike_in_speed(problem: Conv2dProblem) -> dict[str, int | str]:
    """What determines which implementation is fast."""
    names = ("batch", "in_channels", "out_channels")
    pairs = ("size", "taps", "strides", "tile")
    return {name: getattr(problem, name) for name in names} | {
        f"{name}{i}": getattr(problem, name)[i] for name in pairs for i in range(2)
    }


def check_array(op: str, name: str, array: Any, rank: int, layout: str) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise OpTypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise OpTypeError(f"{op}: {name} must be floating point, got {array.dtype}")
    if len(array.shape) != rank:
        raise OpShapeError(f"{op}: {name} must be {layout}, got shape {tuple(array.shape)}")


def whole_numbers(op: str, name: str, value: Any, count: int, least: int = 1) -> tuple[int, ...]:
    """``value``, one integer for all axes or one for each, as a tuple."""
    row = (value,) * count if isinstance(value, numbers.Integral) else value
    if isinstance(value, bool) or not isinstance(row, Sequence) or isinstance(row, str):
        raise OpTypeError(f"{op}: {name} must be an integer or {count} of them, got {value!r}")
    good = all(isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= least for n in row)
    if len(row) != count or not good:
        raise OpValueError(f"{op}: {name} must be {count} integers of at least {least}, got {value!r}")
    return tuple(int(n) for n in row)


def explicit_padding(
    op: str, padding: Any, size: Sequence[int], taps: Sequence[int], strides: Sequence[int]
) -> Pads:
    """``padding`` as pairs of zeros before and after each axis; ``taps`` with their dilation."""
    if isinstance(padding, str):
        if padding == "VALID":
            return tuple((0, 0) for _ in size)
        if padding == "SAME":
            lacks = [
                max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(size, taps, strides, strict=True)
            ]
            return tuple((lack // 2, lack - lack // 2) for lack in lacks)
        raise OpValueError(
            f"{op}: padding must be 'SAME', 'VALID' or {len(size)} pairs of integers, got {padding!r}."
            f"{did_you_mean(padding.upper(), ('SAME', 'VALID'))}"
        )
    if not isinstance(padding, Sequence) or len(padding) != len(size):
        raise OpTypeError(
            f"{op}: padding must be 'SAME', 'VALID' or {len(size)} pairs of integers, got {padding!r}"
        )
    pairs = []
    for pair in padding:
        low, high = whole_numbers(op, "each pair of padding", pair, 2, least=0)
        pairs.append((low, high))
    return tuple(pairs)


def check_precision(op: str, precision: Any) -> jax.lax.Precision | None:
    if precision is None or isinstance(precision, jax.lax.Precision):
        return precision
    names = ("default", "high", "highest")
    if not isinstance(precision, str):
        raise OpTypeError(
            f"{op}: precision must be None, {', '.join(names)} or a jax.lax.Precision, got {precision!r}"
        )
    if precision not in names:
        raise OpValueError(
            f"{op}: precision must be None, {', '.join(names)} or a jax.lax.Precision, got {precision!r}."
            f"{did_you_mean(precision, names)}"
        )
    return jax.lax.Precision[precision.upper()]


def prepare(
    inputs: Any,
    filters: Any,
    strides: Any = (1, 1),
    padding: Any = "SAME",
    tile_size: Any = None,
    *,
    precision: Any = None,
    implementation: str = "auto",
) -> tuple[Conv2dProblem, tuple[Any, ...]]:
    """Check a call of ``winograd_conv2d``; return its problem and its arrays."""
    op = "winograd_conv2d"
    check_array(op, "inputs", inputs, 4, "[batch, height, width, in_channels]")
    check_array(op, "filters", filters, 4, "[rows, columns, in_channels, out_channels]")
    if inputs.shape[3] != filters.shape[2]:
        raise OpShapeError(
            f"{op}: inputs {tuple(inputs.shape)} have {inputs.shape[3]} channels and filters "
            f"{tuple(filters.shape)} take {filters.shape[2]}; they must be equal"
        )
    if 0 in filters.shape[:2]:
        raise OpShapeError(f"{op}: filters have no taps, their shape is {tuple(filters.shape)}")
    steps = whole_numbers(op, "strides", strides, 2)
    tile = (2, 2) if tile_size is None else whole_numbers(op, "tile_size", tile_size, 2)
    if any(m not in TILES for m in tile):
        raise OpValueError(
            f"{op}: tile_size must be made of {' and '.join(map(str, TILES))} (outputs a tile is wide: F(2,3) or "
            f"F(4,3)), got {tile_size!r}"
        )
    size, taps = tuple(inputs.shape[1:3]), tuple(filters.shape[:2])
    problem = Conv2dProblem(
        batch=inputs.shape[0],
        size=size,
        in_channels=inputs.shape[3],
        out_channels=filters.shape[3],
        taps=taps,
        strides=(steps[0], steps[1]),
        padding=explicit_padding(op, padding, size, taps, steps),
        tile=(tile[0], tile[1]),
        dtype=str(jax.dtypes.canonicalize_dtype(jnp.promote_types(inputs.dtype, filters.dtype))),
        precision=check_precision(op, precision),
        implementation=implementation,
        tile_given=tile_size is not None,
    )
    return problem, (inputs, filters)
