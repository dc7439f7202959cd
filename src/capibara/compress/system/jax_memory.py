"""Memory on JAX's devices: a pool of decoded tensors, and programs that run in the remaining memory.

The pool keeps decoded tensors on the device, up to a number of bytes, so that decoding the same bytes again costs
nothing; JAX arrays are immutable, so one can be returned twice. The optimiser queries the compiler for a program's
memory, and runs it over runs of rows if the whole would need more than is free.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compress.errors import CompressError
from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
from capibara.measure.installation import MemoryBytes
from capibara.memory import MemoryBudget, device_budget

__all__ = ["JaxMemoryOptimizer", "JaxMemoryPool"]


def _needed(program: Any) -> int:
    facts = program.memory_analysis()
    whole = facts.argument_size_in_bytes + facts.output_size_in_bytes + facts.temp_size_in_bytes
    return whole - facts.alias_size_in_bytes


class JaxMemoryPool:
    """The component ``jax_memory_pool``; thread-safe.

    Args:
      device: where the arrays are.
      fraction: on a CPU, the limit as a share of what :func:`capibara.memory.device_budget` says there is of the
        host's memory; an accelerator's allocator has its own limit.
      limit: in bytes, instead of ``fraction``.

    Attributes:
      limit: maximum bytes in the pool.
      hits: arrays that were found.
      misses: arrays that were not.
      evictions: arrays removed to make room, the least recently used first.
    """

    def __init__(self, device: Any, *, fraction: float = 0.75, limit: int | None = None) -> None:
        if limit is not None and (type(limit) is not int or limit < 0):
            raise CompressError(f"limit: got {limit!r}, expected a number of bytes ≥ 0")
        self.device = device
        if limit is None:
            self._budget = device_budget(device)
            limit = int((fraction if device.platform == "cpu" else 1.0) * self._budget.limit)
        else:
            self._budget = MemoryBudget(device, MemoryBytes(limit, "limit="))
        self.limit = limit
        self.hits = self.misses = self.evictions = 0
        self._arrays: OrderedDict[Hashable, jax.Array] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the arrays in the pool."""
        return self._bytes

    def in_use_bytes(self) -> int:
        """Bytes in use on the device by any code: the allocator's figure, or its live arrays if there is none."""
        return int(self._budget.in_use())

    def get(self, key: Hashable) -> jax.Array | None:
        """The array of that key, unless it was evicted or deleted."""
        with self._lock:
            array = self._arrays.get(key)
            if array is not None and array.is_deleted():  # by a donation
                self._drop(key)
                array = None
            if array is None:
                self.misses += 1
            else:
                self.hits += 1
                self._arrays.move_to_end(key)
            return array

    def put(self, key: Hashable, array: jax.Array) -> bool:
        """Store an array; returns whether it fits into the limit."""
        if array.nbytes > self.limit:
            return False
        with self._lock:
            if key in self._arrays:
                self._drop(key)
            self._arrays[key] = array
            self._bytes += array.nbytes
            while self._bytes > self.limit:
                self._drop(next(iter(self._arrays)))
                self.evictions += 1
        return True

    def _drop(self, key: Hashable) -> None:
        self._bytes -= self._arrays.pop(key).nbytes

    def clear(self) -> None:
        """Release all arrays."""
        with self._lock:
            self._arrays.clear()
            self._bytes = 0

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {
            "arrays": len(self._arrays),
            "held_bytes": self.held_bytes,
            "limit_bytes": self.limit,
            "in_use_bytes": self.in_use_bytes(),
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }


class JaxMemoryOptimizer:
    """The component ``jax_memory_optimizer``: runs programs within the available memory.

    Args:
      pool: provides device and limit.
      compiler: keeps the programs.

    Attributes:
      last_pieces: number of runs of rows in the last :meth:`run`.
    """

    def __init__(self, pool: JaxMemoryPool, compiler: JaxCompilationOptimizer) -> None:
        self.pool = pool
        self.compiler = compiler
        self.last_pieces = 0

    def estimate(self, function: Callable[..., Any], *args: Any, **static: Hashable) -> int:
        """Peak bytes of a program, as reported by its compiler: arguments, results and temporaries.

        Args:
          function, args, static: as for :meth:`JaxCompilationOptimizer.compiled`; the arguments may be shapes.
        """
        return _needed(self.compiler.compiled(function, *args, **static))

    def run(self, function: Callable[..., Any], rows: jax.Array, *rest: Any, **static: Hashable) -> jax.Array:
        """Compute ``function(rows, *rest, **static)`` over as many rows at a time as fit into free memory.

        Args:
          function: its result has one row per row of ``rows``, which does not depend on other rows.
          rows: [n, …]; processed in pieces, all of the same length.
          rest: passed to every piece.
          static: compile-time constants.

        Raises:
          CompressError: a single row needs more than the available memory.
        """
        with self.compiler.scope():
            return self._run(function, rows, rest, static)

    def _run(
        self,
        function: Callable[..., Any],
        rows: jax.Array,
        rest: tuple[Any, ...],
        static: dict[str, Hashable],
    ) -> jax.Array:
        count = rows.shape[0]
        # What is there already is in use, and in the arguments as well.
        free = (
            self.pool.limit - self.pool.in_use_bytes() + sum(a.nbytes for a in jax.tree.leaves((rows, rest)))
        )
        length = max(count, 1)
        while True:
            shape = jax.ShapeDtypeStruct(
                (min(length, count), *rows.shape[1:]), rows.dtype, sharding=rows.sharding
            )
            program = self.compiler.compiled(function, shape, *rest, **static)
            if (needed := _needed(program)) <= free:
                break
            if length == 1:
                raise CompressError(
                    f"{getattr(function, '__name__', function)}: one row of {tuple(rows.shape)} takes {needed} bytes, "
                    f"{free} are free. Remedy: a larger jax_memory_fraction, or jax_backend='cpu'."
                )
            # Straight to what fits if memory grows with rows; the loop checks it.
            length = max(1, min(length // 2, length * free // needed if free > 0 else 1))
        if length >= count:
            self.last_pieces = 1
            return program(rows, *rest)
        starts = [*range(0, count - length, length), count - length]
        pieces, at = [], 0
        for start in starts:
            piece = program(jax.device_put(rows[start : start + length], rows.sharding), *rest)
            pieces.append(piece[at - start :])  # the last piece begins earlier, to be of the same shape
            at = start + length
        self.last_pieces = len(pieces)
        return jnp.concatenate(pieces)

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"last_pieces": self.last_pieces, "free_bytes": self.pool.limit - self.pool.in_use_bytes()}
