"""A disk cache of XLA programs across runs of ``capibara train``.

Compiling a training step takes longer than everything else before the first step, and a run that is resumed
compiles the same step again. JAX can cache compiled programs in a folder; :func:`keep_compiled` sets it to one of the
user's own while a command runs::

    ~/.cache/capibara/xla/<this machine>/      (below $XDG_CACHE_HOME, if that is set)

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
import importlib
import os
import platform
import re
import stat
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "keep_compiled"]

MAX_BYTES = 1 << 30
# Shorter compilations are not worth a file.
_MIN_SECONDS = 0.2
_ENTRY = "-cache"
_SESSION = "session-"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


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
    return base / "capibara" / "xla" / _machine()


@contextlib.contextmanager
def keep_compiled(note: Callable[[str], None]) -> Iterator[None]:
    """Let JAX cache compiled programs in this context; its settings are restored afterwards.

    Problems with the folder do not affect the caller: programs are then compiled again.

    Args:
      note: callback that receives the reason, in one line, if programs are not cached.
    """
    import jax

    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:  # pyright: ignore
        yield
        return
    session, reason = None, None
    try:
        session = _Session(cache_folder())
    except (_Unusable, OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
    if session is None:
        note(f"compiled programs are not kept for the next start: {reason}")
        yield
        return
    settings: dict[str, Any] = {"jax_compilation_cache_dir": str(session.folder)}
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        settings["jax_persistent_cache_min_compile_time_secs"] = _MIN_SECONDS
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        with warnings.catch_warnings():
            # A program that can not be read is compiled, one that can not be written is not kept: no news.
            warnings.filterwarnings(
                "ignore", r"Error (reading|writing) persistent compilation cache", UserWarning
            )
            _configure(settings)
            yield
    finally:
        _configure(before)
        session.close()


def _configure(settings: dict[str, Any]) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX looks at these settings once, at the first compilation.
    compilation_cache.reset_cache()


def _machine() -> str:
    """Names this kind of processor: its architecture, what it can do, and how many of it programs may use."""
    described = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        found = re.findall(r"^(?:flags|Features|model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
        described += sorted(set(found))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    digest = hashlib.sha256("\n".join([*described, str(cpus)]).encode()).hexdigest()
    return f"{platform.machine() or 'machine'}-{digest[:12]}"


class _Session:
    """One process's use of a folder, from making it ready to looking at what was written.

    Raises:
      _Unusable, OSError: the folder can not be made, written to, or trusted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for each in (folder.parent, folder):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.mkdir(mode=0o700, exist_ok=True)  # whatever the umask leaves to a group
            status = each.stat()
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
                raise _Unusable(f"others than you may write to {str(each)!r}, and what is in it is run")
        for path in folder.glob(f"{_SESSION}*"):
            with contextlib.suppress(OSError):
                _end(folder, path)
        _shrink(folder)
        self._descriptor, name = tempfile.mkstemp(prefix=_SESSION, dir=folder)
        self._path = Path(name)
        with contextlib.suppress(OSError):  # where there are no locks, the next process looks earlier
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Look at what was written, and go."""
        with contextlib.suppress(OSError):
            _remove_broken(self.folder, since=os.fstat(self._descriptor).st_mtime)
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _end(folder: Path, path: Path) -> None:
    """If the process of a session has ended, verify its files."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it lives
        _remove_broken(folder, since=os.fstat(descriptor).st_mtime)
        path.unlink()
    finally:
        os.close(descriptor)


def _remove_broken(folder: Path, *, since: float) -> None:
    """Remove programs written after a time that are not whole."""
    for path in folder.glob(f"*{_ENTRY}"):
        with contextlib.suppress(OSError):
            # A second less: file systems round times.
            if path.stat().st_mtime >= since - 1 and not _whole(path.read_bytes()):
                path.unlink()


def _whole(data: bytes) -> bool:
    """Whether compressed data is complete: zlib's, or Zstandard's where JAX can write that."""
    if not data.startswith(_ZSTANDARD):
        inflate = zlib.decompressobj()
        try:
            inflate.decompress(data)
        except zlib.error:
            return False
        return inflate.eof
    try:
        zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")
    except ImportError:
        return True  # from a Python that has it; its own sessions look at it
    try:
        zstd.decompress(data)
    except (zstd.ZstdError, EOFError):
        return False
    return True


def _shrink(folder: Path) -> None:
    """Remove the programs that were used longest ago, until the rest has at most ``MAX_BYTES``."""
    found = []
    for path in folder.glob(f"*{_ENTRY}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
