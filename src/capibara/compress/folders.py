"""A folder whose archives together contain one model, like weights that are split into several files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from capibara.compress.container import Archive
from capibara.compress.container.index import HEADER, MAGIC, SUFFIX, Chunk, Entry, dump, version_of
from capibara.compress.errors import CompressError
from capibara.compress.output_folder import UNFINISHED

__all__ = ["files_in", "find_archives", "join_archives", "names_of"]

_REMEDIES = {
    SUFFIX: "a .capi file, or a folder that 'capibara compress FOLDER OUT' wrote",
    ".safetensors": "a .safetensors file, or the folder that a model's lie in",
}


def files_in(folder: Path, suffix: str) -> list[Path]:
    """All files of a folder and its subfolders; at least one has this suffix.

    Raises:
      CompressError: there are none, or there is a link that leads to no file.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        if any(part.endswith(UNFINISHED) for part in path.relative_to(folder).parts):
            continue  # of a run that was stopped
        if path.is_symlink() and not path.is_file():
            raise CompressError(
                f"{path}: a link to a folder, or to nothing. Remedy: copy what it should lead to."
            )
        if path.is_file():
            found.append(path)
    if not any(path.name.endswith(suffix) for path in found):
        raise CompressError(f"{folder}: no *{suffix} file in this folder. Remedy: {_REMEDIES[suffix]}.")
    return found


def find_archives(path: str | os.PathLike[str]) -> list[Path]:
    """The archive itself, or the archives of a folder, by name.

    Raises:
      CompressError: a folder without archives, or with a broken link.
    """
    path = Path(path)
    return [one for one in files_in(path, SUFFIX) if one.name.endswith(SUFFIX)] if path.is_dir() else [path]


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
