"""The two-dimensional convolutions that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SPECS", "ConvSpec", "select"]


@dataclass(frozen=True)
class ConvSpec:
    """Shapes and options of one ``winograd_conv2d`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    inputs: tuple[int, int, int, int]
    filters: tuple[int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ("small",)

    @property
    def applies(self) -> bool:
        """Whether Winograd's algorithm is for it."""
        return self.filters[:2] == (3, 3) and self.options.get("strides", 1) in (1, (1, 1))


SPECS: tuple[ConvSpec, ...] = (
    ConvSpec("plain", (2, 8, 8, 3), (3, 3, 3, 4)),
    ConvSpec("tiles of 4", (2, 8, 8, 3), (3, 3, 3, 4), {"tile_size": (4, 4)}),
    ConvSpec("tiles of 2 by 4", (1, 7, 9, 2), (3, 3, 2, 3), {"tile_size": (2, 4)}, ("small", "odd")),
    ConvSpec("ragged, valid", (2, 9, 7, 3), (3, 3, 3, 2), {"padding": "VALID"}, ("small", "odd")),
    ConvSpec(
        "ragged padding",
        (1, 6, 5, 2),
        (3, 3, 2, 3),
        {"padding": ((3, 0), (1, 4)), "tile_size": 4},
        ("small", "odd"),
    ),
    ConvSpec("one pixel", (1, 1, 1, 1), (3, 3, 1, 1), tags=("small", "odd")),
    ConvSpec("one output", (1, 3, 3, 2), (3, 3, 2, 1), {"padding": "VALID"}, ("small", "odd")),
    ConvSpec("strides", (2, 8, 9, 3), (3, 3, 3, 2), {"strides": (2, 3)}, ("small", "odd")),
    ConvSpec("other taps", (2, 8, 6, 3), (1, 5, 3, 2), tags=("small", "odd")),
    ConvSpec("56, 64 channels", (8, 56, 56, 64), (3, 3, 64, 64), tags=("large",)),
    ConvSpec("28, 128 channels", (8, 28, 28, 128), (3, 3, 128, 128), tags=("large",)),
    ConvSpec("14, 256 channels", (8, 14, 14, 256), (3, 3, 256, 256), tags=("large",)),
    ConvSpec("7, 512 channels", (8, 7, 7, 512), (3, 3, 512, 512), tags=("large",)),
    ConvSpec("56, 256 channels", (1, 56, 56, 256), (3, 3, 256, 256), tags=("large",)),
    ConvSpec(
        "56, 256 channels, tiles of 4",
        (1, 56, 56, 256),
        (3, 3, 256, 256),
        {"tile_size": (4, 4)},
        ("large",),
    ),
    ConvSpec("32, 16 channels", (8, 32, 32, 16), (3, 3, 16, 16), tags=("large",)),
    ConvSpec("56, strides of 2", (8, 56, 56, 64), (3, 3, 64, 64), {"strides": 2}, ("large",)),
    ConvSpec("224, first layer", (1, 224, 224, 3), (7, 7, 3, 64), {"strides": 2}, ("large",)),
)


def select(tag: str) -> tuple[ConvSpec, ...]:
    """The specs that carry ``tag``."""
    return tuple(spec for spec in SPECS if tag in spec.tags)
