"""Changes of what the host waits for: the devices go on while it works.

``"no_wait"`` lets ``block_until_ready`` return at once: it changes no value, only when the host goes on. A value that
Python reads (``float(loss)``, ``.item()``, ``numpy.asarray``) cannot be put off: what the program does with it is not
known from outside. Which lines read some, and how long they wait, is noted. ``"ahead"`` lets another thread go through
the iterators of the script's ``for`` loops, two items before the loop.
"""

from __future__ import annotations

import ast
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from capibara.jax_versions import outside_transformations

__all__ = ["AHEAD_NAME", "Ahead", "Reads", "compile_ahead", "no_wait", "script_line"]

_OURS = "capibara.observe."
# How an array is read by Python.
_READS = {
    "__float__": "float()",
    "__int__": "int()",
    "__bool__": "if or bool()",
    "__index__": "an index",
    "item": ".item()",
    "tolist": ".tolist()",
    "__array__": "NumPy",
    "__format__": "a text",
}
# Items that a thread prepares before they are asked for.
_AHEAD = 2
AHEAD_NAME = "__capibara_ahead__"


def script_line(file: str) -> str:
    """``":12"``: the line of a file that is being run, as the stack of this thread has it; empty if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return f" in line {frame.f_lineno}"
        frame = frame.f_back
    return ""


class Reads:
    """Counts what Python reads of arrays, and the seconds that it waits for them, by line of the script."""

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self._found: dict[tuple[str, str], tuple[int, float]] = {}
        self._within = threading.local()

    def watch(self, kind: type) -> None:
        """Count reads of arrays of a class."""
        for name, words in _READS.items():
            if (function := getattr(kind, name, None)) is not None:
                setattr(kind, name, self._counted(function, words))

    def _counted(self, function: Callable[..., Any], words: str) -> Callable[..., Any]:
        def counted(array: Any, *args: Any, **kwargs: Any) -> Any:
            # One read may be made of others.
            if getattr(self._within, "yes", False) or _asked_by_us():
                return function(array, *args, **kwargs)
            self._within.yes = True
            began = time.perf_counter()
            try:
                return function(array, *args, **kwargs)
            finally:
                self._within.yes = False
                place = self._place()
                if place:
                    count, spent = self._found.get((place, words), (0, 0.0))
                    self._found[place, words] = count + 1, spent + time.perf_counter() - began

        return counted

    def notes(self, least: int = 2, most: int = 8) -> list[str]:
        """Of the lines that read several times, in words, the longest waits first."""
        often = sorted((one for one in self._found.items() if one[1][0] >= least), key=lambda one: -one[1][1])
        return [
            f"a result is read{place} {count:,} times ({words}), {1e3 * spent:,.1f} ms in all: what Python does with "
            "it is not known from outside. Read it one step later"
            for (place, words), (count, spent) in often[:most]
        ]


def no_wait(used: Callable[[str], None], place: Callable[[], str]) -> Reads:
    """Let ``block_until_ready`` of the script return at once; returns what counts its other reads.

    Args:
      used: called with each line that waited. place: the script's line.
    """
    import jax
    import jax.numpy as jnp

    kind: Any = type(jnp.zeros(()))
    waits, of_trees = kind.block_until_ready, jax.block_until_ready

    def at_once(array: Any) -> Any:
        if _asked_by_us() or not (line := place()):
            return waits(array)
        used(f"block_until_ready{line} does not wait")
        return array

    def tree_at_once(x: Any) -> Any:
        if _asked_by_us() or not (line := place()):
            return of_trees(x)
        used(f"block_until_ready{line} does not wait")
        return x

    kind.block_until_ready, jax.block_until_ready = at_once, tree_at_once
    reads = Reads(place)
    reads.watch(kind)
    return reads


def _asked_by_us() -> bool:
    """Whether the profiler called: it has to wait."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_OURS)


# --- iterators that another thread goes through


def compile_ahead(tree: ast.Module) -> None:
    """Put what each ``for`` loop of a script goes over into a call of :data:`AHEAD_NAME`."""
    for one in ast.walk(tree):
        if isinstance(one, ast.For):
            place: ast.expr = ast.Call(
                ast.Name(AHEAD_NAME, ast.Load()), [one.iter, ast.Constant(one.lineno)], []
            )
            one.iter = ast.fix_missing_locations(ast.copy_location(place, one.iter))


class Ahead:
    """Called in ``for`` loops with what they go over: iterators that run code of Python are taken in another thread.

    Args:
      used: called with each line whose items are prepared so.
    """

    _PLAIN = (list, tuple, dict, set, frozenset, str, bytes, range)

    def __init__(self, used: Callable[[str], None]) -> None:
        self._used = used
        # An iterator that a loop left in the middle goes on with what was taken of it.
        self._going: dict[int, tuple[Any, _Thread]] = {}

    def __call__(self, over: Any, line: int) -> Any:
        if isinstance(over, self._PLAIN) or hasattr(over, "shape") or not outside_transformations():
            return over
        if type(over).__module__ == "builtins" and type(over).__name__.startswith("dict_"):
            return over
        iterator = iter(over)
        kept = self._going.get(id(iterator))
        if kept is None:
            kept = iterator, _Thread(iterator)
            if iterator is over:
                self._going[id(iterator)] = kept
        self._used(f"items of the loop in line {line} are prepared by another thread, {_AHEAD} ahead")
        return kept[1]


class _Thread:
    """An iterator over what a thread takes of another one."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None
        self._ended = False

    def __iter__(self) -> _Thread:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            self._thread = threading.Thread(target=self._take, daemon=True)
            self._thread.start()
        kind, value = self._ready.get()
        if kind == "item":
            return value
        self._ended = True
        if kind == "error":
            raise value
        raise StopIteration

    def _take(self) -> None:
        try:
            for item in self._source:
                self._ready.put(("item", item))
        except BaseException as error:
            self._ready.put(("error", error))
        else:
            self._ready.put(("end", None))
