"""The compiler's own memory figure of a step, without waiting for its machine code.

A compilation for a TPU takes a minute or more. Buffers are assigned within seconds; the rest is machine code. The
compiler writes the assignment to a folder as soon as it is known, and refuses programs that do not fit at the same
point, so the process can be stopped there. Only the program's text, and therefore the predicted time, is missing.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from capibara.plan.compiler import Job, Memory, find_compiler
from capibara.plan.compiler.buffers import read_heap
from capibara.plan.compiler.folders import work_folder
from capibara.plan.compiler.process import read_result, worker
from capibara.plan.errors import CompilationError, DoesNotFitError

__all__ = ["measure_memory"]

_POLL = 0.25
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")


def measure_memory(job: Job, *, timeout: float = 1800.0) -> Memory:
    """The memory that the compiler assigns to a program, without waiting for its machine code.

    Results are not cached; :func:`capibara.plan.compiler.compile_program` caches the same figures.

    Args:
      timeout: seconds after which the process is stopped.

    Returns:
      Arguments (in the devices' memory, with padding), outputs that take new memory, and temporaries; ``kinds`` is
      empty, since only the builder knows the kinds of arguments.

    Raises:
      DoesNotFitError: the compiler refuses it because of its memory; the message is the compiler's.
      CompilationError: it refuses it for another reason, or takes too long.
      CompilerMissingError: the TPU compiler is not installed.
    """
    compiler = find_compiler()
    with work_folder() as folder, worker(job, folder, compiler) as process:
        return _watch(process, folder, job, time.monotonic() + timeout)


def _watch(process: subprocess.Popen[bytes], folder: Path, job: Job, until: float) -> Memory:
    while process.poll() is None:
        # Written after all reports of the buffers, whether or not the program fits.
        if any((folder / "dump").glob("*after_optimizations_after_buffer_assignment.txt")):
            memory = _read(folder / "dump")
            if memory is not None:
                return memory
        if time.monotonic() > until:
            raise CompilationError(f"{job.builder} for {job.slice}: no memory figure in time; it was stopped")
        time.sleep(_POLL)
    result = read_result(job, folder, process.returncode)
    if result.status == "oom":
        raise DoesNotFitError(f"{job.slice}: {result.message}")
    if result.memory is None:
        raise CompilationError(result.message)
    return result.memory


def _read(dump: Path) -> Memory | None:
    """Arguments and outputs from the largest program's report; what the host holds has a colour of its own."""
    reports = sorted(
        dump.glob("*after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size
    )
    heap = read_heap(dump)
    if not reports or heap is None:
        return None
    arguments = outputs = host = 0
    with open(reports[-1], encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _ALLOCATION.match(line) if line.startswith("allocation ") else None
            if match is None:
                continue
            size, rest = int(match[1]), match[2]
            if " parameter " in rest and ", color " in rest:
                host += size
            elif " parameter " in rest:
                arguments += size
            elif "maybe-live-out" in rest and ", color " not in rest:
                outputs += size
    return Memory(arguments=arguments, outputs=outputs, aliased=0, temporaries=heap, host=host)
