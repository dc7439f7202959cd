"""Compile in several processes, with a cache."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from capibara.files import replace_file
from capibara.hardware.telemetry import available_memory
from capibara.plan.compiler.cache import ProgramCache
from capibara.plan.compiler.environment import Compiler, find_compiler
from capibara.plan.compiler.folders import work_folder
from capibara.plan.compiler.job import CompiledProgram, Job
from capibara.plan.compiler.process import kill, read_result, worker
from capibara.plan.errors import CompilationError, PlanError

__all__ = ["compile_program", "compile_programs", "default_workers"]

# What a compiled program takes on disk: a few hundred kilobytes, seldom more.
_BYTES_A_PROGRAM = 2 << 20
# A compilation takes up to about 2 GiB of this machine's memory (v4, scanned layers).
_BYTES_A_WORKER = 3 << 30


def default_workers() -> int:
    """Parallel compilations: the number of processors available to this process, limited by free memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        if (available := available_memory()) is not None:
            return max(1, min(cores, available // _BYTES_A_WORKER))
    return max(1, cores)


def compile_program(
    job: Job, *, cache: ProgramCache | None = None, timeout: float = 1800.0, schedule: bool = False
) -> CompiledProgram:
    """Compile one program, or find it in the cache.

    Args:
      schedule: stop when it is scheduled, after seconds: its memory is the compiler's, and its text is without cycles
        (unless the compiler gives no such text, or the cache has the whole).

    Raises:
      CompilerMissingError: the TPU compiler is not installed.
      CompilationError: the process died or took longer than ``timeout`` seconds. A program that the compiler refuses is
        a result, not an error.
    """
    with contextlib.closing(_results([job], cache, None, timeout, None, schedule)) as results:
        _, found = next(results)
    if isinstance(found, CompilationError):
        raise found
    return found


def compile_programs(
    jobs: Iterable[Job],
    *,
    cache: ProgramCache | None = None,
    workers: int | None = None,
    timeout: float = 1800.0,
    started: Callable[[int], None] | None = None,
    schedule: bool = False,
) -> Generator[tuple[int, CompiledProgram], None, None]:
    """Compile programs in parallel; yields ``(index of the job, result)`` as each is done.

    Closing the iterator, or an interrupt, stops the processes. A process that dies or takes too long is a result with
    the status ``"error"``, so that the others continue.

    Args:
      workers: how many at a time; by default :func:`default_workers`.
      started: called with a job's index when its process starts (not for cached results).
      schedule: as for :func:`compile_program`.

    Raises:
      CompilerMissingError: the TPU compiler is not installed.
      PlanError: the number of workers is invalid, or the cache's folder is not writable.
    """
    with contextlib.closing(_results(jobs, cache, workers, timeout, started, schedule)) as results:
        for number, found in results:
            if isinstance(found, CompilationError):
                found = CompiledProgram(status="error", message=str(found))
            yield number, found


def _results(
    jobs: Iterable[Job],
    cache: ProgramCache | None,
    workers: int | None,
    timeout: float,
    started: Callable[[int], None] | None,
    schedule: bool,
) -> Generator[tuple[int, CompiledProgram | CompilationError], None, None]:
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise PlanError(f"workers={workers!r} must be an integer of at least 1")
    compiler = find_compiler()
    cache = ProgramCache() if cache is None else cache
    waiting: list[tuple[int, Job, str]] = []
    for number, job in enumerate(jobs):
        key = cache.key(job, compiler)
        found = cache.get(key)
        if found is None and schedule:
            found = cache.get(cache.key(job, compiler, schedule=True))
        if found is not None:
            yield number, found
        else:
            waiting.append((number, job, key))
    if not waiting:
        return
    _check_writable(cache.folder)
    running = _Running()
    pool = ThreadPoolExecutor(min(workers or default_workers(), len(waiting)))

    def one(number: int, job: Job, key: str) -> CompiledProgram | CompilationError:
        if started is not None and not running.stopped:
            started(number)
        try:
            return _run(job, key, compiler, cache, running, timeout, schedule)
        except CompilationError as error:
            return error

    try:
        futures: dict[Future[CompiledProgram | CompilationError], int] = {
            pool.submit(one, number, job, key): number for number, job, key in waiting
        }
        while futures:
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in done:
                yield futures.pop(future), future.result()
    finally:
        running.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _check_writable(folder: Path) -> None:
    """Before half a minute is spent on what cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            # A disk may be full, which an empty file does not show.
            probe.write(bytes(_BYTES_A_PROGRAM))
            probe.flush()
    except OSError as error:
        raise PlanError(
            f"compiled programs cannot be kept in {folder}: {error.strerror}. Name another folder (cache=, --cache)"
        ) from error


class _Running:
    """The processes of one call, so that all of them can be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.add(process)
        if self.stopped:
            kill(process)

    def remove(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.discard(process)

    def stop(self) -> None:
        self.stopped = True
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            kill(process)


def _run(
    job: Job,
    key: str,
    compiler: Compiler,
    cache: ProgramCache,
    running: _Running,
    timeout: float,
    schedule: bool,
) -> CompiledProgram:
    if running.stopped:
        raise CompilationError("stopped")
    with work_folder() as folder:
        with worker(job, folder, compiler, schedule=schedule) as process:
            running.add(process)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise CompilationError(
                    f"compiling {job.builder} for {job.slice} took longer than {timeout:.0f} s and was stopped"
                ) from None
            finally:
                running.remove(process)
        if running.stopped:
            raise CompilationError("stopped")
        result = read_result(job, folder, code)
        if result.status == "error":
            # The reason may lie outside of what the key knows (a missing file …): not kept.
            return result
        if not result.complete:
            key = cache.key(job, compiler, schedule=True)
        _, text = cache.paths(key)
        try:
            if result.status == "ok":
                replace_file(text, (folder / "program.hlo.gz").read_bytes())
            cache.put(key, result)
        except OSError as error:
            raise PlanError(
                f"a compiled program cannot be kept in {cache.folder}: {error.strerror}. Name another folder "
                "(cache=, --cache)"
            ) from error
    return CompiledProgram.from_json(result.to_json(), text if result.status == "ok" else None)
