"""Calls of ``quantised_matmul``, each with its matrix in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.ops.linalg.specs import QuantisedSpec

__all__ = ["KINDS", "LEVELS", "quantised_case"]

RANDOM = np.random.default_rng(0)
LEVELS = np.sort(RANDOM.normal(size=16)).astype(np.float32)
KINDS = ("int8", "int4", "table")


def quantised_case(kind: str, spec: QuantisedSpec) -> tuple[Any, ...]:
    """Arrays of a call, and the matrix in float64."""
    rows, inner = spec.rows, spec.inner
    x_shape, codes_shape, scales_shape = spec.shapes(8 if kind == "int8" else 4)
    x = RANDOM.normal(size=x_shape).astype(np.float32)
    scales = RANDOM.normal(size=scales_shape).astype(np.float32)
    spread = np.repeat(scales.astype(np.float64), spec.group, 1)[:, :inner]
    if kind == "int8":
        codes = RANDOM.integers(-128, 128, codes_shape, np.int8)
        return x, codes, scales, None, codes * spread
    four = RANDOM.integers(0, 16, (rows, inner), np.uint8)
    levels = LEVELS if kind == "table" else None
    packed = np.zeros(codes_shape, np.uint8)
    for i in range(inner):
        packed[:, i // 2] |= four[:, i] << (4 * (i % 2))
    return x, packed, scales, levels, (np.arange(-8.0, 8) if levels is None else levels)[four] * spread
