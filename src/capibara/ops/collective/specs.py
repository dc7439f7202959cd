"""The collectives that tests share. Shapes are one device's; there may be any number of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["MOVES", "PRODUCTS", "REDUCES", "MoveSpec", "ProductSpec", "ReduceSpec", "gradients"]


@dataclass(frozen=True)
class ReduceSpec:
    """An ``async_all_reduce`` of arrays by name; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    integers: tuple[str, ...] = ()
    """The arrays that are int32; the others are floating point."""
    compressed: bool = False
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class MoveSpec:
    """A gather, scatter or exchange, by the part that one device sends to another.

    ``optimized_all_gather`` joins the parts along ``axis``. ``reduce_scatter`` and ``all_to_all`` begin with as many
    parts along ``axis`` as there are devices; the latter joins what it gets along ``concat_axis``.
    """

    name: str
    part: tuple[int, ...]
    axis: int
    concat_axis: int
    tags: tuple[str, ...] = ("small",)

    def whole(self, devices: int) -> tuple[int, ...]:
        """The part times ``devices`` along ``axis``."""
        axis = self.axis % len(self.part)
        return (*self.part[:axis], devices * self.part[axis], *self.part[axis + 1 :])


@dataclass(frozen=True)
class ProductSpec:
    """``all_gather_matmul`` of ``rows`` rows, or ``matmul_reduce_scatter`` of ``rows`` for each device."""

    name: str
    batch: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    tags: tuple[str, ...] = ("small",)

    def x(self, parts: int = 1) -> tuple[int, ...]:
        return (*self.batch, parts * self.rows, self.inner)

    def weight(self) -> tuple[int, int]:
        return self.inner, self.columns


_ODD, _LARGE = ("small", "odd"), ("large",)

REDUCES: tuple[ReduceSpec, ...] = (
    ReduceSpec("tree", {"w": (3, 5), "b": (1,), "none": (0, 2), "k": (7,)}, ("k",), tags=_ODD),
    ReduceSpec("vector", {"w": (8,)}),
    ReduceSpec("number", {"w": ()}, tags=_ODD),
    # More than a block of numbers that share a scale, less than one, and what is sent as it is.
    ReduceSpec("tree", {"w": (70, 11), "b": (3,), "k": ()}, ("k",), True, _ODD),
    ReduceSpec("whole blocks", {"w": (4, 128)}, compressed=True),
    ReduceSpec("number", {"w": ()}, compressed=True, tags=_ODD),
    ReduceSpec("layer", {"w": (4096, 16)}, compressed=True, tags=_LARGE),
)

MOVES: tuple[MoveSpec, ...] = (
    MoveSpec("to another axis", (2, 3, 4), 1, 0),
    MoveSpec("along one axis", (2, 3, 4), 1, 1),
    MoveSpec("last axis", (2, 3, 5), -1, 1, _ODD),
    MoveSpec("number", (1,), 0, 0, _ODD),
    MoveSpec("nothing", (3, 0), 0, 1, _ODD),
    MoveSpec("activations", (128, 256), 0, 0, _LARGE),
)

PRODUCTS: tuple[ProductSpec, ...] = (
    ProductSpec("plain", (), 4, 8, 6),
    ProductSpec("odd", (), 3, 5, 2, _ODD),
    ProductSpec("batch", (2,), 3, 5, 2, _ODD),
    ProductSpec("one row", (2,), 1, 5, 2, _ODD),
    ProductSpec("length 1", (), 1, 1, 1, _ODD),
    ProductSpec("layer", (), 256, 512, 256, _LARGE),
)


def gradients(spec: ReduceSpec, devices: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """What each of ``devices`` gives to be reduced, one beside the other along a first axis."""
    shapes = {name: (devices, *shape) for name, shape in spec.shapes.items()}
    return {
        name: random.integers(-3, 4, size=shape).astype(np.int32)
        if name in spec.integers
        else random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
