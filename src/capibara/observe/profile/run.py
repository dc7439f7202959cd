"""Run a Python script under the profiler: ``python -m capibara.observe.profile.run FOLDER [--change=JSON] SCRIPT …``.

The profile begins when the script compiles its first program: before that, it may still choose its devices.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from capibara.jax_versions import backends_started, loaded_programs
from capibara.observe.errors import ProfileError
from capibara.observe.profile.capture import Capture, capture
from capibara.observe.profile.changes import Change, compile_with_jit, install, wrap

__all__ = ["NOTES", "run_profiled"]

# What became of a change, a line each.
NOTES = "changes.txt"


class _FromFirstProgram:
    """Begins a capture at the first program that JAX compiles, or reads from its cache."""

    def __init__(self, name: str, folder: Path) -> None:
        self.stack = contextlib.ExitStack()
        self.name = name
        self.folder = folder
        self.captured: Any = None
        self._begun = False

    def event(self, event: str, duration_secs: float, **_: Any) -> None:
        # Tracing comes before anything runs. Beginning may itself run something.
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration" and not self._begun:
            self._begun = True
            self.captured = self.stack.enter_context(
                capture(
                    self.name, Capture(memory=True, flops=True, communication=True, kernels=True), self.folder
                )
            )


def run_profiled(folder: Path, arguments: list[str], change: Change | None = None) -> int:
    """Run ``SCRIPT …`` or ``-m MODULE …`` in this process as ``__main__``, and write its profile into a folder.

    Args:
      folder: for the trace, the programs, ``profile.json``; and, with a change, :data:`NOTES`.
      arguments: the command. change: made to it.

    Returns:
      The script's exit code; 1 if it succeeded and ran no compiled program.

    Raises:
      ProfileError: the profile is not complete.
    """
    import jax.monitoring

    module = arguments[0] == "-m"
    script = arguments[1] if module else arguments[0]
    sys.argv = arguments[1:] if module else arguments
    watch = _FromFirstProgram(Path(script).name, folder)
    jax.monitoring.register_event_duration_secs_listener(watch.event)
    code, process = 0, os.getpid()
    if change is not None:
        install(change)
    # The script's names are kept until the profile has ended: what they hold is part of it.
    kept: dict[str, Any] = {}
    with watch.stack:
        try:
            if module:
                kept = runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(script).resolve().parent)
                kept = _run_script(script, folder, change)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            if os.getpid() != process:
                traceback.print_exc()
                _leave(1)
            raise
        finally:
            jax.monitoring.unregister_event_duration_listener(watch.event)
        if os.getpid() != process:
            _leave(code)
    kept.clear()
    if watch.captured is None and code == 0:
        loaded = backends_started() and bool(loaded_programs())
        why = "compiled no program, it only loaded some" if loaded else "ran no compiled program"
        remedy = ": profile it by TpuPerformanceProfiler in the program" if loaded else ""
        print(f"{script} {why}: there is nothing to profile{remedy}", file=sys.stderr)
        return 1
    return code


def _run_script(script: str, folder: Path, change: Change | None) -> dict[str, Any]:
    if change is None or change.kind != "jit":
        return runpy.run_path(script, run_name="__main__")

    def note(words: str) -> None:
        with (folder / NOTES).open("a") as notes:
            notes.write(words + "\n")

    code = compile_with_jit(Path(script), change.lines, note)
    module = types.ModuleType("__main__")
    module.__file__ = script
    vars(module).update(wrap(note))
    sys.modules["__main__"] = module
    exec(code, vars(module))
    return vars(module)


def _leave(code: int) -> NoReturn:
    """End a process that the script forked: an exit would wait for threads of the tracer and XLA that are not there."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    try:
        chosen, rest = None, sys.argv[2:]
        if rest[0].startswith("--change="):
            chosen, rest = Change.from_json(rest[0].partition("=")[2]), rest[1:]
        sys.exit(run_profiled(Path(sys.argv[1]), rest, chosen))
    except ProfileError as error:
        print(f"capibara profile: {error}", file=sys.stderr)
        sys.exit(1)
