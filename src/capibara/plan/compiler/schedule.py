"""What the compiler has decided before it makes machine code: memory, and the order of operations.

A compilation for a TPU takes a minute or more, nearly all of it for machine code. Within seconds the compiler has
fused, ordered and placed everything, and it writes that to a folder (``xla_dump_to``): the program as it will be, but
for the sizes of the parts into which operations are cut, and so without the cycles that they take.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from capibara.plan.compiler.buffers import read_heap
from capibara.plan.compiler.job import Memory

__all__ = ["Watch", "read_scheduled"]

_POLL = 0.05
# A program that does not fit is refused right after it is scheduled.
_REFUSAL_SECONDS = 10.0
_LONGEST = 1 << 30
_REPORT = "*after_optimizations-buffer-assignment.txt"
_TEXT = "*after_optimizations_after_buffer_assignment.txt"
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")


def read_scheduled(dump: Path, kinds: Mapping[str, int] | None = None) -> tuple[Memory, str] | None:
    """The memory of a program, and its text, as soon as both are written.

    Args:
      dump: the folder that the compiler writes to; of several programs, the largest is read.
      kinds: bytes of the arguments by kind, which the compiler does not know.

    Returns:
      Arguments (in the devices' memory, with padding), outputs that take new memory, and temporaries; the scheduled
      HLO. None if they are not written, or not yet as a whole.
    """
    texts = sorted(dump.glob(_TEXT), key=_size)
    reports = sorted(dump.glob(_REPORT), key=_size)
    # The text is written after all reports, whether or not the program fits.
    if not texts or not reports or not 0 < _size(texts[-1]) <= _LONGEST:
        return None
    text = texts[-1].read_text(encoding="utf-8", errors="replace")
    # The entry is the last computation of a program.
    if "\nENTRY " not in text or not text.rstrip().endswith("\n}") or (heap := read_heap(dump)) is None:
        return None
    arguments = outputs = host = 0
    with open(reports[-1], encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _ALLOCATION.match(line) if line.startswith("allocation ") else None
            if match is None:
                continue
            size, rest = int(match[1]), match[2]
            if " parameter " in rest and ", color " in rest:
                host += size  # what the host holds has a colour of its own
            elif " parameter " in rest:
                arguments += size
            elif "maybe-live-out" in rest and ", color " not in rest:
                outputs += size
    memory = Memory(
        arguments=arguments, outputs=outputs, aliased=0, temporaries=heap, host=host, kinds=dict(kinds or {})
    )
    return memory, text


class Watch:
    """Calls ``found`` in another thread with what :func:`read_scheduled` gives, unless the compiler is done before.

    Args:
      dump, kinds: as for :func:`read_scheduled`.
      limit: bytes that the program may take. Of one that takes more, the compiler's refusal is awaited for a while.
      found: may end the process.
    """

    def __init__(
        self, dump: Path, kinds: Mapping[str, int], limit: int, found: Callable[[Memory, str], None]
    ) -> None:
        self._dump, self._kinds, self._limit, self._found = dump, kinds, limit, found
        self._done = threading.Event()
        self._writing = threading.Lock()
        threading.Thread(target=self._wait, name="capibara-schedule", daemon=True).start()

    def finish(self) -> None:
        """Say that the compiler is done. ``found`` is not called afterwards; a call under way is waited for."""
        with self._writing:
            self._done.set()

    def _wait(self) -> None:
        before = None
        while not self._done.wait(_POLL):
            now = [(path.name, _size(path)) for path in sorted(self._dump.glob(_TEXT))]
            # Read when it has stopped growing.
            if now and now == before and (scheduled := read_scheduled(self._dump, self._kinds)) is not None:
                if scheduled[0].total > self._limit and self._done.wait(_REFUSAL_SECONDS):
                    return
                # Not beside the results of the whole compilation, which are written to the same files.
                with self._writing:
                    if not self._done.is_set():
                        self._found(*scheduled)
                return
            before = now


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
