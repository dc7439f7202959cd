"""Checkpoints of a run that are written while training goes on.

The next step donates the state, so its arrays are copied first, on the devices where there is room
(:mod:`capibara.train.copies`). A thread then writes the copy: Orbax's files, their digests, the manifest, the name
(:meth:`CheckpointStore.save`). One save is written at a time: the next one, a rollback and the end of the run wait for
it. Threads of several processes agree without devices (:mod:`capibara.train.exchange`).

A save that fails leaves no checkpoint, and ends the run before its next step with the cause; of several processes all
of them. One that hangs is reported once, with the place in the program where it hangs, and the run goes on.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook of the interpreter's end has to be there before the one here
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from capibara.train.checkpoint import CheckpointStore
from capibara.train.checkpoint_files import first_line
from capibara.train.copies import Copier, Place
from capibara.train.errors import CheckpointWriteError
from capibara.train.exchange import Exchange
from capibara.train.processes import Processes
from capibara.train.quiet_orbax import causes

__all__ = ["Saves"]

_TIMES = 10  # so many times the longest save so far is not reported as slow
_POLL = 0.1  # seconds
_LOOK = 0.5  # seconds between questions whether another process has failed
_AFTER_AN_ERROR = 30.0  # seconds: other processes may be gone for good


class Saves:
    """Writes the checkpoints of one run into its store, one at a time.

    Args:
      store: where they go.
      asynchronous: whether training goes on meanwhile; False: :meth:`save` returns when the checkpoint is complete.
      slow_seconds: a save that takes longer, and ten times as long as the longest before, is reported.
      wait_seconds: the longest wait for a save that is being written; then it has failed.
      warn: told in one line what is worth it.
      tick: called now and then while one is waited for.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        asynchronous: bool = True,
        slow_seconds: float = 60.0,
        wait_seconds: float = 1800.0,
        warn: Callable[[str], None] = lambda text: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.asynchronous = store, asynchronous
        self.slow_seconds, self.wait_seconds = slow_seconds, wait_seconds
        self._warn, self._tick = warn, tick
        self._processes = Processes.here()
        self._copier = Copier()
        self._place: Place | None = None
        self._shardings: list[Any] = []
        self._token, self._number = "", 0
        self._job: _Job | None = None
        self._longest = 0.0

    def save(self, step: int, items: Mapping[str, Any], **facts: Any) -> None:
        """Begin to write a checkpoint, or write it; every process calls it. Waits for the one before.

        Args:
          step, items, facts: as :meth:`CheckpointStore.save` takes them. The arrays may be donated afterwards.

        Raises:
          CheckpointWriteError: this save failed, or the one before did.
        """
        self.settle()
        if self.asynchronous:
            # Of a run that has moved to other devices, these may have less room.
            shardings = [leaf.sharding for leaf in jax.tree.leaves(dict(items))]
            if self._place is None or shardings != self._shardings:
                self._prepare(items)
                self._shardings = shardings
        exchange = Exchange.between(self._processes, f"{self._token}-{self._number}")
        if not self.asynchronous or self._place in (None, "none") or exchange is None:
            self.store.save(step, items, **facts)
            return
        self._number += 1
        try:
            copied = self._copier.copy(dict(items), self._place)
        except jax.errors.JaxRuntimeError as error:
            failure = _without_memory(step, error)
            exchange.tell_failure(failure)
            raise failure from error
        self._job = _Job(self.store, exchange, step, copied, facts)
        self._job.start()
        _waited_for.add(self)

    @property
    def alone(self) -> bool:
        """Whether no other process has to agree."""
        return self._processes.count == 1

    def failed(self) -> bool:
        """Whether the save that is being written has failed; :meth:`settle` then raises why. It does not wait."""
        job = self._job
        if job is None:
            return False
        self._report_if_slow(job)
        return job.error is not None

    def settle(self) -> None:
        """Wait until nothing is being written; every process calls it.

        Raises:
          CheckpointWriteError: it failed, in any of the processes, or takes longer than ``wait_seconds``.
        """
        job = self._taken()
        if job is None:
            return
        error = self._wait(job, self.wait_seconds)

        def say() -> None:
            if error is not None:
                raise error

        self._processes.all_do(say)
        job.exchange.forget()

    def settle_before_going_back(self) -> None:
        """:meth:`settle`, after an error of training, whose cause a save may have failed of too: then it is left out.

        Raises:
          CheckpointWriteError: it failed because of the disk.
        """
        try:
            self.settle()
        except CheckpointWriteError:
            raise
        except Exception as error:
            self._warn(f"the checkpoint that was being written is lost: {first_line(error)}")

    def leave(self, error: BaseException) -> None:
        """Wait for a save before an error ends the run; not for other processes, which may be gone. Raises nothing."""
        job = self._taken()
        if job is None:
            return
        bound = self.wait_seconds if self.alone else min(_AFTER_AN_ERROR, self.wait_seconds)
        if not isinstance(error, Exception):  # somebody does not want to wait
            bound = 0.0
        if (failure := self._wait(job, bound)) is not None:
            self._warn(str(failure))

    def _prepare(self, items: Mapping[str, Any]) -> None:
        """Decide where copies go, for all processes alike, and agree on a name for what they say to one another."""
        said = self._processes.all_say([self._copier.place_for(dict(items)), secrets.token_hex(8)])
        places: list[Place] = [place for place, _ in said]
        self._place = "none" if "none" in places else "host" if "host" in places else "device"
        self._token = said[0][1]
        if self._place == "none":
            self._warn(
                "there is no room for a copy of the state: training waits while a checkpoint is written "
                "(checkpoint.asynchronous)"
            )

    def finish(self) -> Exception | None:
        """Wait for what is being written when the interpreter ends: why it failed; None if it has not."""
        job = self._taken()
        bound = self.wait_seconds if self.alone else min(_AFTER_AN_ERROR, self.wait_seconds)
        return None if job is None else self._wait(job, bound)

    def _taken(self) -> _Job | None:
        """What is being written, which is nobody else's to wait for then."""
        job, self._job = self._job, None
        _waited_for.discard(self)
        return job

    def _wait(self, job: _Job, bound: float) -> Exception | None:
        """Why the save has failed, as far as this process knows; None if it is complete."""
        try:
            return self._outcome(job, bound)
        except BaseException:  # somebody does not want to wait: it is nobody's checkpoint any more
            job.exchange.given_up.set()
            raise

    def _outcome(self, job: _Job, bound: float) -> Exception | None:
        deadline, looked = time.monotonic() + bound, time.monotonic()
        while job.is_alive():
            job.join(max(0.0, min(_POLL, deadline - time.monotonic())))
            self._report_if_slow(job)
            self._tick()
            now = time.monotonic()
            if now >= looked + _LOOK:
                looked = now
                if (failure := job.exchange.failure()) is not None:
                    job.exchange.given_up.set()
                    return failure
            if now >= deadline and job.is_alive():
                job.exchange.given_up.set()
                return CheckpointWriteError(
                    f"the checkpoint of step {job.step} is not complete after {now - job.begun:.1f} s: its writer is "
                    f"at {job.where()}. It is given up; the checkpoints before it are intact. See what is wrong with "
                    f"the file system of {str(self.store.folder)!r}, or wait longer (checkpoint.wait_seconds)."
                )
        if job.error is None:
            self._longest = max(self._longest, job.seconds)
        return job.error

    def _report_if_slow(self, job: _Job) -> None:
        took = time.monotonic() - job.begun
        if job.reported or not job.is_alive() or took < max(self.slow_seconds, _TIMES * self._longest):
            return
        job.reported = True
        self._warn(
            f"the checkpoint of step {job.step} is being written for {took:.1f} s: its writer is at {job.where()}. "
            "Training goes on until the next one is due"
        )


class _Job(threading.Thread):
    """One save."""

    def __init__(
        self, store: CheckpointStore, exchange: Exchange, step: int, items: Any, facts: Mapping[str, Any]
    ) -> None:
        super().__init__(name=f"capibara-checkpoint-{step}", daemon=True)
        self.exchange, self.step = exchange, step
        self.error: Exception | None = None
        self.begun, self.seconds, self.reported = time.monotonic(), 0.0, False
        self._store, self._facts = store, facts
        self._items: dict[str, Any] = items

    def run(self) -> None:
        try:
            self._store.save(
                self.step, self._items, processes=self.exchange, go_on=self._go_on, **self._facts
            )
        except Exception as error:
            for seen in causes(error):
                traceback.clear_frames(seen.__traceback__)  # they hold the copy
            if isinstance(error, jax.errors.JaxRuntimeError):
                error = _without_memory(self.step, error)
            self.exchange.tell_failure(error)
            self.error = error
        finally:
            self._items = {}  # its memory is free
            self.seconds = time.monotonic() - self.begun

    def where(self) -> str:
        """The innermost places in the program where the thread is now."""
        frame = sys._current_frames().get(self.ident or 0)
        if frame is None:
            return "its end"
        stack = traceback.extract_stack(frame)[-4:]
        return " < ".join(f"{at.filename}:{at.lineno} in {at.name}" for at in reversed(stack))

    def _go_on(self) -> None:
        if self.exchange.given_up.is_set():
            raise CheckpointWriteError(f"the checkpoint of step {self.step} was given up")


def _without_memory(step: int, error: Exception) -> Exception:
    """The error of a copy that the devices have no memory for after all; any other is as it was."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    failure = CheckpointWriteError(
        f"the checkpoint of step {step} is not written: there is no memory for a copy of the state "
        f"({first_line(error)}). Write it without one: checkpoint.asynchronous=false"
    )
    failure.__cause__ = error
    return failure


# Not weak: a trainer may be gone before its checkpoint is complete.
_waited_for: set[Saves] = set()


def _finish_all() -> None:
    """Complete what is being written when the interpreter ends, which would else end the threads anywhere."""
    for saves in list(_waited_for):
        if (failure := saves.finish()) is not None:
            print(f"capibara: {failure}", file=sys.stderr)


# ``atexit`` is too late: by then nothing can be started in the thread pools that Orbax writes with.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
