"""The process that compiles: ``python -m capibara.plan.compiler.worker FOLDER [--until-stdin-ends] [--schedule]``.

``FOLDER/job.json`` is the job; ``FOLDER/result.json`` and ``FOLDER/program.hlo.gz`` are the results. The exit code is
0 if there is a result, including that of a program that does not fit. With ``--until-stdin-ends``, neither it nor the
folder outlives the process that started it with a pipe, however that process ends. With ``--schedule`` it ends when the
program is scheduled, and makes no machine code (:mod:`capibara.plan.compiler.schedule`).
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.metadata
import json
import linecache
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capibara.files import replace_file
from capibara.plan.compiler.buffers import buffers_of_message, read_buffers, read_heap
from capibara.plan.compiler.folders import remove_folder
from capibara.plan.compiler.job import CompiledProgram, Job, Memory
from capibara.plan.compiler.limits import LIMIT
from capibara.plan.compiler.schedule import Watch
from capibara.plan.errors import PlanError
from capibara.plan.program import Frames
from capibara.plan.program.digest import program_digest
from capibara.sharding import options_for

__all__ = ["main"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LONGEST = 4000
_MOST_LINES, _LONGEST_LINE = 10_000, 300
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
_ROOM = 1 << 20


def main(folder: str, schedule: bool = False) -> int:
    """Compile the folder's job."""
    place = Path(folder)
    job = Job.from_json(json.loads((place / "job.json").read_bytes()))
    result = run(job, place, schedule=schedule)
    replace_file(place / "result.json", json.dumps(result.to_json()))
    return 0


def run(job: Job, folder: Path, *, schedule: bool = False) -> CompiledProgram:
    """Lower and compile in this process; with ``schedule``, that may end with the result once it is scheduled."""
    from capibara.plan.compiler.devices import describe_mesh
    from capibara.plan.compiler.environment import compiler_for

    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    compiler = compiler_for(job.slice)
    versions[compiler.name] = compiler.version
    try:
        mesh, coordinates = describe_mesh(job.slice, job.mesh)
        start = time.perf_counter()
        workload = _builder(job.builder)(mesh, **job.params)
        lowered = workload.lowered
        text = lowered.as_text()
        source = _Source()
        if any(kernel in text for kernel in _KERNELS):
            # Pallas kernels hold the places of their source, which must not count in the digest.
            with _without_places():
                text = _builder(job.builder)(mesh, **job.params).lowered.as_text()
        program_hash = program_digest(text)
        lowering = time.perf_counter() - start
    except Exception as error:  # whatever a builder raises is its result
        return CompiledProgram(status="error", message=_words(error), versions=versions)
    dump = folder / "dump"
    options: dict[str, Any] = {
        **options_for(job.slice.platform, job.options),
        "xla_dump_to": str(dump),
    }
    start = time.perf_counter()
    known: dict[str, Any] = {
        "versions": versions,
        "coordinates": coordinates,
        "program_hash": program_hash,
        "lower_seconds": lowering,
    }
    watch = None
    if schedule:

        def scheduled(memory: Memory, text: str) -> None:
            seconds = time.perf_counter() - start
            found = CompiledProgram(
                status="ok",
                complete=False,
                memory=memory,
                buffers=read_buffers(dump, source.line),
                compile_seconds=seconds,
                **known,
            )
            if (reason := _write_text(folder, text)) is not None:
                found = CompiledProgram(status="error", message=reason, compile_seconds=seconds, **known)
            replace_file(folder / "result.json", json.dumps(found.to_json()))
            os._exit(0)  # the compiler cannot be stopped otherwise

        limit = int(job.options.get(LIMIT, "0")) << 20
        watch = Watch(dump, workload.bytes_by_kind(), limit, scheduled)
    try:
        try:
            compiled = lowered.compile(compiler_options=options)
        finally:
            if watch is not None:
                watch.finish()
    except Exception as error:
        text = str(error)
        out_of_memory = "RESOURCE_EXHAUSTED" in text and ("hbm" in text.lower() or "memory" in text.lower())
        return CompiledProgram(
            status="oom" if out_of_memory else "error",
            message=_words(error),
            needed_bytes=_needed(text) if out_of_memory else None,
            buffers=read_buffers(dump, source.line) or buffers_of_message(text),
            compile_seconds=time.perf_counter() - start,
            **known,
        )
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    heap = read_heap(dump)
    host = sum(
        getattr(analysis, f"host_{name}_size_in_bytes", 0) for name in ("argument", "output", "temp")
    ) - getattr(analysis, "host_alias_size_in_bytes", 0)
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes if heap is None else heap,
        host=host,
        kinds=workload.bytes_by_kind(),
    )
    buffers = read_buffers(dump, source.line)
    text = compiled.as_text()
    if (reason := _write_text(folder, text)) is not None:
        return CompiledProgram(status="error", message=reason, compile_seconds=seconds, **known)
    return CompiledProgram(
        status="ok",
        memory=memory,
        buffers=buffers,
        lines=source.lines(text),
        compile_seconds=seconds,
        **known,
    )


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    import jax

    name = "jax_traceback_in_locations_limit"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


class _Source:
    """The texts of source lines, also of the generated code of Capibara's models: Python forgets that with its model,
    which may be at any time once the program is lowered."""

    def __init__(self) -> None:
        self._generated = {
            name: linecache.getlines(name) for name in list(linecache.cache) if name.startswith("<")
        }

    def line(self, file: str, number: int) -> str:
        """One line, or an empty string."""
        lines = self._generated.get(file)
        if lines is None:
            return linecache.getline(file, number)
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def lines(self, text: str) -> dict[str, str]:
        """Those that a compiled program's text names, by place."""
        found = {}
        for frame in sorted(Frames.of(text).places())[:_MOST_LINES]:
            if line := self.line(frame.file, frame.line).strip():
                found[f"{frame.file}:{frame.line}"] = "".join(
                    c for c in line[:_LONGEST_LINE] if c.isprintable()
                )
        return found


def _write_text(folder: Path, text: str) -> str | None:
    """Write a compiled program; why it cannot be, where the disk is full, and what the compiler wrote cut off."""
    path = folder / "program.hlo.gz"
    try:
        with gzip.open(path, "wb", compresslevel=3) as stream:
            stream.write(text.encode())
        if shutil.disk_usage(folder).free >= _ROOM:
            return None
        reason = "less than 1 MiB is left"
    except OSError as error:
        reason = error.strerror or str(error)
    # Room for the result.
    path.unlink(missing_ok=True)
    remove_folder(folder / "dump")
    return (
        f"the compiler needs more room in {folder.parent}: {reason}. Set TMPDIR to a folder on another disk"
    )


def _builder(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"builder={name!r}, expected 'module:function' that can be imported: {error}"
        ) from error


def _words(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def _needed(text: str) -> int | None:
    """Bytes that the compiler says the program takes, from its refusal."""
    number = r"([\d.]+)\s*([KMGT]?)i?B?"
    for pattern in (
        rf"[Uu]sed {number} of",
        rf"\({number}\) exceeds",
        rf"requires? {number}",
        rf"allocate {number}",
    ):
        if match := re.search(pattern, text):
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _end_with_stdin(folder: str) -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the other end is closed
    remove_folder(Path(folder))  # nobody else will
    os._exit(1)


if __name__ == "__main__":
    if "--until-stdin-ends" in sys.argv[2:]:
        threading.Thread(target=_end_with_stdin, args=sys.argv[1:2], daemon=True).start()
    sys.exit(main(sys.argv[1], schedule="--schedule" in sys.argv[2:]))
