"""The Fourier transforms that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SPECS", "FFTSpec", "arguments"]


@dataclass(frozen=True)
class FFTSpec:
    """One ``radix_optimized_fft`` call of a signal of ``shape``; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ("small",)

    @property
    def axes(self) -> tuple[int, ...]:
        axis = self.options.get("axis", -1)
        return (axis,) if isinstance(axis, int) else tuple(axis)


SPECS: tuple[FFTSpec, ...] = (
    FFTSpec("plain", (3, 64)),
    FFTSpec("documented radices", (2, 64), {"radix_factors": (2, 4, 8)}),
    FFTSpec("radices repeated", (2, 128), {"radix_factors": (2, 4, 8)}),
    FFTSpec("radices in another order", (105,), {"radix_factors": (7, 3, 5)}, ("small", "odd")),
    FFTSpec("radices that do not cover", (2, 15), {"radix_factors": (2, 4)}, ("small", "odd")),
    FFTSpec("two stages", (2, 1024)),
    FFTSpec("odd", (2, 675), {}, ("small", "odd")),
    FFTSpec("large prime", (2, 1031), {}, ("small", "odd")),
    FFTSpec("prime", (31,), {}, ("small", "odd")),
    FFTSpec("length 1", (3, 1), {}, ("small", "odd")),
    FFTSpec("length 2", (3, 2), {}, ("small", "odd")),
    FFTSpec("no signal", (0, 8), {}, ("small", "odd")),
    FFTSpec("first axis", (30, 5), {"axis": 0, "norm": "ortho"}, ("small", "odd")),
    FFTSpec("cropped", (4, 20), {"length": 9, "norm": "forward"}, ("small", "odd")),
    FFTSpec("padded", (4, 20), {"length": 33}, ("small", "odd")),
    FFTSpec("image", (2, 12, 10), {"axis": (-2, -1)}),
    FFTSpec("volume", (6, 5, 4), {"axis": (2, 0, 1), "length": (4, 7, 5), "norm": "ortho"}, ("small", "odd")),
    FFTSpec("4096", (64, 4096), {}, ("large",)),
    FFTSpec("64", (1024, 64), {}, ("large",)),
    FFTSpec("1000", (256, 1000), {}, ("large",)),
    FFTSpec("a million", (1, 1 << 20), {}, ("large",)),
    FFTSpec("prime 4093", (64, 4093), {}, ("large",)),
    FFTSpec("256 × 256", (8, 256, 256), {"axis": (-2, -1)}, ("large",)),
)


def arguments(spec: FFTSpec, random: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: a pair of normal numbers, and no radices."""
    pair = tuple(random.normal(size=spec.shape) for _ in range(2))
    return (pair,), {name: value for name, value in spec.options.items() if name != "radix_factors"}
