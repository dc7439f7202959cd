"""Where the time between steps goes, as the host sees it: to the devices, or to its own work.

Steps are queued, so the host cannot see when a device begins one. Every so many steps the queue is drained and one step
is run alone, from its call until its results are there: that is the time it computes. Over the steps that follow the
host adds up how long it waits for the devices; the rest is its own work. On a CPU, where some of the computation is
done within the call of a step, the call counts as waiting, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from capibara.train.scaling.rules import Load

__all__ = ["StepMeter"]


class StepMeter:
    """Measures the steps of a loop.

    Args:
      every: steps between two that are run alone.
      inline: whether the call of a step may do its computation.
      clock: seconds.
    """

    def __init__(
        self, every: int, *, inline: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.every, self._inline, self._clock = every, inline, clock
        self._compute: float | None = None
        self._begun = False
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._mark: float | None = None

    @property
    def drains(self) -> bool:
        """Whether all steps have to be finished before the next one."""
        return self._begun and (self._compute is None or self._steps >= self.every)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a step. The first one, which may be compiled, is not measured."""
        if not self._begun:
            self._begun = True
            return function(*args)
        if self._compute is None:
            begun = self._clock()
            result = jax.block_until_ready(function(*args))
            self._compute = self._clock() - begun
            self.resume()
            return result
        self._steps += 1
        if not self._inline:
            return function(*args)
        with self.waiting():
            return function(*args)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is the devices' time."""
        begun = self._clock()
        try:
            yield
        finally:
            if self._mark is not None:
                self._waited += self._clock() - begun

    def pause(self) -> None:
        """Something else than steps begins: a validation, a checkpoint."""
        if self._mark is not None:
            self._seconds += self._clock() - self._mark
            self._mark = None

    def resume(self) -> None:
        """Steps go on."""
        if self._compute is not None:
            self._mark = self._clock()

    def take(self, step: int, chips: int) -> Load | None:
        """What was measured, if that is enough; then the next measurement begins."""
        if self._compute is None or self._steps < self.every:
            return None
        self.pause()
        each = self._seconds / self._steps
        host = max(0.0, self._seconds - self._waited) / self._steps
        load = Load(step, chips, each, self._compute, host)
        self._compute, self._steps, self._seconds, self._waited = None, 0, 0.0, 0.0
        return load
