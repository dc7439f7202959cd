"""Going on after a device has failed: try again, take other devices, continue a run from its newest checkpoint.

What can be tried again is what the machine did wrong (:mod:`capibara.train.recovery.failures`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jax
from jax.errors import JaxRuntimeError

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.train.errors import TrainError
from capibara.train.progress import Reporter, SilentReporter
from capibara.train.protocols import DataSource, Model
from capibara.train.recovery.failures import answering, as_sentence, error_code, may_pass
from capibara.train.trainer import TrainReport, checkpoint_store, train

__all__ = ["DeviceFailedError", "RecoveryEvent", "TpuError", "TpuRecoveryManager", "answering"]

P = ParamSpec("P")
T = TypeVar("T")

TpuError = JaxRuntimeError
"""What JAX raises when a device, or a program on it, fails: ``jax.errors.JaxRuntimeError`` at its documented name."""


class DeviceFailedError(TrainError, JaxRuntimeError):
    """A device failed, and nothing that was tried helped; also a :data:`TpuError`."""


@dataclass(frozen=True)
class RecoveryEvent:
    """One thing that was done after a failure.

    Attributes:
      action: ``"retried"``, ``"moved"`` to other devices, ``"resumed"`` from a checkpoint, or ``"gave up"``.
      error: the first line of what JAX said.
      seconds: since the failure.
    """

    action: str
    error: str
    seconds: float


@dataclass
class TpuRecoveryManager:
    """Runs functions and whole trainings, and goes on after failures of devices.

    Args:
      auto_recovery: whether anything is tried again; False: every failure is raised at once.
      fallback_to_gpu: after failures on the default devices run on others: GPUs, or ``fallback``.
      checkpoint_frequency: steps between checkpoints of :meth:`train`.
      max_attempts: tries in all, on one kind of devices; of a training, without a new checkpoint between them.
      wait_seconds: before the second try; twice as long before each further one.
      fallback: devices to take instead of GPUs.
      reporter: told what happens.

    Attributes:
      events: what was done so far, oldest first.

    Raises:
      ConfigError: an argument is out of range.
    """

    auto_recovery: bool = True
    fallback_to_gpu: bool = False
    checkpoint_frequency: int = 1000
    max_attempts: int = 3
    wait_seconds: float = 1.0
    fallback: Sequence[Any] | None = None
    reporter: Reporter = field(default_factory=SilentReporter)
    events: list[RecoveryEvent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for name in ("checkpoint_frequency", "max_attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 1")
        if not 0 <= self.wait_seconds < float("inf"):
            raise ConfigError(f"wait_seconds={self.wait_seconds!r}: expected seconds, 0 or more")

    @contextmanager
    def recovery_context(self) -> Iterator[TpuRecoveryManager]:
        """Failures that leave the context are raised as :class:`DeviceFailedError`, which says what to do.

        What is called through :meth:`run` or :meth:`guard` inside it is tried again. A function that is called directly
        is not: its inputs may be gone after a failure, and only its caller knows what it changed.
        """
        try:
            yield self
        except DeviceFailedError:
            raise
        except JaxRuntimeError as error:
            self._gave_up(error, 0.0)
            raise DeviceFailedError(f"{as_sentence(error)} {_remedy(error)}") from error

    def guard(self, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, called through :meth:`run`."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(function, *args, **kwargs)

        return guarded

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, wait for its results, and try again where that may help.

        Args:
          function: has no effect but its results; does not donate its inputs, or fails before it has.

        Raises:
          DeviceFailedError: nothing helped; ``__cause__`` is the last error.
        """
        begun: float | None = None
        places: list[Any] = [None, *([self._other_devices()] if self.fallback_to_gpu else [])]
        last: RuntimeError | None = None
        for place in places:
            if place is not None and not place:
                continue
            for attempt in range(self.max_attempts):
                if last is not None:
                    self._done("retried" if attempt or place is None else "moved", last, begun)
                try:
                    return jax.block_until_ready(self._call(function, place, args, kwargs))
                except JaxRuntimeError as error:
                    begun = time.monotonic() if begun is None else begun
                    last = error
                    if not self.auto_recovery or not may_pass(error):
                        self._gave_up(error, begun)
                        raise DeviceFailedError(f"{as_sentence(error)} {_remedy(error)}") from error
                    if any(
                        leaf.is_deleted()
                        for leaf in jax.tree.leaves((args, kwargs))
                        if isinstance(leaf, jax.Array)
                    ):
                        self._gave_up(error, begun)
                        raise DeviceFailedError(
                            f"{as_sentence(error)} It cannot be tried again: the function donated its inputs, which "
                            "are gone. Keep a copy, or use TpuRecoveryManager.train, which goes on from a checkpoint."
                        ) from error
                    time.sleep(self.wait_seconds * 2**attempt if attempt + 1 < self.max_attempts else 0)
        assert last is not None
        self._gave_up(last, begun)
        where = ""
        if self.fallback_to_gpu and not places[-1]:
            where = " There are no GPUs to fall back to (fallback_to_gpu=True): pass fallback=devices."
        raise DeviceFailedError(
            f"{as_sentence(last)} It failed {self.max_attempts} times.{where} {_remedy(last)}"
        ) from last

    def train(
        self,
        config: ModularModelConfig,
        model: Model,
        data: DataSource,
        *,
        devices: Sequence[Any] | None = None,
        **options: Any,
    ) -> TrainReport:
        """:func:`capibara.train.train`, continued from its newest checkpoint after a failure.

        Checkpoints are written every ``checkpoint_frequency`` steps. Devices that do not answer after a failure are
        left out; a ``[tpu]`` mesh for which there are not enough others shrinks
        (:func:`capibara.sharding.resized`). Where none answers, ``fallback_to_gpu`` takes other ones.

        Args:
          options: of :func:`capibara.train.train`. ``fresh`` counts for the first try alone.

        Raises:
          DeviceFailedError: it failed ``max_attempts`` times without a new checkpoint.
          TrainError, ConfigError: as :func:`capibara.train.train`.
        """
        config = config.with_overrides({"checkpoint.every_steps": self.checkpoint_frequency})
        reporter = options.setdefault("reporter", self.reporter)
        failures, newest = 0, -1
        while True:
            try:
                return train(config, model, data, devices=devices, **options)
            except JaxRuntimeError as error:
                begun = time.monotonic()
                steps = checkpoint_store(config.checkpoint.directory).steps()
                step = steps[-1] if steps else 0
                failures = failures + 1 if step == newest else 1
                newest = step
                if not self.auto_recovery or not may_pass(error) or failures >= self.max_attempts:
                    self._gave_up(error, begun)
                    raise DeviceFailedError(
                        f"{as_sentence(error)} The checkpoint of step {step:,} stays. {_remedy(error)}"
                    ) from error
                reporter.warn(f"{as_sentence(error)} Going on from step {step:,}.")
                time.sleep(self.wait_seconds * 2 ** (failures - 1))
                devices = answering(devices, warn=reporter.warn)
                if not devices and self.fallback_to_gpu:
                    devices = answering(self._other_devices(), warn=reporter.warn)
                if not devices:
                    self._gave_up(error, begun)
                    raise DeviceFailedError(
                        f"{as_sentence(error)} No device answers any more. {_remedy(error)}"
                    ) from error
                options = {**options, "fresh": False, "elastic": True}
                config = config.with_overrides({"checkpoint.resume": True})
                self._done("resumed", error, begun)

    def _call(self, function: Callable[..., Any], place: Any, args: Any, kwargs: Any) -> Any:
        if place is None:
            return function(*args, **kwargs)
        args, kwargs = jax.tree.map(
            lambda leaf: jax.device_put(leaf, place[0]) if isinstance(leaf, jax.Array) else leaf,
            (args, kwargs),
        )
        with jax.default_device(place[0]):
            return function(*args, **kwargs)

    def _other_devices(self) -> list[Any]:
        if self.fallback is not None:
            return list(self.fallback)
        try:
            return jax.devices("gpu")
        except RuntimeError:  # no such platform
            return []

    def _done(self, action: str, error: RuntimeError, begun: float | None) -> None:
        seconds = 0.0 if begun is None else time.monotonic() - begun
        self.events.append(RecoveryEvent(action, as_sentence(error), seconds))

    def _gave_up(self, error: RuntimeError, begun: float | None) -> None:
        self._done("gave up", error, begun)


def _remedy(error: RuntimeError) -> str:
    code = error_code(error)
    if code == "RESOURCE_EXHAUSTED":
        return (
            "Memory does not suffice, and will not on another try: see what needs it with capibara plan, lower "
            "train.batch_size, or raise train.gradient_accumulation_steps."
        )
    if may_pass(error):
        return "Look at the machine's log; capibara doctor says which devices there are."
    return "The program or its inputs are not valid, and will not be on another try."
