"""Parameters that one CPU device uses where they lie in this machine's memory.

Their tensors are put there by :func:`capibara.native.placing.place`, many in one call, straight from the file: no
program is compiled to turn and stack them, nothing is read twice or kept besides, and Python's other threads go on. A
matrix can get the layout that kernels read, panels, at once. XLA does not own such arrays: it would copy them where
they are donated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from capibara.compress.container.file_bytes import FileNumbers
from capibara.families.tensors import Piece, Placed
from capibara.native import rooms
from capibara.native.placing import PANEL, InFile, Placing, can_place, place

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["OnHost", "Packed"]

Path = tuple[str, ...]
_BATCH = 64 << 20  # bytes of files between reports of progress
_Layout = Literal["same", "transposed", "panels", "turned panels"]
_Way = tuple[_Layout, tuple[int, int, int]]


@dataclass(frozen=True)
class Packed:
    """How a matrix is to lie in panels.

    Attributes:
      inner, columns: its sides; of a stack those of each entry.
      transposed: whether the parameter is ``[columns, inner]``.
      made: the parameter of its panels, ``[entries, columns / 16, inner, 16]``.
    """

    inner: int
    columns: int
    transposed: bool
    made: Callable[[np.ndarray], Any]


class OnHost:
    """Parameters that are put into host memory, as the tensors come.

    Args:
      model: whose. wanted: its tensors. dtypes: those in which files have them, by name.
      packing: what is to lie in panels. A matrix whose tensors lie otherwise does not.
    """

    def __init__(
        self,
        model: ModularCapibaraModel,
        wanted: Sequence[Placed],
        dtypes: Mapping[str, np.dtype],
        packing: Mapping[Path, Packed],
    ) -> None:
        specs = model.compiled.params
        ways: dict[Path, list[_Way | None]] = {}
        others: set[Path] = set()
        for placed in wanted if self._can(model) else ():
            for one in placed.entries() if placed.stacked else (placed,):
                for piece, path, index, shape, _ in one.parts:
                    way = _way(piece, shape)
                    found = ways.setdefault(path, [])
                    if way is None or dtypes[placed.name] != specs[path].dtype:
                        others.add(path)
                    elif path in packing:
                        found.append(_packed_way(way, packing[path]) if len(index) < 2 else None)
        self._packed = {
            path: packing[path]
            for path, found in ways.items()
            if path in packing and path not in others and None not in found
        }
        self._memory = {
            path: rooms.room(_shape(specs[path], path, self._packed.get(path)), np.dtype(specs[path].dtype))
            for path in ways
            if path not in others
        }
        self._parts: list[tuple[Placing, FileNumbers]] = []
        self._bytes = 0

    @staticmethod
    def _can(model: ModularCapibaraModel) -> bool:
        import jax

        on_cpu = model.mesh is None and jax.local_devices()[0].platform == "cpu"
        return on_cpu and rooms.is_reusing() and can_place()

    def __contains__(self, path: Path) -> bool:
        return path in self._memory

    @property
    def paths(self) -> set[Path]:
        """Those that it has memory for."""
        return set(self._memory)

    @property
    def packed(self) -> set[Path]:
        """Those that lie in panels."""
        return set(self._packed)

    @property
    def is_empty(self) -> bool:
        """Whether all that was put is there."""
        return not self._parts

    @property
    def is_full(self) -> bool:
        """Whether so much was put that it is time to :meth:`read`."""
        return self._bytes >= _BATCH

    def put(
        self,
        path: Path,
        index: tuple[int, ...],
        piece: Piece,
        shape: tuple[int, ...],
        numbers: FileNumbers | np.ndarray,
    ) -> None:
        """Put a tensor's numbers in their place: those of a file in :meth:`read`.

        Args:
          shape: of the parameter, or of its entry at ``index`` of a stack.
        """
        way, out = _way(piece, shape), self._memory[path]
        assert way is not None
        if path in self._packed:
            way = _packed_way(way, self._packed[path])
            assert way is not None
        layout, sides = way
        to = out[index[0] if index else 0] if path in self._packed else out[(*index, ...)]
        if isinstance(numbers, FileNumbers):
            # The bits of a file are integers.
            source = InFile(numbers.file.fileno(), numbers.offset)
            self._parts.append((Placing(source, sides, to, layout), numbers))
            self._bytes += numbers.nbytes
        else:
            place([Placing(np.ascontiguousarray(numbers), sides, to, layout)])

    def read(self) -> None:
        """Read all that was put.

        Raises:
          DamagedError, OSError: a file ended or failed.
        """
        parts, self._parts, self._bytes = self._parts, [], 0
        while parts and (failed := place([part for part, _ in parts])) is not None:
            part, numbers = parts.pop(failed)
            # Once more, by what says what is wrong; it may have been for a moment.
            whole = np.empty(numbers.nbytes, np.uint8)
            numbers.read_into(whole)
            place([replace(part, source=whole)])

    def parameters(self) -> dict[Path, Any]:
        """All of them, on the device; to be asked for once."""
        import jax

        self.read()
        memory, self._memory = self._memory, {}
        return {
            path: self._packed[path].made(array) if path in self._packed else jax.device_put(array)
            for path, array in memory.items()
        }


def _shape(spec: Any, path: Path, packed: Packed | None) -> tuple[int, ...]:
    """Of the memory of a parameter; tensors fill all of it, since :func:`places` has one for each of its entries."""
    shape = tuple(spec.sizes({}, ".".join(path)))
    if packed is None:
        return shape
    entries = math.prod(shape) // (packed.inner * packed.columns)
    return (entries, packed.columns // PANEL, packed.inner, PANEL)


def _way(piece: Piece, shape: tuple[int, ...]) -> _Way | None:
    """How the numbers of a tensor become a parameter of this shape: ``None`` for other orders than those of transposed
    matrices, which are left to XLA."""
    found = _matrices(piece.order)
    if found is None:
        return None
    first, middle = found
    apart = piece.apart(shape)
    several, rows, columns = (math.prod(apart[a:b]) for a, b in ((0, first), (first, middle), (middle, None)))
    if middle == first or 1 in (rows, columns):
        return "same", (1, math.prod(shape), 1)
    return "transposed", (several, rows, columns)


def _packed_way(way: _Way, packed: Packed) -> _Way | None:
    """The same for a matrix that is to lie in panels; ``None``: it cannot."""
    layout, (several, rows, columns) = way
    if layout == "same":
        if packed.transposed:
            return "turned panels", (1, packed.columns, packed.inner)
        return "panels", (1, packed.inner, packed.columns)
    stored = (packed.inner, packed.columns) if packed.transposed else (packed.columns, packed.inner)
    if several != 1 or (rows, columns) != stored:
        return None
    return ("panels" if packed.transposed else "turned panels"), (1, rows, columns)


def _matrices(order: tuple[int, ...]) -> tuple[int, int] | None:
    """How an order of dimensions transposes matrices: where their rows begin, and where their columns; otherwise None.

    The dimensions before stay where they are, those of rows and of columns change places.
    """
    first = next((i for i, one in enumerate(order) if one != i), len(order))
    middle = order[first] if first < len(order) else first
    turned = (*range(first), *range(middle, len(order)), *range(first, middle))
    return (first, middle) if order == turned else None
