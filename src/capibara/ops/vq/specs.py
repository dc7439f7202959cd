"""The searches for nearest codes that tests, tuning and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["SPECS", "NearestSpec", "arguments"]


@dataclass(frozen=True)
class NearestSpec:
    """Sizes of one ``nearest_code`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    tokens: int
    codes: int
    dim: int
    axes: tuple[int, ...] | None = None
    """The axes of the vectors, where it is not one of ``tokens``."""
    tags: tuple[str, ...] = ("small",)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        return (*((self.tokens,) if self.axes is None else self.axes), self.dim), (self.codes, self.dim)


_ODD, _LARGE = ("small", "odd"), ("large",)

SPECS: tuple[NearestSpec, ...] = (
    NearestSpec("plain", 32, 16, 8, (4, 8)),
    NearestSpec("odd", 105, 11, 5, (3, 5, 7), _ODD),
    NearestSpec("one vector", 1, 7, 3, (), _ODD),
    NearestSpec("one code", 9, 1, 3, tags=_ODD),
    NearestSpec("one number", 9, 4, 1, tags=_ODD),
    NearestSpec("no vector", 0, 3, 5, (4, 0), _ODD),
    NearestSpec("blocks of tokens", 300, 1031, 8, tags=_ODD),
    NearestSpec("blocks of codes", 70, 9001, 3, tags=_ODD),
    NearestSpec("large", 65536, 1024, 128, tags=_LARGE),
    NearestSpec("many codes", 8192, 16384, 64, tags=_LARGE),
    NearestSpec("few codes", 65536, 64, 64, tags=_LARGE),
)


def arguments(
    spec: NearestSpec, random: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call: integers, whose distances are exact in float32, so that ties are ties."""
    vectors, codes = (np.round(4 * random.normal(size=shape)) for shape in spec.shapes())
    return (vectors, codes), {}
