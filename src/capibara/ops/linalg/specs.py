"""The problems of linear algebra that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "FACTORS",
    "GEMMS",
    "GROUPED",
    "MATRICES",
    "QUANTISED",
    "FactorSpec",
    "GemmSpec",
    "GroupedSpec",
    "MatrixSpec",
    "QuantisedSpec",
    "gemm_arguments",
    "grouped_arguments",
]


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
class GroupedSpec:
    """``grouped_matmul`` of ``[rows, inner]`` and a matrix ``[inner, columns]`` for each of the sizes."""

    name: str
    rows: int
    inner: int
    columns: int
    sizes: tuple[int, ...]
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix ``[*batch, rows, columns]`` to decompose, and how much of it."""

    name: str
    shape: tuple[int, ...]
    rank: int
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class FactorSpec:
    """The vectors ``[*batch, n]`` of a ``cholesky_update``, whose factors are ``[*batch, n, n]``."""

    name: str
    vector: tuple[int, ...]
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class QuantisedSpec:
    """``quantised_matmul`` of ``[*batch, inner]`` and quantized ``[rows, inner]``."""

    name: str
    batch: tuple[int, ...]
    inner: int
    rows: int
    group: int
    tags: tuple[str, ...] = ("small",)

    def shapes(self, bits: int) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]:
        """Of ``x``, of codes of eight or four bits, and of their scales."""
        packed = -(-self.inner * bits // 8)
        return (*self.batch, self.inner), (self.rows, packed), (self.rows, -(-self.inner // self.group))


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

GROUPED: tuple[GroupedSpec, ...] = (
    GroupedSpec("plain", 40, 5, 7, (9, 17, 14)),
    GroupedSpec("empty groups", 37, 8, 3, (0, 20, 0, 0, 17, 0), ("small", "odd")),
    GroupedSpec("one group has all", 40, 4, 6, (0, 40, 0), ("small", "odd")),
    GroupedSpec("rows of no group", 40, 4, 6, (3, 0, 18), ("small", "odd")),
    GroupedSpec("no rows in any group", 20, 4, 6, (0, 0), ("small", "odd")),
    GroupedSpec("one row", 1, 3, 2, (0, 1, 0), ("small", "odd")),
    GroupedSpec("large blocks", 700, 3, 4, (330, 0, 290, 5)),
    GroupedSpec("more than there is", 20, 4, 3, (18, -3, 9, 4), ("small", "odd")),
    GroupedSpec("whole vectors", 53, 40, 64, (25, 0, 28)),
    GroupedSpec("whole vectors, deep", 29, 200, 32, (13, 16)),
    GroupedSpec("large", 4096, 1024, 2048, (512,) * 8, ("large",)),
    GroupedSpec("16 small matrices", 4096, 64, 64, (256,) * 16, ("large",)),
    GroupedSpec("128 small matrices", 8192, 64, 64, (64,) * 128, ("large",)),
    GroupedSpec("256 small matrices", 16384, 64, 64, (64,) * 256, ("large",)),
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

FACTORS: tuple[FactorSpec, ...] = (
    FactorSpec("plain", (7,)),
    FactorSpec("batch", (2, 3, 12), ("small", "odd")),
    FactorSpec("one entry", (1,), ("small", "odd")),
    FactorSpec("nothing", (0,), ("small", "odd")),
    FactorSpec("large", (1024,), ("large",)),
)

QUANTISED: tuple[QuantisedSpec, ...] = (
    QuantisedSpec("plain", (3,), 64, 10, 32),
    QuantisedSpec("odd", (2, 5), 37, 9, 8, ("small", "odd")),
    QuantisedSpec("vector", (), 50, 7, 16, ("small", "odd")),
    QuantisedSpec("part of a group", (4,), 6, 3, 100, ("small", "odd")),
    QuantisedSpec("length 1", (1,), 1, 1, 4, ("small", "odd")),
    QuantisedSpec("odd groups", (3,), 20, 6, 7, ("small", "odd")),
    QuantisedSpec("slabs", (3,), 24, 11, 8),
    QuantisedSpec("no vector", (0,), 8, 3, 8, ("small", "odd")),
    QuantisedSpec("token", (1,), 2048, 2048, 64, ("large",)),
    QuantisedSpec("prompt", (1024,), 2048, 2048, 64, ("large",)),
)


def grouped_arguments(spec: GroupedSpec, random: np.random.Generator) -> tuple[Any, ...]:
    """The arguments of a call: normal numbers, and the sizes."""
    groups = len(spec.sizes)
    lhs, rhs = (
        random.normal(size=shape) for shape in ((spec.rows, spec.inner), (groups, spec.inner, spec.columns))
    )
    return lhs, rhs, np.array(spec.sizes, np.int32)


def gemm_arguments(spec: GemmSpec, random: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: normal numbers, and no ``chunk_size``."""
    operands = random.normal(size=spec.a), random.normal(size=spec.b)
    return operands, {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
