"""The files of a checkpoint: which there are, what they hold, and their digests."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["digest_of", "first_line", "read_json", "relative_files", "sync_and_digest"]

_MAX_JSON = 64 << 20
_MAX_FILES = 1_000_000


def relative_files(folder: Path) -> Iterator[str]:
    """Yield every file below ``folder``, sorted; refuse what is neither a regular file nor a folder."""
    found = []
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{str(path.relative_to(folder))!r} is not a regular file")
            if stat.S_ISREG(mode):
                found.append(path.relative_to(folder).as_posix())
        if len(found) > _MAX_FILES:
            raise ValueError(f"it has more than {_MAX_FILES:,} files")
    yield from sorted(found)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_and_digest(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file, which is on the disk then."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size, digest


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a bounded size; a ValueError says what else it is."""
    with open(path, "rb") as stream:
        content = stream.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise ValueError(f"{path.name} is larger than {_MAX_JSON:,} bytes")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return value


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:400].rstrip(".")
