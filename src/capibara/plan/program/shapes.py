"""Shapes in HLO text: ``bf16[2,256,512]{2,1,0:T(8,128)(2,1)S(1)}``.

Element type, dimensions, and between braces the layout: dimensions from the fastest varying to the slowest, then
tiles and a memory space. A tile ``T(8,128)`` means that memory is allocated in blocks of 8 × 128 elements of the two
fastest dimensions, so both are padded to whole blocks. ``S(n)`` is the memory space of an array. Its meaning was
determined from programs compiled for v4, v5e, v5p and v6e: no ``S`` or ``S(0)`` is the device's main memory (HBM), 1
the vector memory, 2 semaphores, 3 the common memory of a v4 chip, 4 and 6 scalar memories, 5 the host's memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from capibara.plan.errors import PlanError

__all__ = ["HBM", "HOST", "ArrayShape", "parse_shape"]

HBM = 0
HOST = 5
_MOST_ELEMENTS = 1 << 60
_TYPE = re.compile(
    r"pred|token|opaque|[su](?:1|2|4|8|16|32|64)|f(?:16|32|64)|bf16|f(?:4|6|8)e\w{1,12}|c(?:64|128)"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r"\(([\d,*\s]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class ArrayShape:
    """One array.

    Attributes:
      dtype: HLO's name of the element type (``"bf16"``).
      dims: sizes of the dimensions, slowest first as written.
      order: dimensions from the fastest varying to the slowest; empty if the text has none.
      tile: the first tile of the layout, or empty.
      space: memory space; 0 is HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = HBM

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return element_bits(self.dtype)

    @property
    def size(self) -> int:
        """Bytes without padding."""
        return -(-self.elements * self.bits // 8)

    @property
    def padded_size(self) -> int:
        """Bytes including the padding to tiles."""
        if not self.tile or not self.dims:
            return self.size
        sizes = (
            [self.dims[i] for i in self.order] if len(self.order) == len(self.dims) else list(self.dims[::-1])
        )
        for position, tile in enumerate(reversed(self.tile)):
            if position >= len(sizes):
                sizes.append(1)
            if tile > 1:
                sizes[position] = -(-sizes[position] // tile) * tile
        return -(-math.prod(sizes) * self.bits // 8)

    @property
    def in_hbm(self) -> bool:
        """Whether it is in the device's main memory."""
        return self.space == HBM


@lru_cache(maxsize=64)
def element_bits(dtype: str) -> int:
    """Bits of one element of an HLO type (``"bf16"`` → 16); 0 for tokens.

    Raises:
      PlanError: it is not an element type of HLO.
    """
    if not _TYPE.fullmatch(dtype):
        raise PlanError(f"the program's text has an array of the unknown element type {dtype!r}")
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8 if dtype == "pred" else 0


@lru_cache(maxsize=200_000)
def _array(dtype: str, dims_text: str, layout: str | None) -> ArrayShape:
    dims = _integers(dims_text.replace("<=", ""))
    if math.prod(dims) > _MOST_ELEMENTS:
        raise PlanError(f"the program's text has an array {dtype}[{dims_text[:60]}], larger than any memory")
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space = HBM
    if layout:
        head, _, tail = layout.partition(":")
        order = _integers(head)
        if len(order) == len(dims) and sorted(order) != list(range(len(dims))):
            raise PlanError(
                f"the program's text has an array {dtype}[{dims_text[:60]}] with the layout {{{head[:60]}}}, which "
                "is not an order of its dimensions"
            )
        where = _SPACE.search(tail)
        space = int(where[1]) if where else HBM
        at = tail.find("T(")
        if at >= 0:
            found = _TILE.match(tail, at + 1)
            # A star stands for "as long as the dimension is": no padding there.
            tile = (
                tuple(1 if t.strip() == "*" else int(t) for t in found[1].split(",") if t.strip())
                if found
                else ()
            )
    return ArrayShape(dtype, dims, order, tile, space)


def _integers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and len(part) < 19 for part in parts):
        raise PlanError(f"the program's text has {text[:60]!r} where sizes were expected, such as '8,128'")
    return tuple(map(int, parts))


@lru_cache(maxsize=50_000)
def parse_shape(text: str) -> tuple[ArrayShape, ...]:
    """The arrays of a shape, those of nested tuples one after another (without tokens).

    Raises:
      PlanError: a size or an element type that HLO does not have.
    """
    return tuple(_array(*groups) for groups in _ARRAY.findall(text) if groups[0] not in ("token", "opaque"))
