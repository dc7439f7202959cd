"""Rotary positions: pairs of features as complex numbers that are multiplied by numbers of modulus 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.ops import rotary
from fuzz_ops.case import EPS, Arg, Family, Generator, floats, pick

__all__ = ["OPERATIONS"]


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, dim: int, layout: str) -> np.ndarray:
    part = x[..., :dim]
    if layout == "pairs":
        part = part.reshape(*part.shape[:-1], dim // 2, 2)
        first, second = part[..., 0], part[..., 1]
    else:
        first, second = part[..., : dim // 2], part[..., dim // 2 :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    found = first * cos - second * sin, first * sin + second * cos
    stacked = np.stack(found, -1) if layout == "pairs" else np.concatenate(found, -1)
    return np.concatenate([stacked.reshape(*x.shape[:-1], dim), x[..., dim:]], -1)


def family(rng: Generator) -> Family:
    lead, length = pick(rng, (), (1,), (3,), (2, 2)), pick(rng, 0, 1, 4, 5)
    heads, features = pick(rng, 1, 2, 3), pick(rng, 2, 4, 7)
    dim = pick(rng, *range(2, features + 1, 2))
    dtype, given, both = floats(rng), bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    layout, implementation = pick(rng, "halves", "pairs"), pick(rng, "auto", "xla", "reference")
    by_row = bool(rng.random() < 0.5)
    frequencies = pick(rng, None, [0.5 / (i + 1) for i in range(dim // 2)])
    factor = pick(rng, 1.0, 1.25)
    table = (*(lead if by_row else ()), length)
    wide = "float64" if dtype == "float64" else "float32"
    options: dict[str, Any] = {"dim": dim, "layout": layout, "implementation": implementation}
    if not given:
        options |= {"theta": 100.0, "frequencies": frequencies, "factor": factor}

    def split(arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return arrays[: 1 + both], arrays[1 + both :]

    def call(*arrays: Any) -> Any:
        turned, rest = split(arrays)
        tables = dict(zip(("cos", "sin") if given else ("positions",), rest, strict=True))
        return rotary.rotary(*turned, **tables, **options)

    def oracle(*arrays: Any) -> list[np.ndarray]:
        turned, rest = split(arrays)
        if not given:
            turns = frequencies or [100.0 ** (-2 * i / dim) for i in range(dim // 2)]
            angle = rest[0][..., None] * np.asarray(turns)
            rest = factor * np.cos(angle), factor * np.sin(angle)
        cos, sin = rest
        return [_turned(x, cos, sin, dim, layout) for x in turned]

    several = [(*lead, length, heads, features), (*lead, length, 1, features)][: 1 + both]
    tables = [Arg((*table, dim // 2), wide)] * 2 if given else [Arg(table, "int32", range(9))]
    narrow = dtype in ("bfloat16", "float16")
    count = len(several)
    return Family(
        f"rotary({several}, {dtype}, given={given}, by_row={by_row}, {options})",
        call,
        oracle,
        (*(Arg(shape, dtype) for shape in several), *tables),
        x64=dtype == "float64",
        tolerance=(8 if narrow else 64) * EPS[dtype],
        gradient_tolerance=20 * EPS[dtype] if narrow else None,
        differentiable=tuple(range(count + 2 * given)),
        twice=not narrow,
        dtypes=(dtype,) * count,
    )


OPERATIONS = {"rotary.rotary": family}
