"""Start and stop one compilation process, and read its result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from capibara.plan.compiler.environment import Compiler
from capibara.plan.compiler.job import CompiledProgram, Job
from capibara.plan.errors import CompilationError, PlanError

__all__ = ["kill", "read_result", "worker"]

_LAST_WORDS = 4000
# What libtpu prints wherever there is no TPU.
_NO_TPU = re.compile(
    r"host bounds for accelerator|could not determine TPU|before InitGoogle|=== Source Location Trace|libtpu_init_utils"
)


@contextlib.contextmanager
def worker(
    job: Job, folder: Path, compiler: Compiler, *, schedule: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of :mod:`capibara.plan.compiler.worker` that runs a job in an empty folder.

    With ``schedule`` it ends when the program is scheduled.

    It ends with the block, and with this process however it ends: its standard input is then closed.
    """
    (folder / "job.json").write_text(json.dumps(job.to_json()))
    with open(folder / "words", "wb") as words:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "capibara.plan.compiler.worker", str(folder), "--until-stdin-ends"),
                *(["--schedule"] if schedule else []),
            ],
            env=compiler.environment(),
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def read_result(job: Job, folder: Path, code: int | None) -> CompiledProgram:
    """Read the result that a finished process left in its folder.

    Raises:
      CompilationError: there is no readable result; the message has the exit code and the last output.
    """
    try:
        return CompiledProgram.from_json(json.loads((folder / "result.json").read_bytes()))
    except (OSError, ValueError, PlanError):
        words = (folder / "words").read_bytes()[-_LAST_WORDS:].decode(errors="replace")
        last = "\n".join(line for line in words.splitlines() if not _NO_TPU.search(line))
        raise CompilationError(
            f"the process that compiled {job.builder} for {job.slice} ended with exit code {code} and no result. "
            f"Its last words:\n{last}"
        ) from None
