"""The scan problems that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["PARALLEL", "SPECS", "ParallelSpec", "ScanSpec", "arguments", "parallel_arguments"]


@dataclass(frozen=True)
class ScanSpec:
    """Sizes of one ``selective_scan`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    batch: int
    length: int
    heads: int
    width: int
    groups: int
    states: int
    chunk_size: int
    tags: tuple[str, ...] = ("small",)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "x": (self.batch, self.length, self.heads, self.width),
            "dt": (self.batch, self.length, self.heads),
            "a": (self.heads,),
            "b": (self.batch, self.length, self.groups, self.states),
            "c": (self.batch, self.length, self.groups, self.states),
            "initial_state": (self.batch, self.heads, self.width, self.states),
        }


SPECS: tuple[ScanSpec, ...] = (
    ScanSpec("whole chunks", 2, 12, 4, 3, 2, 5, 4),
    ScanSpec("ragged", 2, 13, 4, 3, 1, 5, 4, ("small", "odd")),
    ScanSpec("one chunk", 1, 7, 2, 3, 2, 4, 64),
    ScanSpec("one position", 2, 1, 4, 3, 2, 5, 64, ("small", "odd")),
    ScanSpec("chunks of one", 1, 5, 2, 2, 1, 3, 1, ("small", "odd")),
    ScanSpec("model", 16, 256, 16, 32, 1, 32, 64, ("large",)),
    ScanSpec("long", 1, 4096, 16, 32, 1, 32, 64, ("large",)),
)


def arguments(spec: ScanSpec, random: np.random.Generator) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call, with steps and rates like those of a trained layer, without ``chunk_size``."""
    shapes = spec.shapes()
    arrays: dict[str, np.ndarray] = {name: random.normal(size=shape) for name, shape in shapes.items()}
    arrays["dt"] = random.uniform(0.001, 0.1, shapes["dt"])
    arrays["a"] = -random.uniform(0.5, 8.0, shapes["a"])
    state = arrays.pop("initial_state")
    return tuple(arrays.values()), {"initial_state": state}


@dataclass(frozen=True)
class ParallelSpec:
    """A ``parallel_scan`` of an affine step: ``steps`` of a carry ``[rows, width]``, by a matrix or elementwise."""

    name: str
    steps: int
    rows: int
    width: int
    matrix: bool = False
    tags: tuple[str, ...] = ("small",)


PARALLEL: tuple[ParallelSpec, ...] = (
    ParallelSpec("elementwise", 12, 2, 3),
    ParallelSpec("matrix", 9, 2, 3, True, ("small", "odd")),
    ParallelSpec("odd", 13, 1, 1, tags=("small", "odd")),
    ParallelSpec("one step", 1, 2, 3, tags=("small", "odd")),
    ParallelSpec("one step, matrix", 1, 2, 3, True, ("small", "odd")),
    ParallelSpec("long", 8192, 16, 64, tags=("large",)),
    ParallelSpec("long, one row", 8192, 1, 16, tags=("large",)),
    ParallelSpec("long, one number", 8192, 1, 1, tags=("large",)),
    ParallelSpec("long, matrix", 4096, 1, 16, True, ("large",)),
)


def parallel_arguments(
    spec: ParallelSpec, random: np.random.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: a step whose states stay small, its carry and its inputs."""
    first = random.normal(size=(spec.rows, spec.width))
    inputs = random.normal(size=(spec.steps, spec.rows, spec.width))
    if spec.matrix:
        factors = random.normal(size=(spec.steps, spec.width, spec.width)) / (2 * spec.width**0.5)
    else:
        factors = random.uniform(0.5, 0.99, size=inputs.shape)

    def step(h: Any, now: Any) -> Any:
        factor, x = now
        h = (h @ factor if spec.matrix else factor * h) + x
        return h, h

    return (step, first, (factors, inputs)), {}
