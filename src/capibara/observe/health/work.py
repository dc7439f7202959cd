"""What a health check runs on devices: one small compiled program for each kind of work.

The checks compare what these methods return with what the host knows to be right. A subclass with a method that
misbehaves on one device is a broken device, as far as the checks can tell; the tests plant faults so.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from capibara.observe.health.deadline import Task

__all__ = ["DeviceWork"]


class DeviceWork:
    """Runs programs on devices. Arrays that are passed in are already on the device that is to do the work."""

    def within(self, seconds: float, name: str, device: Any, function: Callable[[], Any]) -> Any:
        """Run a function with a time limit.

        Args:
          seconds: the limit.
          name: of the work.
          device: the device that it runs on; None: several.
          function: what to run.

        Raises:
          DeadlineError: it did not finish in time.
        """
        return self.start(name, device, function).wait(seconds)

    def start(self, name: str, device: Any, function: Callable[[], Any]) -> Task:
        """Start a function in a thread of its own."""
        return Task(function, name)

    def timed(self, device: Any, function: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a function, waited for, and the seconds that it took. ``device`` is None for collectives."""
        start = self.clock()
        result = jax.block_until_ready(function())
        return result, self.clock() - start

    def clock(self) -> float:
        """Seconds since some moment: what every rate is measured with."""
        return time.perf_counter()

    def answer(self, array: jax.Array) -> jax.Array:
        """``sum(array² + 1)`` of an integer array."""
        return _answer(array)

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``a @ b``, accumulated in float32."""
        return _multiply(a, b)

    def write(self, seed: jax.Array, words: int) -> jax.Array:
        """A new block of so many uint32 words; each is a hash of its index and the seed."""
        return _write(seed, words)

    def complement(self, block: jax.Array) -> jax.Array:
        """The same block, each bit inverted, in place."""
        return _complement(block)

    def compare(self, block: jax.Array, seed: jax.Array, inverted: jax.Array) -> Any:
        """Count the words that differ from what was written; find the first one and its wrong bits.

        Args:
          block: from :meth:`write`.
          seed: what it was written with.
          inverted: uint32 all ones if the bits were inverted since, else 0.

        Returns:
          Number of wrong words (int32), index of the first (int32), its wrong bits (uint32).
        """
        return _compare(block, seed, inverted)

    def all_reduce(self, array: jax.Array, mesh: Mesh, axis: str) -> jax.Array:
        """Sum over one mesh axis. ``array``: ``[devices, words]``, one row on each device of the mesh."""
        return _all_reduce(mesh, axis)(array)

    def permute(self, array: jax.Array, mesh: Mesh, axis: str, shift: int) -> jax.Array:
        """Send each row to the device ``shift`` places further along the axis, cyclically."""
        return _permute(mesh, axis, shift)(array)


@jax.jit
def _answer(array: jax.Array) -> jax.Array:
    return jnp.sum(array * array + 1, dtype=jnp.int32)


@jax.jit
def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot(a, b, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def _pattern(seed: jax.Array, words: int) -> jax.Array:
    """Hashes of 0, 1, …, by the finalizer of MurmurHash3 (Appleby, 2008): neighbours differ in half of their bits."""
    x = jnp.arange(words, dtype=jnp.uint32) ^ seed
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_write = jax.jit(_pattern, static_argnums=1)


@functools.partial(jax.jit, donate_argnums=0)
def _complement(block: jax.Array) -> jax.Array:
    return ~block


@jax.jit
def _compare(block: jax.Array, seed: jax.Array, inverted: jax.Array) -> Any:
    wrong = block ^ _pattern(seed, block.size) ^ inverted
    bad = wrong != 0
    first = jnp.argmax(bad).astype(jnp.int32)
    return jnp.sum(bad, dtype=jnp.int32), first, wrong[first]


@functools.cache
def _all_reduce(mesh: Mesh, axis: str) -> Callable[[jax.Array], jax.Array]:
    return _along(mesh, lambda row: jax.lax.psum(row, axis))


@functools.cache
def _permute(mesh: Mesh, axis: str, shift: int) -> Callable[[jax.Array], jax.Array]:
    size = mesh.shape[axis]
    pairs = [(place, (place + shift) % size) for place in range(size)]
    return _along(mesh, lambda row: jax.lax.ppermute(row, axis, pairs))


def _along(mesh: Mesh, function: Callable[[Any], Any]) -> Callable[[jax.Array], jax.Array]:
    rows = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
