"""The searches for nearest codes that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SPECS", "NearestSpec", "select"]


@dataclass(frozen=True)
class NearestSpec:
    """Sizes of one ``nearest_code`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    tokens: tuple[int, ...]
    codes: int
    dim: int
    tags: tuple[str, ...] = ("small",)


SPECS: tuple[NearestSpec, ...] = (
    NearestSpec("plain", (4, 8), 16, 8),
    NearestSpec("odd", (3, 5, 7), 11, 5, ("small", "odd")),
    NearestSpec("one vector", (), 7, 3, ("small", "odd")),
    NearestSpec("one code", (9,), 1, 3, ("small", "odd")),
    NearestSpec("one number", (9,), 4, 1, ("small", "odd")),
    NearestSpec("no vector", (4, 0), 3, 5, ("small", "odd")),
    NearestSpec("blocks of tokens", (300,), 1031, 8, ("small", "odd")),
    NearestSpec("blocks of codes", (70,), 9001, 3, ("small", "odd")),
    NearestSpec("large", (65536,), 1024, 128, ("large",)),
    NearestSpec("many codes", (8192,), 16384, 64, ("large",)),
    NearestSpec("few codes", (65536,), 64, 64, ("large",)),
)


def select(tag: str) -> tuple[NearestSpec, ...]:
    """The specs that carry ``tag``."""
    return tuple(spec for spec in SPECS if tag in spec.tags)
