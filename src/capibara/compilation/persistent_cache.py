"""A disk cache of XLA programs, across starts of a program.

Compiling a training step takes longer than everything else before the first step, and a run that is resumed
compiles the same step again. JAX can cache compiled programs in a folder; :func:`keep_compiled` sets it to one of the
user's own while a block runs::

    ~/.cache/capibara/xla/<this machine>/      (below $XDG_CACHE_HOME, if that is set)

The folder has a size: when a program is to be added and when a process begins or ends, the programs that were used
longest ago are removed until the rest fits. JAX has such a limit of its own, which needs another package
(``filelock``) and fails once a killed process has left a program without its time.

An existing setting (``JAX_COMPILATION_CACHE_DIR``) is kept, and ``JAX_ENABLE_COMPILATION_CACHE=false`` disables the
cache. The folder contains machine code that will be run, so it must belong to the user alone; and since the code is
for one processor, each type of machine has its own folder.

JAX writes a program directly to its final name and never overwrites one. A killed process or a full disk leaves a
partial file, which would never be replaced. So every process holds a lock (``session-…``) and verifies its files at
the end; those of a process that was killed are verified by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capibara.compilation.cache_entries import is_whole
from capibara.jax_versions import watch_program_keys

__all__ = [
    "CacheSession",
    "cache_folder",
    "configure",
    "keep_compiled",
    "machine_name",
    "private_cache",
    "shared_session",
]

MAX_BYTES = 1 << 30
# Shorter compilations are not worth a file.
_MIN_SECONDS = 0.2
_ENTRY = "-cache"
_OWN = "-untraced"  # not as JAX names its own: it would look for files of times beside them
_SESSION = "session-"


class _Unusable(Exception):
    """The folder cannot be used; the message says why."""


def cache_folder() -> Path:
    """The default folder for compiled programs of this machine.

    Raises:
      RuntimeError: there is no home directory.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "capibara" / "xla" / machine_name()


@contextlib.contextmanager
def keep_compiled(
    note: Callable[[str], None],
    *,
    folder: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    min_seconds: float | None = None,
) -> Iterator[Path | None]:
    """Let JAX cache compiled programs in this context; its settings are restored afterwards.

    Problems with the folder do not affect the caller: programs are then compiled again. Contexts in several threads
    share one folder, that of the first; the settings are restored when the last of them ends.

    Args:
      note: callback that receives the reason, in one line, if programs are not cached.
      folder: default: :func:`cache_folder`.
      max_bytes: the size of the folder; default 1 GiB.
      min_seconds: programs that compile in less time are not kept; default 0.2.

    Yields:
      The folder in use, that of JAX's own setting if there is one; None: programs are not cached.
    """
    import jax

    reason: object = None
    theirs: Path | None = None
    with _lock:
        shared = _Shared.current
        if shared is None:
            if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:  # pyright: ignore
                found = jax.config.jax_compilation_cache_dir  # pyright: ignore
                enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore
                theirs = Path(found) if found and enabled else None
            else:
                try:
                    shared = _Shared(
                        Path(folder) if folder else cache_folder(),
                        max_bytes or MAX_BYTES,
                        _MIN_SECONDS if min_seconds is None else min_seconds,
                    )
                except (_Unusable, OSError, RuntimeError) as error:
                    reason = getattr(error, "strerror", None) or error
        if shared is not None:
            shared.users += 1
    if shared is None:
        if reason is not None:
            note(f"compiled programs are not kept for the next start: {reason}")
        yield theirs
        return
    try:
        with contextlib.ExitStack() as quiet:
            # Filters belong to the process: a context in another thread would put back those of another time.
            if threading.current_thread() is threading.main_thread():
                quiet.enter_context(warnings.catch_warnings())
                # A program that can not be read is compiled, one that can not be written is not kept: no news.
                warnings.filterwarnings(
                    "ignore", r"Error (reading|writing) persistent compilation cache", UserWarning
                )
            yield shared.session.folder
    finally:
        with _lock:
            shared.users -= 1
            if shared.users == 0:
                shared.close()


def shared_session() -> CacheSession | None:
    """The folder that :func:`keep_compiled` uses now.

    ``None``: there is none, or it is one that JAX was given, which others may be able to write to.
    """
    with _lock:
        return None if _Shared.current is None else _Shared.current.session


_lock = threading.RLock()


class _Shared:
    """The folder that JAX was told, until all who use it are done."""

    current: _Shared | None = None

    def __init__(self, folder: Path, max_bytes: int, min_seconds: float) -> None:
        import jax

        self.session = CacheSession(folder, max_bytes)
        settings: dict[str, Any] = {"jax_compilation_cache_dir": str(folder)}
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            settings["jax_persistent_cache_min_compile_time_secs"] = min_seconds
        self._before = {name: getattr(jax.config, name) for name in settings}
        self._watch = contextlib.ExitStack()
        self._watch.enter_context(watch_program_keys(self.session.looked_up, every_thread=True))
        self.users = 0
        _Shared.current = self
        configure(settings)

    def close(self) -> None:
        _Shared.current = None
        configure(self._before)
        self._watch.close()
        self.session.close()


@contextlib.contextmanager
def private_cache(folder: Path) -> Iterator[None]:
    """Let JAX write every program that is compiled in this block to a folder, and raise if it cannot read one."""
    import jax

    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_max_size": -1,
        "jax_raise_persistent_cache_errors": True,
    }
    with _lock:
        before = {name: getattr(jax.config, name) for name in settings}
        configure(settings)
        try:
            yield
        finally:
            configure(before)


def configure(settings: dict[str, Any]) -> None:
    """Change settings of JAX's cache, and let it look at them again."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX reads these settings once, at the first compilation.
    compilation_cache.reset_cache()


def machine_name() -> str:
    """Names this kind of processor: its architecture, what it can do, and how many of it programs may use."""
    described = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        found = re.findall(r"^(?:flags|Features|model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
        described += sorted(set(found))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    digest = hashlib.sha256("\n".join([*described, str(cpus)]).encode()).hexdigest()
    return f"{platform.machine() or 'machine'}-{digest[:12]}"


class CacheSession:
    """One process's use of a folder, from making it ready to looking at what was written.

    Raises:
      _Unusable, OSError: the folder can not be made, written to, or trusted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        for each in (folder.parent, folder):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.mkdir(mode=0o700, exist_ok=True)  # whatever the umask leaves to a group
            if not _is_private(each.stat(), itself=each == folder):
                raise _Unusable(f"others than you may write to {str(each)!r}, and what is in it is run")
        for path in folder.glob(f"{_SESSION}*"):
            with contextlib.suppress(OSError):
                _end(folder, path)
        _shrink(folder, max_bytes)
        self._descriptor, name = tempfile.mkstemp(prefix=_SESSION, dir=folder)
        self._path = Path(name)
        with contextlib.suppress(OSError):  # where there are no locks, the next process looks earlier
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def path(self, key: str) -> Path:
        """The file of a program that JAX keeps."""
        return self.folder / f"{key}{_ENTRY}"

    def own_path(self, key: str) -> Path:
        """The file of a program that :mod:`capibara.compilation.untraced` keeps."""
        return self.folder / f"{key}{_OWN}"

    def looked_up(self, key: str, found: bool) -> None:
        """JAX looked for a program: see :meth:`used`."""
        self.used(self.path(key), found)

    def used(self, path: Path, found: bool) -> None:
        """Somebody looked for a program. Its last use is noted: file systems need not note when a file is read."""
        with contextlib.suppress(OSError):
            if found:
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            else:
                _shrink(self.folder, self.max_bytes)

    def close(self) -> None:
        """Look at what was written, and go."""
        _shrink(self.folder, self.max_bytes)
        with contextlib.suppress(OSError):
            _remove_broken(self.folder, since=os.fstat(self._descriptor).st_mtime)
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_private(status: os.stat_result, *, itself: bool) -> bool:
    """Whether nobody but the user (or root) can change what is in a folder; of its parent, put another in its place."""
    if status.st_uid != os.geteuid() and (itself or status.st_uid != 0):
        return False
    mode = stat.S_IMODE(status.st_mode)
    # In a sticky folder, such as /tmp, only the owner of a file may remove or rename it.
    return not mode & 0o022 or (not itself and bool(mode & stat.S_ISVTX))


def _end(folder: Path, path: Path) -> None:
    """If the process of a session has ended, verify its files."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it lives
        _remove_broken(folder, since=os.fstat(descriptor).st_mtime)
        path.unlink()
    finally:
        os.close(descriptor)


def _programs(folder: Path) -> list[Path]:
    return [path for ending in (_ENTRY, _OWN) for path in folder.glob(f"*{ending}")]


def _remove_broken(folder: Path, *, since: float) -> None:
    """Remove programs written after a time that are not whole."""
    for path in _programs(folder):
        with contextlib.suppress(OSError):
            # A second less: file systems round times.
            if path.stat().st_mtime >= since - 1 and not is_whole(path.read_bytes()):
                path.unlink()


def _shrink(folder: Path, max_bytes: int) -> None:
    """Remove the programs that were used longest ago, until the rest has at most ``max_bytes``."""
    found = []
    for path in _programs(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= max_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
