"""Writing files that every room shares: a reader sees the old file or the whole new one, never a part.

A kill, a power cut or a full disk may come between any two instructions. So a file that exists is never written into:
the new content goes to a temporary file beside it, reaches the disk (``fsync``), and takes the name in one step
(``os.replace``).

A temporary file is locked while its process lives: what a killed process left is recognised by that, and removed by the
next one that writes the same file. A process knows its own temporary files by name: a program that ends at a signal
removes them first (:func:`remove_temporaries`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "NewFile",
    "digest_of_files",
    "disown",
    "entries_below",
    "fsync_folder",
    "locked",
    "naming",
    "read_bounded",
    "remove_temporaries",
    "replace_file",
    "temporary",
]

_TRIES = 8

# Temporary files and folders of this process, from before they are made until after they are gone.
_temporaries: set[Path] = set()


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Answer for a temporary file or folder: it is removed when the context ends, or when the program does."""
    _temporaries.add(path)
    try:
        yield path
    finally:
        if path in _temporaries:
            _remove(path)
            _temporaries.discard(path)


def disown(path: Path) -> None:
    """What another process turned out to have made is not removed."""
    _temporaries.discard(path)


@atexit.register
def remove_temporaries() -> None:
    """Remove the temporary files and folders of this process. May be called from a signal's handler."""
    for path in list(_temporaries):
        _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder, or one that is gone with its own folder
        shutil.rmtree(path, ignore_errors=True)


# A child of a fork does not own what its parent is writing.
os.register_at_fork(after_in_child=_temporaries.clear)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the operating system name the file: that of a full disk does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def locked(descriptor: int) -> bool | None:
    """Lock an open file or folder for this process, without waiting.

    Returns:
      Whether that was possible; ``False``: another process has it. ``None``: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def digest_of_files(
    root: Path, places: Iterable[str] = ("",), *, suffixes: tuple[str, ...] = (".py",)
) -> str:
    """The SHA-256 of files, with their names below a folder, in hexadecimal.

    Args:
      root: the folder. places: files below it, and folders of which all files with such suffixes are meant.
    """
    digest = hashlib.sha256()
    for place in places:
        start = os.path.join(root, place)
        paths = [entry.path for entry in entries_below(start, suffixes)] if os.path.isdir(start) else [start]
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                digest.update(os.path.relpath(path, root).encode() + b"\0" + file.read())
    return digest.hexdigest()


def entries_below(root: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Iterator[os.DirEntry[str]]:
    """All files in a folder and those in it whose names end so, in order."""
    for entry in sorted(os.scandir(os.fspath(root)), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from entries_below(entry.path, suffixes)
        elif entry.name.endswith(suffixes):
            yield entry


class NewFile:
    """A file that takes its name when all of it is there; use it as a context.

    When the context ends without an exception the content is on the disk under its name; otherwise the old file stands.

    Args:
      path: the file; its folder exists. It gets the permissions of a new file (the umask's).
      clean: first remove what killed processes left that were writing this file.

    Attributes:
      stream: where to write, binary; also to seek in.

    Raises:
      OSError: the folder is missing or not writable, the disk is full …; each names the file.
    """

    stream: BinaryIO

    def __init__(self, path: str | os.PathLike[str], *, clean: bool = False) -> None:
        self.path = Path(path)
        self._beginning = f".{self.path.name[:40]}."
        self._clean = clean
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> NewFile:
        with contextlib.ExitStack() as stack:
            if self._clean:
                self._remove_abandoned()
            for _ in range(_TRIES):
                place = self.path.with_name(f"{self._beginning}{secrets.token_hex(6)}.tmp")
                self._temporary = stack.enter_context(temporary(place))
                try:
                    self.stream = stack.enter_context(open(self._temporary, "xb"))
                except OSError as error:
                    error.filename = os.fspath(self.path)
                    raise
                # Before it was locked another process may have taken it for one that was left behind.
                if (ours := locked(self.stream.fileno())) is None or (ours and self._temporary.exists()):
                    break
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._stack, naming(self.path):
            if kind is None:
                self.stream.flush()
                os.fsync(self.stream.fileno())
                os.replace(self._temporary, self.path)

    def _remove_abandoned(self) -> None:
        mine = re.compile(re.escape(self._beginning) + r"[0-9a-f]{12}\.tmp")
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path.parent)):
                if mine.fullmatch(entry.name) and Path(entry.path) not in _temporaries:
                    with contextlib.suppress(OSError), open(entry.path, "rb") as stream:
                        if locked(stream.fileno()):
                            os.unlink(entry.path)


def read_bounded(
    path: str | os.PathLike[str], most: int, *, check: Callable[[os.stat_result], object] | None = None
) -> bytes:
    """The content of a file from outside, or of the file that a link leads to.

    Args:
      path: the file. most: bytes that it may have.
      check: called before it is read, with what the system says of the file that was opened; it may raise.

    Raises:
      OSError: it cannot be read, is not a regular file (a pipe would be waited for, a device never ends), or is larger;
        ``strerror`` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
        if check is not None:
            check(os.fstat(descriptor))
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is too large, expected at most {most:,} bytes", os.fspath(path))
    return content


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
    clean: bool = False,
) -> None:
    """Give a file new content in one step; after any failure the old content stands.

    Args:
      path: the file; its folder exists. It gets the permissions of a new file (the umask's).
      content: bytes, text (written as UTF-8), or a function that writes to an open binary file.
      durable: also wait until the folder says so after a power cut.
      clean: first remove what killed processes left that were writing this file.

    Raises:
      OSError: the folder is missing or not writable, the disk is full …; and whatever ``content`` raises.
    """
    with NewFile(path, clean=clean) as new, naming(path):
        if callable(content):
            content(new.stream)
        else:
            new.stream.write(content.encode() if isinstance(content, str) else content)
    if durable:
        fsync_folder(Path(path).parent)
