"""The problems of linear algebra that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["GEMMS", "MATRICES", "GemmSpec", "MatrixSpec", "gemm_arguments"]


@dataclass(frozen=True)
class GemmSpec:
    """Shapes of ``optimized_gemm``, as stored; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    transpose_a: bool = False
    transpose_b: bool = False
    chunk_size: int | None = None
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix ``[*batch, rows, columns]`` to decompose, and how much of it."""

    name: str
    shape: tuple[int, ...]
    rank: int
    tags: tuple[str, ...] = ("small",)


GEMMS: tuple[GemmSpec, ...] = (
    GemmSpec("plain", (16, 8), (8, 12)),
    GemmSpec("odd", (7, 13), (13, 5), tags=("small", "odd")),
    GemmSpec("slabs", (6, 16), (16, 5), chunk_size=4),
    GemmSpec("ragged slabs", (6, 17), (17, 5), chunk_size=5, tags=("small", "odd")),
    GemmSpec("both transposed", (17, 6), (5, 17), True, True, 4, ("small", "odd")),
    GemmSpec("batch", (3, 1, 4, 6), (2, 6, 5), chunk_size=4),
    GemmSpec("length 1", (1, 1), (1, 1), tags=("small", "odd")),
    GemmSpec("deep", (2048, 4096), (4096, 1024), chunk_size=1024, tags=("large",)),
    GemmSpec("square", (1024, 1024), (1024, 1024), chunk_size=256, tags=("large",)),
)

MATRICES: tuple[MatrixSpec, ...] = (
    MatrixSpec("tall", (40, 8), 4),
    MatrixSpec("wide", (8, 31), 3, ("small", "odd")),
    MatrixSpec("square", (24, 24), 5),
    MatrixSpec("batch", (2, 3, 27, 5), 2, ("small", "odd")),
    MatrixSpec("one column", (9, 1), 1, ("small", "odd")),
    MatrixSpec("one entry", (1, 1), 1, ("small", "odd")),
    MatrixSpec("large", (4096, 4096), 64, ("large",)),
)


def gemm_arguments(spec: GemmSpec, random: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: normal numbers, and no ``chunk_size``."""
    operands = random.normal(size=spec.a), random.normal(size=spec.b)
    return operands, {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
