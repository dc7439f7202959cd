"""Writing files that every room shares: a reader sees the old file or the whole new one, never a part.

A kill, a power cut or a full disk may come between any two instructions. So a file that exists is never written into:
the new content goes to a temporary file beside it, reaches the disk (``fsync``), and takes the name in one step
(``os.replace``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["fsync_folder", "replace_file"]


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable.

    Raises:
      OSError: it is not a folder, or cannot be read.
    """
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(
    path: str | os.PathLike[str],
    content: Callable[[BinaryIO], object] | bytes | str,
    *,
    durable: bool = False,
) -> None:
    """Give a file new content in one step; after any failure the old content stands.

    Args:
      path: the file; its folder exists. It gets the permissions of a new file (the umask's).
      content: bytes, text (written as UTF-8), or a function that writes to an open binary file.
      durable: also wait until the folder says so after a power cut.

    Raises:
      OSError: the folder is missing or not writable, the disk is full …; and whatever ``content`` raises.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            if callable(content):
                content(stream)
            else:
                stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(target.parent)
