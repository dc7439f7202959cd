"""The folder of a run: one writer at a time, and files that are either the old ones or the new ones.

Files are written as :mod:`capibara.files` does it. The lock is ``flock`` on a file of its own: the kernel drops it when
its holder dies, so a lock left behind by a killed run stops nobody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from capibara.files import replace_file
from capibara.train.errors import RunLockedError, RunWriteError

__all__ = ["atomic_write", "lock_run", "prepare_folder", "remove_leftovers"]


def prepare_folder(folder: Path) -> Path:
    """Create ``folder`` and its parents.

    Raises:
      RunWriteError: something else has that name, or the place is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunWriteError(
            f"could not create the folder {str(folder)!r}: {error.strerror}. Choose another "
            "folder (in training checkpoint.directory, --directory)."
        ) from error
    return folder


def atomic_write(path: Path, write: Callable[[BinaryIO], object] | bytes) -> None:
    """Give ``path`` new content in one step; after any failure the old content stands.

    Args:
      path: the file; its folder exists.
      write: the content, or a function that writes it to an open binary file.

    Raises:
      RunWriteError: the disk is full, the folder is not writable …
    """
    try:
        replace_file(path, write, durable=True)
    except OSError as error:
        raise RunWriteError(
            f"could not write {str(path)!r}: {error.strerror or error}. What it held before is unchanged. "
            "Free some space or choose another folder (in training checkpoint.directory, --directory)."
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes that a kill interrupted. Only the holder of the lock may call this."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the run folder's lock (the file ``lock``) for as long as the context lasts.

    Raises:
      RunLockedError: another process holds it; the text names its process number.
    """
    path = prepare_folder(folder) / "lock"
    try:
        stream = open(path, "a+")  # noqa: SIM115 - closed below, together with the lock it carries
    except OSError as error:
        raise RunWriteError(
            f"could not open {str(path)!r}: {error.strerror}. Choose another checkpoint.directory "
            "(--directory)."
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read(32).strip()
            raise RunLockedError(
                f"another training run{f' (process {holder})' if holder.isdigit() else ''} is writing to "
                f"{str(folder)!r}. Wait for it, stop it, or choose another checkpoint.directory "
                "(--directory)."
            ) from None
        try:
            # Only for the message above; a full disk must not keep anyone from resuming.
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
        except OSError:
            pass
        yield
