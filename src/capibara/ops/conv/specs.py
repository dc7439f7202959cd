"""The two-dimensional convolutions that tests, tuning and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SPECS", "ConvSpec", "arguments"]


@dataclass(frozen=True)
class ConvSpec:
    """Sizes and options of one ``winograd_conv2d`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    batch: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    rows: int = 3
    columns: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ("small",)

    @property
    def inputs(self) -> tuple[int, int, int, int]:
        return self.batch, self.height, self.width, self.in_channels

    @property
    def filters(self) -> tuple[int, int, int, int]:
        return self.rows, self.columns, self.in_channels, self.out_channels

    @property
    def applies(self) -> bool:
        """Whether Winograd's algorithm is for it."""
        return self.filters[:2] == (3, 3) and self.options.get("strides", 1) in (1, (1, 1))


_BY_4 = {"tile_size": (4, 4)}
_ODD, _LARGE = ("small", "odd"), ("large",)

SPECS: tuple[ConvSpec, ...] = (
    ConvSpec("plain", 2, 8, 8, 3, 4),
    ConvSpec("tiles of 4", 2, 8, 8, 3, 4, options=_BY_4),
    ConvSpec("tiles of 2 by 4", 1, 7, 9, 2, 3, options={"tile_size": (2, 4)}, tags=_ODD),
    ConvSpec("ragged, valid", 2, 9, 7, 3, 2, options={"padding": "VALID"}, tags=_ODD),
    ConvSpec("ragged padding", 1, 6, 5, 2, 3, options={"padding": ((3, 0), (1, 4))}, tags=_ODD),
    ConvSpec("one pixel", 1, 1, 1, 1, 1, tags=_ODD),
    ConvSpec("one output", 1, 3, 3, 2, 1, options={"padding": "VALID"}, tags=_ODD),
    ConvSpec("strides", 2, 8, 9, 3, 2, options={"strides": (2, 3)}, tags=_ODD),
    ConvSpec("other taps", 2, 8, 6, 3, 2, rows=1, columns=5, tags=_ODD),
    ConvSpec("56, 64 channels", 8, 56, 56, 64, 64, tags=_LARGE),
    ConvSpec("28, 128 channels", 8, 28, 28, 128, 128, tags=_LARGE),
    ConvSpec("14, 256 channels", 8, 14, 14, 256, 256, tags=_LARGE),
    ConvSpec("7, 512 channels", 8, 7, 7, 512, 512, tags=_LARGE),
    ConvSpec("56, 256 channels", 1, 56, 56, 256, 256, tags=_LARGE),
    ConvSpec("56, 256 channels, tiles of 4", 1, 56, 56, 256, 256, options=_BY_4, tags=_LARGE),
    ConvSpec("28, 128 channels, tiles of 4", 8, 28, 28, 128, 128, options=_BY_4, tags=_LARGE),
    ConvSpec("32, 16 channels", 8, 32, 32, 16, 16, tags=_LARGE),
    ConvSpec("56, strides of 2", 8, 56, 56, 64, 64, options={"strides": 2}, tags=_LARGE),
    ConvSpec("224, first layer", 1, 224, 224, 3, 64, 7, 7, {"strides": 2}, _LARGE),
)


def arguments(spec: ConvSpec, random: np.random.Generator) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call."""
    return (random.normal(size=spec.inputs), random.normal(size=spec.filters)), dict(spec.options)
