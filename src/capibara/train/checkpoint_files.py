"""The files of a checkpoint: which there are, what they hold, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "difference",
    "digest_of",
    "first_line",
    "read_json",
    "relative_files",
    "storage_reason",
    "sync_and_digest",
]

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


def difference(saved: Any, target: Any) -> str | None:
    """Name the first array in which two trees differ, by presence, shape or dtype."""
    import jax

    def described(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        # Names only: what is a named tuple in the target is a dict in the file.
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in leaves
        }

    has, wants = described(saved), described(target)
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            return f"{name} is {has.get(name, 'missing')} there, expected {wants.get(name, 'nothing')}"
    return None


def storage_reason(error: BaseException) -> str | None:
    """Say which failure of the disk lies behind ``error``, or None if it is another kind of error."""
    from jax.errors import JaxRuntimeError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, JaxRuntimeError):  # what is exhausted is a device's memory
            return None
        if isinstance(seen, OSError):
            return seen.strerror or first_line(seen)
        # TensorStore reports the operating system's error inside the text of a ValueError.
        if match := re.search(r"os_error_code='(\d+)'", str(seen)):
            return os.strerror(int(match[1]))
        if "RESOURCE_EXHAUSTED" in str(seen) or os.strerror(errno.ENOSPC) in str(seen):
            return os.strerror(errno.ENOSPC)
        seen = seen.__cause__ or seen.__context__
    return None
