"""The tropical products that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["SPECS", "TropicalSpec", "arguments"]


@dataclass(frozen=True)
class TropicalSpec:
    """Shapes of one ``matmul`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    tags: tuple[str, ...] = ("small",)


SPECS: tuple[TropicalSpec, ...] = (
    TropicalSpec("plain", (16, 8), (8, 12)),
    TropicalSpec("odd", (7, 13), (13, 19), ("small", "odd")),
    TropicalSpec("more than a block", (139, 261), (261, 275), ("small", "odd")),
    TropicalSpec("batch", (3, 1, 4, 6), (2, 6, 9)),
    TropicalSpec("one column", (9, 5), (5, 1), ("small", "odd")),
    TropicalSpec("length 1", (1, 1), (1, 1), ("small", "odd")),
    TropicalSpec("no depth", (3, 0), (0, 9), ("small", "odd")),
    TropicalSpec("no rows", (0, 4), (4, 9), ("small", "odd")),
    TropicalSpec("batch of blocks", (2, 131, 61), (2, 61, 257), ("small", "odd")),
    TropicalSpec("square", (1024, 1024), (1024, 1024), ("large",)),
)


def arguments(
    spec: TropicalSpec, random: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call: normal random values, which have no ties."""
    return (random.normal(size=spec.a), random.normal(size=spec.b)), {}
