"""Run a Python script under the profiler: ``python -c RUN FOLDER [--change=JSON] SCRIPT …`` (:data:`RUN`).

The profile begins when the script compiles its first program: before that, it may still choose its devices. JAX is
imported by the script, or not at all: settings in the environment are read then.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from capibara.jax_versions import backends_started, loaded_programs, wrap_traces
from capibara.observe.errors import ProfileError
from capibara.observe.profile.capture import Capture, capture
from capibara.observe.profile.changes import OF_SOURCE, Change, changed_script, install
from capibara.observe.profile.parts import OwnTrace, Parts, why_unreadable
from capibara.observe.profile.results import write_results
from capibara.observe.profile.settling import Settled
from capibara.observe.profile.waits import Reads, script_line

__all__ = ["FOUND", "NOTES", "RESULTS", "RUN", "USES", "main", "run_profiled"]

# What became of a change, a line each; where it was made; and the functions and loops that work, as JSON, a line each.
NOTES = "changes.txt"
USES = "uses.txt"
FOUND = "found.jsonl"
# What the script printed is compared by who runs it; this is what its names held.
RESULTS = "results.npz"
_MOST_WORDS = 1000
# For ``python -c``. The current folder, where ``-m`` and ``-c`` look for modules first, may have one of any name.
RUN = "import sys; del sys.path[0]; from capibara.observe.profile.run import main; main()"


class _AfterImport:
    """A finder of modules that calls a function when one is imported for the first time."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        others = [one for one in sys.meta_path if one is not self]
        specs = (one.find_spec(name, path, target) for one in others)
        spec = next((one for one in specs if one is not None), None)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def executed(module: types.ModuleType) -> None:
                execute(module)
                # Not before: it may be asked for only to see whether it is there.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)  # type: ignore[arg-type]
                    self._then()

            loader.exec_module = executed  # type: ignore[method-assign]
        return spec


class _FromFirstProgram:
    """Begins a capture at the first program that JAX compiles, or reads from its cache."""

    def __init__(self, name: str, folder: Path, change: Change | None, told: _Told) -> None:
        self.stack = contextlib.ExitStack()
        self.name, self.folder, self.change, self.told = name, folder, change, told
        self.reads: Reads | None = None
        self.captured: Any = None
        self.refused = ""
        self.failed: RuntimeError | None = None  # a callback of the script: said when it ends
        self._process = os.getpid()
        self._begun = self._listens = False
        self._ours: int | None = None  # the thread in which a trace of ours begins or ends
        self._own: OwnTrace | None = None

    def begin(self) -> None:
        """Wait for the first program; JAX was imported now."""
        import jax.monitoring
        import jax.profiler

        jax.monitoring.register_event_duration_secs_listener(self._event)
        self._listens = True
        if self.change is not None:
            self.reads = install(self.change, self.told.note, self.told.used, self.told.place)
        wrap_traces(self._trace_begins, self._trace_ends)

    def ends_now(self) -> None:
        """What ends a trace from here on, in this thread, is ours."""
        self._ours = threading.get_ident()

    def end(self) -> None:
        """No capture begins from here on."""
        if self._listens:
            import jax.monitoring

            with contextlib.suppress(Exception):  # the script may have removed all
                jax.monitoring.unregister_event_duration_listener(self._event)
            self._listens = False

    def _event(self, event: str, duration_secs: float, **_: Any) -> None:
        # Tracing comes before anything runs. Beginning may itself run something.
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration" and not self._begun:
            self._begun = True
            what = Capture(memory=True, flops=True, communication=True, kernels=True)
            with self._of_ours():
                try:
                    self.captured = self.stack.enter_context(
                        capture(self.name, what, self.folder, within=self._own)
                    )
                except ProfileError as error:  # there is another one that nobody said anything of
                    self.refused = str(error)

    @contextlib.contextmanager
    def _of_ours(self) -> Iterator[None]:
        before, self._ours = self._ours, threading.get_ident()
        try:
            yield
        finally:
            self._ours = before

    @property
    def parts(self) -> Parts | None:
        """The traces that are being taken here; None before the first program, and in a process that was forked."""
        return self.captured.parts if self.captured is not None and os.getpid() == self._process else None

    def _trace_begins(self, begin: Callable[[], Any], folder: str, options: Any) -> Any:
        """The script begins a trace of its own: ours ends before it, for there is one at a time."""
        if self._ours == threading.get_ident() or self._own is not None:
            return begin()
        here = os.path.abspath(folder) if folder and "://" not in folder else folder
        own = OwnTrace(here, why_unreadable(folder, options))
        parts = self.parts
        if parts is None:
            result, self._own = begin(), own
            return result
        with self._of_ours():
            parts.end(self._settled(parts))
            parts.own_begins(own)
            try:
                result = begin()
            except BaseException:
                parts.own_failed()
                parts.begin_again()
                raise
        self._own = own
        return result

    def _trace_ends(self, end: Callable[[], Any]) -> Any:
        """It ends its trace: what it started before is part of that, and ours goes on."""
        if self._ours == threading.get_ident():
            return end()
        parts = self.parts
        if parts is None:
            self._own = None
            return end()
        if self._own is None:
            raise RuntimeError("No profile started")  # as JAX does without ours
        with self._of_ours():
            settled, error = self._settled(parts), ""
            try:
                return end()
            except BaseException as failure:
                error = f"it could not be written: {failure}"
                raise
            finally:
                self._own = None
                parts.own_ended(settled, error)
                parts.begin_again()

    def _settled(self, parts: Parts) -> Settled:
        """When no device was at work any more."""
        try:
            return parts.settle()
        except RuntimeError as error:
            self.failed = self.failed or error
            now = time.perf_counter()
            return Settled(now, now)


class _Told:
    """Files in which it is told what became of a change.

    Args:
      folder: for them. file: the script's.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._folder, self.file = folder, file
        self._said: set[tuple[str, str]] = set()

    def note(self, words: str) -> None:
        """What was left as it is, or what the script does."""
        self._once(NOTES, words)

    def used(self, words: str) -> None:
        """What was changed."""
        self._once(USES, words)

    def found(self, text: str) -> None:
        """What works, as JSON."""
        _write_line(self._folder / FOUND, text)

    def place(self) -> str:
        """The script's line that is being run."""
        return script_line(self.file)

    def _once(self, file: str, words: str) -> None:
        words = " ".join(words.split())
        if (file, words) not in self._said and len(self._said) < _MOST_WORDS:
            self._said.add((file, words))
            _write_line(self._folder / file, words)


def run_profiled(
    folder: Path, arguments: list[str], change: Change | None = None, *, results: bool = False
) -> int:
    """Run ``SCRIPT …`` or ``-m MODULE …`` in this process as ``__main__``, and write its profile into a folder.

    Args:
      folder: for the trace, the programs, ``profile.json``; with a change, :data:`NOTES`, :data:`USES` and
        :data:`FOUND`; with ``results``, :data:`RESULTS`.
      arguments: the command. change: made to it. results: keep what its names hold at its end.

    Returns:
      The script's exit code; 1 if it succeeded and ran no compiled program.

    Raises:
      ProfileError: the profile is not complete.
    """
    module = arguments[0] == "-m"
    script = arguments[1] if module else arguments[0]
    sys.argv = arguments[1:] if module else arguments
    folder = folder.resolve()  # the script may go elsewhere
    told = _Told(folder, _file(arguments))
    watch = _FromFirstProgram(Path(script).name, folder, change, told)
    sys.meta_path.insert(0, _AfterImport("jax", watch.begin))  # type: ignore[arg-type]
    code, process = 0, os.getpid()
    with watch.stack:
        try:
            if module:
                sys.path.insert(0, os.getcwd())
                _become_main(runpy.run_module(script, run_name="__main__", alter_sys=True))
            else:
                sys.path.insert(0, str(Path(script).resolve().parent))
                _run_script(script, told, change)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, int | None):
                print(end.code, file=sys.stderr)
        except BaseException:
            if os.getpid() != process:
                traceback.print_exc()
                _leave(1)
            watch.ends_now()
            raise
        if os.getpid() != process:
            _leave(code)
        _wait_for_threads()
        watch.end()
        watch.ends_now()
        if watch.failed is not None:
            raise watch.failed
    if watch.reads is not None:
        for words in watch.reads.notes():
            told.note(words)
    if results and code == 0:
        write_results(folder / RESULTS, vars(sys.modules["__main__"]))
    if watch.refused:
        print(f"capibara profile: {watch.refused}", file=sys.stderr)
        return code or 1
    if watch.captured is None and code == 0:
        loaded = "jax" in sys.modules and backends_started() and bool(loaded_programs())
        why = "compiled no program, it only loaded some" if loaded else "ran no compiled program"
        remedy = ": profile it by TpuPerformanceProfiler in the program" if loaded else ""
        print(f"{script} {why}: there is nothing to profile{remedy}", file=sys.stderr)
        return 1
    return code


def _wait_for_threads() -> None:
    """As Python does at its end: what threads compute is part of the script."""
    for name in ("concurrent.futures.thread", "concurrent.futures.process"):
        # Their workers wait for more work until Python says that it ends, which comes before it waits for threads.
        finish = getattr(sys.modules.get(name), "_python_exit", None)
        if finish is not None:
            finish()
    mine = threading.current_thread()
    while others := [one for one in threading.enumerate() if one is not mine and not one.daemon]:
        for one in others:
            one.join()


def _become_main(names: dict[str, Any]) -> None:
    """Keep names as those of ``__main__``: functions at exit use them, and their arrays are part of the profile."""
    module = types.ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module


def _file(arguments: list[str]) -> str:
    """The file that is run, as its frames name it; empty if it is not known."""
    if arguments[0] != "-m":
        return os.path.join(os.getcwd(), arguments[0])
    with contextlib.suppress(ImportError, ValueError):
        for name in (f"{arguments[1]}.__main__", arguments[1]):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin:
                return spec.origin
    return ""


def _run_script(script: str, told: _Told, change: Change | None) -> None:
    path = os.path.join(os.getcwd(), script)  # as Python says it, with what it has of ".."
    if zipfile.is_zipfile(path):
        _become_main(runpy.run_path(script, run_name="__main__"))
        return
    names: dict[str, Any] = {"__file__": path, "__builtins__": __builtins__}
    if change is not None and change.kind in OF_SOURCE:
        code, more = changed_script(Path(path), change, told.note, told.used, told.found)
        names |= more
    else:
        with io.open_code(path) as stream:
            code = compile(stream.read(), path, "exec", dont_inherit=True)
    _become_main(names)
    exec(code, vars(sys.modules["__main__"]))


def _write_line(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def _leave(code: int) -> NoReturn:
    """End a process that the script forked: an exit would wait for threads of the tracer and XLA that are not there."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> NoReturn:
    """Run what ``sys.argv`` says."""
    try:
        change, results, rest = None, False, sys.argv[2:]
        if rest[0] == "--results":
            results, rest = True, rest[1:]
        if rest[0].startswith("--change="):
            change, rest = Change.from_json(rest[0].partition("=")[2]), rest[1:]
        sys.exit(run_profiled(Path(sys.argv[1]), rest, change, results=results))
    except ProfileError as error:
        print(f"capibara profile: {error}", file=sys.stderr)
        sys.exit(1)
