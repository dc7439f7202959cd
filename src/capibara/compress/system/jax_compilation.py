"""A cache of compiled JAX programs that counts hits and misses.

The cache of ``jax.jit`` does not report its hits. So here a program is compiled ahead of time for the shapes, dtypes
and devices of its arguments, and cached under them; the least recently used one is evicted first.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from capibara.compress.errors import CompressError

__all__ = ["JaxCompilationOptimizer"]


class JaxCompilationOptimizer:
    """The component ``jax_compilation_optimizer``; thread-safe.

    Args:
      size: number of programs to keep; 0 keeps none.
      enable_x64: trace with 64-bit dtypes.
      on_lookup: called with the hit rate after each look-up.

    Attributes:
      hits: look-ups that found a program.
      misses: look-ups that did not, each followed by a compilation.
      evictions: programs removed to make room.
      seconds: spent tracing, lowering and compiling.
      on_lookup: as given.
    """

    def __init__(
        self, size: int = 128, *, enable_x64: bool = False, on_lookup: Callable[[float], object] | None = None
    ) -> None:
        if type(size) is not int or size < 0:
            raise CompressError(f"size: got {size!r}, expected an integer ≥ 0")
        self.size = size
        self.enable_x64 = enable_x64
        self.hits = self.misses = self.evictions = 0
        self.seconds = 0.0
        self.on_lookup = on_lookup
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def hit_rate(self) -> float | None:
        """Hits over look-ups, 0 to 1; ``None`` before the first one."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    def __len__(self) -> int:
        return len(self._programs)

    def compiled(self, function: Callable[..., Any], *args: Any, **static: Hashable) -> Any:
        """The program (``jax.stages.Compiled``) of ``function(*args, **static)``, compiled if it is not cached.

        Args:
          function: pure; programs are cached by the function object, so do not pass a new lambda each time.
          args: arrays, pytrees of arrays, or ``jax.ShapeDtypeStruct``.
          static: compile-time constants.

        Raises:
          CompressError: a static value is not hashable.
        """
        with self.scope():
            leaves, tree = jax.tree.flatten(args)
            shapes = tuple(map(_place, leaves))
            key = (function, tree, shapes, tuple(sorted(static.items())), jax.config.read("jax_enable_x64"))
            try:
                hash(key)
            except TypeError:
                raise CompressError(
                    f"static: got {static!r:.200}, expected values that can be hashed. Remedy: arrays are args."
                ) from None
            with self._lock:
                if (program := self._programs.get(key)) is not None:
                    self._programs.move_to_end(key)
                    self.hits += 1
                else:
                    self.misses += 1
                rate = self.hit_rate
            if self.on_lookup is not None and rate is not None:
                self.on_lookup(rate)
            if program is not None:
                return program
            begin = time.perf_counter()
            program = jax.jit(functools.partial(function, **static)).lower(*args).compile()
            with self._lock:
                self.seconds += time.perf_counter() - begin
                self._programs[key] = program
                while len(self._programs) > self.size:
                    self._programs.popitem(last=False)
                    self.evictions += 1
            return program

    def call(self, function: Callable[..., Any], *args: Any, **static: Hashable) -> Any:
        """``function(*args, **static)``, through :meth:`compiled`; ``args`` are arrays."""
        with self.scope():
            return self.compiled(function, *args, **static)(*args)

    def scope(self) -> Any:
        """A context with the programs' 64-bit setting, for calling them or creating their arguments."""
        return jax.enable_x64(self.enable_x64 or jax.config.read("jax_enable_x64"))

    def clear(self) -> None:
        """Release all programs; the counts are kept."""
        with self._lock:
            self._programs.clear()

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {
            "programs": len(self),
            "size": self.size,
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "hit_rate": self.hit_rate,
            "seconds": self.seconds,
        }


def _place(leaf: Any) -> Hashable:
    """What a program is compiled for: of numbers of Python's their type alone counts."""
    if not hasattr(leaf, "dtype"):
        return type(leaf)
    weak, sharding = getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)
    return tuple(leaf.shape), str(leaf.dtype), weak, sharding
