"""Warm-up: compile and run a model for every shape that it will be used with, before it is used.

The first call with a shape compiles, allocates and fills caches; a server that takes its first request then answers
late. :class:`TpuWarmupManager` makes these calls beforehand, smallest shapes first, so that small requests can be
served while large programs compile; and keeps the programs on disk, so that the next start reads them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from capibara.compilation.configuration import cache_bytes
from capibara.compilation.counting import count_compilations
from capibara.compilation.errors import CompilationOptionError
from capibara.compilation.inputs import input_descriptions, is_size
from capibara.compilation.jitted import OptimizedJit
from capibara.compilation.persistent_cache import keep_compiled

__all__ = ["TpuWarmupManager", "WarmedShape", "WarmupReport"]


@dataclass(frozen=True)
class WarmedShape:
    """One shape.

    Attributes:
      shape: of the input; of several inputs a tuple of shapes.
      compiled: programs that XLA compiled for it.
      hits: programs that the cache on disk had.
      first_seconds: the first call: tracing, compiling or reading the program, running it.
      step_seconds: the median of the other calls; None if there was only one.
    """

    shape: tuple[Any, ...]
    compiled: int
    hits: int
    first_seconds: float
    step_seconds: float | None


@dataclass
class WarmupReport:
    """A warm-up, finished or in progress.

    Attributes:
      total: shapes to warm up.
      shapes: those that are done, in the order of the work.
      notes: why programs are not kept on disk, if they are not.
    """

    total: int
    shapes: list[WarmedShape] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _finished: threading.Event = field(default_factory=threading.Event, repr=False)
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    @property
    def compiled(self) -> int:
        """Programs that XLA compiled."""
        return sum(one.compiled for one in self.shapes)

    @property
    def hits(self) -> int:
        """Programs that came from the cache on disk."""
        return sum(one.hits for one in self.shapes)

    @property
    def done(self) -> bool:
        """Whether the work has ended."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> WarmupReport:
        """Wait for a warm-up in the background.

        Raises:
          TimeoutError: it takes longer than ``timeout`` seconds.
          Exception: whatever the model raised.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(
                f"timeout: {len(self.shapes)} of {self.total} shapes were done after {timeout} s"
            )
        if self._error is not None:
            raise self._error
        return self

    def stop(self) -> None:
        """End a warm-up in the background after the call that is running."""
        self._stopped.set()

    def __str__(self) -> str:
        lines = [
            f"{len(self.shapes)} of {self.total} shapes: {self.compiled} programs compiled, {self.hits} read from disk"
        ]
        for one in self.shapes:
            step = "" if one.step_seconds is None else f", then {one.step_seconds:.4f} s"
            lines.append(
                f"  {one.shape}: {one.compiled} compiled, {one.hits} read, {one.first_seconds:.2f} s{step}"
            )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


class TpuWarmupManager:
    """Compiles and runs models for their shapes.

    Args:
      compilation_cache_size_gb: the size of the cache of programs on disk in GiB (2³⁰ bytes).
      warmup_steps: calls for each shape; the first one compiles.
      progressive_warmup: smallest shapes first; otherwise in the order given.
      cache_directory: the folder of the cache; None: one of the user's own for this type of machine.

    Raises:
      CompilationOptionError: a value is invalid.
    """

    def __init__(
        self,
        compilation_cache_size_gb: float = 1.0,
        warmup_steps: int = 1,
        progressive_warmup: bool = True,
        *,
        cache_directory: str | Path | None = None,
    ) -> None:
        self.max_bytes = cache_bytes(compilation_cache_size_gb, "compilation_cache_size_gb")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise CompilationOptionError(
                f"warmup_steps: got {warmup_steps!r:.80}, expected an integer of at least 1."
            )
        if not isinstance(progressive_warmup, bool):
            raise CompilationOptionError(
                f"progressive_warmup: got {progressive_warmup!r:.80}, expected True or False."
            )
        self.warmup_steps, self.progressive_warmup = warmup_steps, progressive_warmup
        self.cache_directory = cache_directory

    def warmup_model(
        self,
        model: Any,
        input_shapes: Sequence[Any],
        batch_sizes: Sequence[int] | None = None,
        *,
        dtype: Any = "float32",
        make_input: Callable[[tuple[int, ...]], Any] | None = None,
        background: bool = False,
        progress: bool | None = None,
        stream: TextIO | None = None,
    ) -> WarmupReport:
        """Call a model with every shape.

        What is called is what you will call: ``model.forward`` if there is one, else the model itself. Programs stay
        in that function's own cache, so it should be jitted; an :class:`OptimizedJit` is compiled ahead of time.

        Args:
          model: has ``forward``, or is a function.
          input_shapes: the shapes; or for several inputs tuples of shapes.
          batch_sizes: each shape is used with each of these as its first axis; None: with its own.
          dtype: of the inputs, which are zeros.
          make_input: makes the input of a shape in their place, such as token numbers in a dict.
          background: return at once and work in another thread; :meth:`WarmupReport.wait` waits.
          progress: a progress bar on ``stream`` (default: standard error); None: if that is a terminal.

        Returns:
          What was compiled and how long it took; with ``background`` it grows.

        Raises:
          CompilationOptionError: the model cannot be called, or a shape or batch size is invalid.
          Exception: whatever the model raises; with ``background``, from ``wait``.
        """
        function = getattr(model, "forward", model)
        if not callable(function):
            raise CompilationOptionError(
                f"model: got {model!r:.100}, expected a function or an object with a method 'forward'."
            )
        shapes = _shapes(input_shapes, batch_sizes)
        if self.progressive_warmup:
            shapes.sort(key=_elements)
        report = WarmupReport(len(shapes))
        work = (function, shapes, dtype, make_input, report, progress, stream or sys.stderr)
        if background:
            threading.Thread(target=self._work, args=work, name="warm-up", daemon=True).start()
            return report
        self._work(*work)
        return report.wait()

    def _work(
        self,
        function: Callable[..., Any],
        shapes: list[Any],
        dtype: Any,
        make_input: Callable[[tuple[int, ...]], Any] | None,
        report: WarmupReport,
        progress: bool | None,
        stream: TextIO,
    ) -> None:
        try:
            with (
                keep_compiled(
                    report.notes.append,
                    folder=self.cache_directory,
                    max_bytes=self.max_bytes,
                    min_seconds=0.0,
                ),
                _Bar(len(shapes), stream, progress) as bar,
            ):
                for shape in shapes:
                    if report._stopped.is_set():
                        break
                    inputs = _zeros(shape, dtype) if make_input is None else (make_input(shape),)
                    report.shapes.append(self._warm(function, shape, inputs))
                    bar.advance(report)
        except BaseException as error:
            report._error = error
        finally:
            report._finished.set()

    def _warm(self, function: Callable[..., Any], shape: Any, inputs: tuple[Any, ...]) -> WarmedShape:
        import jax

        seconds: list[float] = []
        with count_compilations(every_thread=False) as counts:
            if isinstance(function, OptimizedJit):
                function.compile(input_shapes=[inputs])
            for _ in range(self.warmup_steps):
                begin = time.perf_counter()
                jax.block_until_ready(function(*inputs))
                seconds.append(time.perf_counter() - begin)
        later = sorted(seconds[1:])
        return WarmedShape(
            shape, counts.compiled, counts.hits, seconds[0], later[len(later) // 2] if later else None
        )


class _Bar:
    """A progress bar, or nothing."""

    def __init__(self, total: int, stream: TextIO, wanted: bool | None) -> None:
        self._total, self._stream = total, stream
        self._wanted = stream.isatty() if wanted is None else wanted

    def __enter__(self) -> _Bar:
        self._progress = None
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("warm-up"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[words]}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, words="")
        return self

    def advance(self, report: WarmupReport) -> None:
        if self._progress is not None:
            words = f"{report.shapes[-1].shape}  {report.compiled} compiled, {report.hits} read"
            self._progress.update(self._task, advance=1, words=words)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _shapes(input_shapes: Sequence[Any], batch_sizes: Sequence[int] | None) -> list[Any]:
    """Every shape with every batch size, each once."""
    if isinstance(input_shapes, str) or not isinstance(input_shapes, Sequence) or not input_shapes:
        raise CompilationOptionError(
            f"input_shapes: got {input_shapes!r:.100}, expected a list of shapes such as [(32, 512, 768)]."
        )
    if batch_sizes is not None and not len(batch_sizes):
        raise CompilationOptionError(
            "batch_sizes: got none, expected integers of at least 1. Leave it out to use the shapes' own."
        )
    for size in batch_sizes or ():
        if not is_size(size) or size < 1:
            raise CompilationOptionError(f"batch_sizes: got {size!r:.80}, expected integers of at least 1.")
    found: dict[Any, None] = {}
    for shape in input_shapes:
        for each in input_descriptions(shape, "float32"):
            if not hasattr(each, "shape"):
                raise _no_shape(shape)
        try:
            plain = _plain(shape)
        except TypeError:  # arrays and their descriptions, which compile() takes
            raise _no_shape(shape) from None
        if batch_sizes is None:
            found[plain] = None
            continue
        for size in batch_sizes:
            found[_with_batch(plain, int(size))] = None
    return list(found)


def _no_shape(entry: Any) -> CompilationOptionError:
    return CompilationOptionError(
        f"input_shapes: got an entry {entry!r:.100}, expected a shape, or a tuple of shapes. Inputs of another kind: "
        "make_input."
    )


def _plain(shape: Any) -> Any:
    return tuple(map(_plain, shape)) if isinstance(shape, tuple | list) else int(shape)


def _with_batch(shape: Any, size: int) -> Any:
    if not shape:
        raise CompilationOptionError("input_shapes: a scalar has no axis for batch_sizes.")
    if isinstance(shape[0], tuple):
        return tuple(_with_batch(one, size) for one in shape)
    return (size, *shape[1:])


def _elements(shape: Any) -> int:
    if shape and isinstance(shape[0], tuple):
        return sum(map(_elements, shape))
    total = 1
    for size in shape:
        total *= size
    return total


def _zeros(shape: Any, dtype: Any) -> tuple[Any, ...]:
    import jax.numpy as jnp

    shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
    return tuple(jnp.zeros(one, dtype) for one in shapes)
