"""A folder of files that appears once it is complete.

The files are written to a hidden folder, next to the target, or inside it if it exists, and moved to their places
together: after an error or a signal nothing is left. With ``resume`` the finished files stay in the hidden folder, with
a record of their sources, and the next run with ``resume`` uses them. Leftovers of a killed process are removed by the
next run without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

from capibara.compress.errors import CompressError
from capibara.files import disown, locked, naming, replace_file, temporary

__all__ = ["UNFINISHED", "OutputFolder"]

UNFINISHED = ".capibara-unfinished"  # what the names of hidden folders end with
_NOTES = "capibara-finished.json"
_MOST_NOTES = 64 << 20
_MOST_NAME = 40  # characters: a name has at most 255 bytes


class OutputFolder:
    """The files of a folder; use it as a context manager.

    Args:
      root: the folder to write; ``None``: every file is moved to its place as soon as it is complete.
      made_from: plain values that determine the content of all files: a record with different ones is not used.
      resume: keep finished files if the context ends with an error, and use those that an earlier run kept.

    Raises:
      CompressError: another process is writing this folder.
      OSError: it cannot be created; the message names the path.
    """

    def __init__(self, root: Path | None, made_from: Any, *, resume: bool = False) -> None:
        self._root, self._resume = root, resume
        self._made_from = json.loads(json.dumps(made_from))
        self._stack = contextlib.ExitStack()
        self._finished: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._root is None:
            return self
        self._hidden = _hidden(self._root.absolute())
        self._hidden.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if self._hidden.is_symlink():  # what it leads to is not ours to empty
                raise CompressError(f"{self._hidden}: is a link. Remedy: remove it.")
            # One that is there may be another process's: it is ours to remove when the lock is.
            there = self._hidden.exists()
            if not there and not self._resume:
                stack.enter_context(temporary(self._hidden))
            try:
                self._hidden.mkdir(exist_ok=there or self._resume)
            except FileExistsError:
                disown(self._hidden)
                raise
            descriptor = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            if (ours := locked(descriptor)) is False:
                raise CompressError(
                    f"{self._root}: another process is writing this folder. Remedy: wait until it has ended."
                )
            if ours is None and there and not self._resume:
                raise CompressError(
                    f"{self._hidden}: another process may be writing it, this file system has no locks that would "
                    "tell. Remedy: remove it if no process does."
                )
            if there and not self._resume:
                stack.enter_context(temporary(self._hidden))
            self._take_up()
            self._stack = stack.pop_all()
        return self

    def _take_up(self) -> None:
        """Begin with what an earlier run finished, if that is wanted and fits; otherwise with nothing."""
        notes: Any = None
        if self._resume:
            with (
                contextlib.suppress(OSError, ValueError, RecursionError),
                open(self._hidden / _NOTES, "rb") as stream,
            ):
                notes = json.loads(stream.read(_MOST_NOTES))
        if isinstance(notes, dict) and notes.get("made_from") == self._made_from:
            found = notes.get("finished")
            for name, size in found.items() if isinstance(found, dict) else ():
                with contextlib.suppress(OSError, ValueError):
                    if (self._hidden / name).stat().st_size == size:
                        self._finished[name] = size
        for entry in list(os.scandir(self._hidden)):
            if self._finished:
                break
            path = Path(entry.path)
            shutil.rmtree(path) if entry.is_dir(follow_symlinks=False) else path.unlink()

    def place(self, target: Path) -> tuple[Path, bool]:
        """The path to write a file to, and whether an earlier run has finished it."""
        if self._root is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            return target, False
        name = target.relative_to(self._root)
        place = self._hidden / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place, name.as_posix() in self._finished

    def finish(self, target: Path) -> None:
        """Mark a file of the folder as complete."""
        if self._root is None or not self._resume:
            return
        name = target.relative_to(self._root)
        self._finished[name.as_posix()] = (self._hidden / name).stat().st_size
        notes = {"made_from": self._made_from, "finished": self._finished}
        replace_file(self._hidden / _NOTES, json.dumps(notes), clean=True)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._stack:
            if kind is None and self._root is not None:
                self._publish(self._root)
                with contextlib.suppress(OSError):
                    shutil.rmtree(self._hidden)

    def _publish(self, root: Path) -> None:
        (self._hidden / _NOTES).unlink(missing_ok=True)
        with naming(root):
            if not root.exists():
                os.rename(self._hidden, root)
                return
            for path in sorted(self._hidden.rglob("*")):
                where = root / path.relative_to(self._hidden)
                if path.is_dir():
                    where.mkdir(exist_ok=True)
                else:
                    os.replace(path, where)


def _hidden(root: Path) -> Path:
    """Where the files of a folder are made."""
    if root.is_dir():  # on the file system that they are for, where the user may write
        return root / UNFINISHED
    name = root.name
    if len(name) > _MOST_NAME:
        name = f"{name[:_MOST_NAME]}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:12]}"
    return root.with_name(f".{name}{UNFINISHED}")
