"""The standard input of a program that is run several times: each run finds what the first one did."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from types import TracebackType
from typing import IO, Self

from capibara.errors import ConfigError

__all__ = ["RepeatedInput"]

_BLOCK = 1 << 16


class RepeatedInput:
    """Gives the standard input of this process to several others, one after the other.

    A file is read from the same place each time. What comes through a pipe is kept in a temporary file while the first
    run reads it: no more of it is taken than that run has room for. A terminal is asked each time.

    Args:
      source: the file descriptor of the input.
    """

    def __init__(self, source: int = 0) -> None:
        self._source = source
        self._start: int | None = None
        self._kept: IO[bytes] | None = None
        self._reads: int | None = None  # the end of the first run's pipe
        self._keeps = True
        self._failed: OSError | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            mode = os.fstat(self._source).st_mode
        except OSError:  # closed
            return self
        if stat.S_ISREG(mode):
            self._start = os.lseek(self._source, 0, os.SEEK_CUR)
        elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            self._kept = tempfile.TemporaryFile(buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_first()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def next(self) -> int | None:
        """What ``subprocess.Popen`` takes as ``stdin`` of the next run, once the one before has ended.

        Raises:
          ConfigError: what the first run read could not be kept.
        """
        if self._start is not None:
            os.lseek(self._source, self._start, os.SEEK_SET)
            return self._source
        if self._kept is None:
            return None
        if self._keeps and self._reads is None:
            self._reads, writes = os.pipe()
            threading.Thread(target=self._pass_on, args=(self._kept, writes), daemon=True).start()
            return self._reads
        self._end_first()
        if self._failed is not None:
            raise ConfigError(
                f"the standard input cannot be kept for another run: {self._failed.strerror}. Set TMPDIR to a folder "
                "on another disk, or read it from a file (< FILE)"
            )
        os.lseek(self._kept.fileno(), 0, os.SEEK_SET)
        return self._kept.fileno()

    def _end_first(self) -> None:
        with self._lock:
            self._keeps = False
        if self._reads is not None:
            os.close(self._reads)
            self._reads = None

    def _pass_on(self, kept: IO[bytes], writes: int) -> None:
        """Copy from the input to the first run until either ends."""
        try:
            while block := os.read(self._source, _BLOCK):
                with self._lock:
                    if not self._keeps:
                        return
                    self._keep(kept, block)
                while block:
                    block = block[os.write(writes, block) :]
        except OSError:  # the run has ended, or closed its input
            return
        finally:
            os.close(writes)

    def _keep(self, kept: IO[bytes], block: bytes) -> None:
        """All of a block, which a full disk takes in part; the first run reads on in any case."""
        try:
            while block and self._failed is None:
                block = block[kept.write(block) :]
        except OSError as error:
            self._failed = error
