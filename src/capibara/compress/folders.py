"""A folder whose archives together contain one model, like weights that are split into several files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from capibara.compress.container import Archive
from capibara.compress.container.index import HEADER, MAGIC, Chunk, Entry, dump, version_of
from capibara.compress.errors import CompressError

__all__ = ["find_archives", "join_archives", "names_of"]


def find_archives(folder: str | os.PathLike[str]) -> list[Path]:
    """The archives of a folder, and of those in it, by name.

    Raises:
      CompressError: there are none.
    """
    found = sorted(path for path in Path(folder).rglob("*.capi") if path.is_file())
    if not found:
        raise CompressError(
            f"path: {os.fspath(folder)} is a folder without .capi files, expected an archive or some"
        )
    return found


def names_of(archives: Iterable[Archive]) -> dict[str, Archive]:
    """The archive of each tensor.

    Raises:
      CompressError: two archives have a tensor of the same name.
    """
    out: dict[str, Archive] = {}
    for archive in archives:
        for name in archive.entries:
            if name in out:
                raise CompressError(
                    f"path: {name!r} is in {out[name].path} and in {archive.path}, expected the parts of one model"
                )
            out[name] = archive
    return out


def join_archives(paths: Iterable[Path], target: Path) -> None:
    """Write the encoded tensors of several archives into one, with their common metadata.

    Raises:
      CompressError: two archives have a tensor of the same name.
      ArchiveError: one is not an archive, or a damaged one.
    """
    entries: list[Entry] = []
    metadata: dict[str, str] = {}
    names: dict[str, Path] = {}
    with open(target, "wb") as out:
        out.write(HEADER.pack(MAGIC, 1, 0))
        for path in paths:
            with Archive(path) as archive, open(path, "rb") as file:
                own = {k: v for k, v in archive.metadata.items() if not k.startswith("capibara.")}
                metadata = {**own, **metadata}
                for entry in archive:
                    if entry.name in names:
                        raise CompressError(
                            f"path: {entry.name!r} is in {names[entry.name]} and in {path}, expected the parts of one "
                            "model"
                        )
                    names[entry.name] = path
                    chunks = []
                    for chunk in entry.chunks:
                        file.seek(chunk.offset)
                        chunks.append(Chunk(chunk.rows, out.tell(), chunk.length, chunk.crc32))
                        out.write(file.read(chunk.length))
                    entries.append(replace(entry, chunks=tuple(chunks)))
        out.write(dump(entries, metadata, out.tell()))
        out.seek(0)
        out.write(HEADER.pack(MAGIC, version_of(entries), 0))
