"""A folder of archives, as ``capibara compress FOLDER OUT`` writes it, read as if it were the original folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from capibara.compress.container import Archive
from capibara.compress.container.index import SUFFIX
from capibara.compress.errors import ArchiveError, CompressError
from capibara.compress.folders import names_of
from capibara.compress.safetensors_file import Stored
from capibara.compress.stored_codes import stored_layouts, stored_parts
from capibara.families.compressed.writing import codes_of
from capibara.families.entries import Entries
from capibara.families.errors import FamilyError

__all__ = ["ArchiveTensors"]

_BITS = {"int8": 8, "int4": 4}


class ArchiveTensors:
    """The tensors of a folder's archives, decoded when they are read; and the codes that they are stored with.

    Attributes:
      folder: the folder. tensors: name → this object, and how the tensor appears. dtypes: empty.

    Raises:
      FamilyError: an archive is damaged, or two have the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dtypes: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            try:
                archives = [stack.enter_context(Archive(one)) for one in sorted(folder.glob(f"*{SUFFIX}"))]
                self._archives = names_of(archives)
            except (ArchiveError, CompressError) as error:
                raise FamilyError(f"{error}") from None
            self._stack = stack.pop_all()
        self.tensors: dict[str, tuple[ArchiveTensors, Stored]] = {}
        for name, archive in self._archives.items():
            entry = archive[name]
            size = math.prod(entry.shape) * entry.format.bits // 8
            self.tensors[name] = self, Stored(entry.format, entry.shape, 0, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def numbers(self, name: str) -> Any:
        """The bits of a tensor: rows are decoded when a slice is taken."""
        archive = self._archives[name]
        shape = archive[name].shape

        def bits(first: int, last: int) -> np.ndarray:
            return archive.read(name, slice(first, last) if shape else None)

        return Entries(bits, shape)

    def layout(self, names: Iterable[str]) -> tuple[int, int] | None:
        """Bits and elements of a group of those tensors that have codes; ``None``: they differ, or none has."""
        found = {layout for name in names if (layout := self._layout(name)) is not None}
        return found.pop() if len(found) == 1 else None

    def _layout(self, name: str) -> tuple[int, int] | None:
        archive = self._archives.get(name)
        if archive is None:
            return None
        bits = _BITS.get(archive[archive[name].same_as or name].codec)
        if bits is None:
            return None
        layouts = stored_layouts(archive, name)
        if isinstance(layouts, str) or any(one.turned or one.exact for one in layouts):
            return None
        groups = {one.group for one in layouts}
        return (bits, groups.pop()) if len(groups) == 1 else None

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Codes int8 [out, in] and scales float32 [out, groups] of a matrix; ``None``: it is stored otherwise."""
        if (layout := self._layout(name)) is None:
            return None
        parts = stored_parts(self._archives[name], name)
        assert not isinstance(parts, str)
        return (
            np.concatenate([codes_of(one, layout[0]) for one in parts]),
            np.concatenate([one.scales for one in parts]),
        )
