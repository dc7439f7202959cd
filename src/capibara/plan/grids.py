"""The grids of chips that Google rents as slices, the ones nearest to a number of chips, and the next larger one.

Slices of v4, v5p and TPU7x have 4 to 32 chips on one of four grids, and beyond that whole cubes of 4×4×4; slices of v5e
and v6e have one of a few grids with two axes (the Cloud TPU documentation's pages of each version). A part of a host's
chips can be used alone, and is not rented alone, except for single chips of v5e and v6e.
"""

from __future__ import annotations

import math

__all__ = [
    "DIMENSIONS",
    "MOST_CHIPS",
    "at_least",
    "grid_text",
    "is_part_of_host",
    "is_rented",
    "nearest",
    "rented_grids",
    "usual_grid",
]

Shape = tuple[int, ...]

DIMENSIONS = {"v4": 3, "v5p": 3, "v7x": 3, "v5e": 2, "v6e": 2}
MOST_CHIPS = {"v4": 4096, "v5p": 6144, "v7x": 9216, "v5e": 256, "v6e": 256}
# Of the slices that Google names by a number of cores (v4, v5p, TPU7x: the 3-D ones) or chips. The first are parts of
# hosts.
_GRIDS_3D: dict[int, Shape] = {
    1: (1, 1, 1),
    2: (1, 1, 2),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    192: (4, 4, 12),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
    3072: (12, 16, 16),
    4096: (16, 16, 16),
    6144: (16, 16, 24),
}
_GRIDS_2D: dict[int, Shape] = {
    1: (1, 1),
    2: (1, 2),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_HOST_CHIPS = 4
_CUBE = 64


def usual_grid(generation: str, chips: int) -> Shape | None:
    """The grid of the slice that is named by so many chips: of several that one whose axes differ least; None where
    there are no slices of so many."""
    grid = _grids(generation).get(chips)
    if grid is None and DIMENSIONS[generation] == 3 and chips % _CUBE == 0:
        grid = _of_cubes(chips // _CUBE)
    return None if grid is None or chips > MOST_CHIPS[generation] else grid


def _of_cubes(cubes: int) -> Shape:
    """The grid of so many cubes of 4×4×4 whose longest axis is shortest."""
    grids = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        for b in range(a, cubes // a + 1)
        if cubes // a % b == 0 and cubes // (a * b) >= b
    ]
    return tuple(4 * size for size in min(grids, key=lambda grid: grid[::-1]))


def is_rented(generation: str, shape: Shape) -> bool:
    """Whether there are slices of this grid, in any order of its axes."""
    if math.prod(shape) > MOST_CHIPS[generation] or is_part_of_host(generation, shape):
        return False
    if DIMENSIONS[generation] == 3 and all(size % 4 == 0 for size in shape):
        return True
    return sorted(shape) in [sorted(grid) for grid in _grids(generation).values()]


def is_part_of_host(generation: str, shape: Shape) -> bool:
    """Whether this is a part of the 2×2 chips of a host, which is rented as a whole."""
    chips = math.prod(shape)
    return chips < _HOST_CHIPS and max(shape) <= 2 and not (chips == 1 and DIMENSIONS[generation] == 2)


def nearest(generation: str, chips: int, count: int = 3) -> list[Shape]:
    """Grids of the rented slices whose number of chips is nearest, the smallest first."""
    known = _rented(generation)
    chosen = sorted(known, key=lambda n: abs(math.log(n / chips)))[:count]
    return [known[n] for n in sorted(chosen)]


def at_least(generation: str, chips: int) -> Shape | None:
    """The grid of the smallest rented slice with so many chips; None where there is none."""
    known = _rented(generation)
    return next((known[n] for n in sorted(known) if n >= chips), None)


def grid_text(generation: str, shape: Shape) -> str:
    """``"v4:2x2x4"``."""
    return f"{generation}:{'x'.join(map(str, shape))}"


def _grids(generation: str) -> dict[int, Shape]:
    return _GRIDS_3D if DIMENSIONS[generation] == 3 else _GRIDS_2D


def _rented(generation: str) -> dict[int, Shape]:
    return {n: grid for n, grid in _grids(generation).items() if is_rented(generation, grid)}


def rented_grids(generation: str) -> list[Shape]:
    """Grids of the slices that have names, the smallest first."""
    return list(_rented(generation).values())
