"""The training loop: keep the device busy, write down exactly what happened, stop at any step.

The host runs a few steps ahead of the device. A loss is read only when the step after it is already queued,
so reading never makes the device wait; only an evaluation, a copy of the state or a measurement for scaling drains the
queue. A batch follows from the step's number, so the only thing that has to survive an interruption is the
:class:`TrainState`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from capibara.hardware.telemetry import device_memory, host_memory
from capibara.train.errors import DivergedError, ScalingError
from capibara.train.ledger import Ledger
from capibara.train.metrics import MetricsLog, SilentLog
from capibara.train.processes import Ballots, Processes
from capibara.train.progress import Reporter
from capibara.train.protocols import Batch
from capibara.train.recovery.guard import Guard
from capibara.train.recovery.replay import replayed
from capibara.train.recovery.skips import Skips
from capibara.train.recovery.watchdog import Watchdog
from capibara.train.run import Run
from capibara.train.saves import Saves
from capibara.train.scaling.autoscaler import Controller
from capibara.train.signals import StopFlag
from capibara.train.state import TrainState

__all__ = ["Loop", "Utilisation"]

_STEPS_AHEAD = 2
# What a process may want before a step: a move to so many devices; an end, which counts more; an interruption, which
# carries its signal's number; and most of all an end because a checkpoint was not written, or devices are missing.
_GO_ON, _TIME, _INTERRUPTED, _SAVE_FAILED, _NO_DEVICES = 0, 1 << 16, 1 << 17, 1 << 18, 1 << 19


@dataclass(frozen=True)
class Utilisation:
    """What turns tokens per second into model FLOP utilisation.

    Attributes:
      flops_per_token: forward and backward, from the model.
      device_flops: FLOP/s of a matrix multiply on the devices of this run, as measured just before it.
    """

    flops_per_token: float
    device_flops: float

    def on(self, devices: Sequence[Any], before: int) -> Utilisation:
        """That of the same run on these devices instead of ``before`` ones of their kind."""
        # Emulated CPU devices share the cores that the one measurement already used.
        if devices[0].platform == "cpu":
            return self
        return replace(self, device_flops=self.device_flops * len(devices) / before)

    def of(self, tokens_per_second: float) -> float:
        """The part of the measured rate that the model's own arithmetic uses."""
        return tokens_per_second * self.flops_per_token / self.device_flops


@dataclass
class _Meter:
    """Time spent in steps, without evaluations and checkpoints."""

    tokens: int = 0
    seconds: float = 0.0
    mark: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        self.mark = time.perf_counter()

    def add(self, tokens: int) -> None:
        now = time.perf_counter()
        self.tokens += tokens
        self.seconds += now - self.mark
        self.mark = now

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Loop:
    """Runs optimizer steps until the plan, the time limit or a signal ends it.

    ``save(state, step, seconds, bits, best)`` begins a checkpoint, which ``saves`` writes; ``after_evaluation(step,
    bits)`` is called after each validation, ``sound(step)`` after each step whose loss is sound; ``remember(state,
    step, seconds)`` copies a state to memory, every ``checkpoint.memory_every_steps``. ``scaling`` is asked before each
    step whether to move to other devices. After :meth:`run_steps`, ``saved`` is the step of the newest checkpoint, and
    ``reason`` is "finished", "time", "interrupted" or "moves": then nothing was validated or saved at the end, and
    another loop shall go on with the next step.
    """

    run: Run
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    log: MetricsLog | SilentLog
    save: Callable[[TrainState, int, float, float | None, bool], None]
    saves: Saves
    after_evaluation: Callable[[int, float], None]
    reporter: Reporter
    stop: StopFlag
    guard: Guard
    skips: Skips
    watchdog: Watchdog
    sound: Callable[[int], None]
    remember: Callable[[TrainState, int, float], None] | None = None
    scaling: Controller | None = None
    utilisation: Utilisation | None = None
    ledger: Ledger = field(default_factory=lambda: Ledger(None))
    seconds_before: float = 0.0
    last_loss: float | None = None
    last_bits: float | None = None
    best_bits: float | None = None
    reason: str = "finished"

    def __post_init__(self) -> None:
        self._ballots = Ballots(Processes.here(), _STEPS_AHEAD, self.run.placement.devices)
        self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()
        self._line: list[dict[str, float]] = []
        self.total = _Meter()
        self._window = _Meter()
        self._begun = time.perf_counter()
        self.saved = 0

    @property
    def seconds(self) -> float:
        """Training time of the whole run: this process since the loop began, and those before it."""
        return self.seconds_before + time.perf_counter() - self._begun

    def run_steps(self, state: TrainState, start: int, saved: int | None = None) -> tuple[TrainState, int]:
        """Train from ``start`` steps on; ``state`` is donated. Returns the last state and its step.

        ``saved`` is the step of the newest checkpoint, if that is another one.

        Raises:
          DivergedError: the loss is not finite any more, or a spike.
          CorruptionError: a step that was computed twice gave two results.
          CheckpointWriteError, RunWriteError: the disk is full …; earlier checkpoints stay. A checkpoint that is
            written meanwhile shows it before the next step.
        """
        settings, checkpoint = self.run.config.train, self.run.config.checkpoint
        replay_every = self.run.config.recovery.replay_every
        step = start
        self.saved = start if saved is None else saved
        self._begun = time.perf_counter()
        self._resume_clock()
        self.watchdog.beat(f"step {step + 1} was computed")
        while step < settings.steps:
            if self._must_stop(step):
                break
            with self.ledger.during("input"):
                batch = self.run.put_batch(self.skips.number(step))
            step += 1
            self.ledger.reach(step)
            if replay_every and step % replay_every == 0:
                with self.watchdog.during(f"step {step} was computed twice", "replay"):
                    self._pause()
                    state, metrics = replayed(self.train_step, state, batch, step=step)
                    if self.scaling is not None:
                        self.scaling.meter.resume()
            elif self.scaling is not None:
                state, metrics = self.scaling.meter.run(self.train_step, state, batch)
            else:
                state, metrics = self.train_step(state, batch)
            self._pending.append((step, metrics))
            while len(self._pending) > _STEPS_AHEAD:
                self._finish_oldest()
            if step == settings.steps:
                break
            evaluate = step % settings.eval_every == 0
            save = step % checkpoint.every_steps == 0
            often = checkpoint.memory_every_steps
            remember = self.remember is not None and often > 0 and step % often == 0
            if evaluate or save or remember:
                self._drain()
                self._pause()
                bits = self._evaluate(state, step) if evaluate else None
                if save or self._is_best(bits):
                    self._save(state, step, bits)
                elif remember and self.remember is not None:
                    self._write_line(step)
                    with self.ledger.during("checkpoint"):
                        self.remember(state, step, self.seconds)
                self._resume_clock()
        self._drain()
        if self.reason == "moves":
            self._ballots.settle()
            self._write_line(step)
            return state, step
        bits = self._evaluate(state, step) if self.reason != "interrupted" else None
        if step > self.saved or self._is_best(bits):
            self._save(state, step, bits)
        with self.ledger.during("checkpoint"):
            self.saves.settle()
        return state, step

    def _must_stop(self, step: int) -> bool:
        """Whether training ends before the next step; ``reason`` tells why. All processes stop before the same one."""
        limit, wish = self.run.config.train.max_seconds, _GO_ON
        cause: ScalingError | None = None
        if self.saves.failed():
            wish = _SAVE_FAILED
        elif self.stop.requested:
            wish = _INTERRUPTED + (self.stop.signal or 0)
        elif limit is not None and self.seconds >= limit:
            wish = _TIME
        elif self.scaling is not None:
            if self.scaling.meter.drains:
                self._drain()
            try:
                wish = self.scaling.asks(step)
            except ScalingError as error:
                cause, wish = error, _NO_DEVICES
        outcome = self._ballots.vote(wish)
        if outcome >= _NO_DEVICES:  # in all processes, so that none waits for another
            raise cause or ScalingError("another process finds no devices to go on with, and says why")
        if outcome >= _SAVE_FAILED:
            self.saves.settle()  # raises why, in all processes
        if outcome >= _INTERRUPTED:
            self.reason = "interrupted"
            # It may have been another process that got the signal.
            self.stop.requested, self.stop.signal = True, self.stop.signal or (outcome - _INTERRUPTED) or None
        elif outcome == _TIME:
            self.reason = "time"
        elif outcome != _GO_ON:
            self.reason = "moves"
        return outcome != _GO_ON

    def _is_best(self, bits: float | None) -> bool:
        """Whether a validation is better than all before, and that counts."""
        if bits is None or not self.run.config.checkpoint.keep_best:
            return False
        return self.best_bits is None or bits < self.best_bits

    def _pause(self) -> None:
        if self.scaling is not None:
            self.scaling.meter.pause()

    def _resume_clock(self) -> None:
        if self.scaling is not None:
            self.scaling.meter.resume()
        self.total.restart()
        self._window.restart()

    def _drain(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, metrics = self._pending.popleft()
        with contextlib.nullcontext() if self.scaling is None else self.scaling.meter.waiting():
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        tokens = self.run.batches.batch_size * self.run.batches.sequence_length
        self.total.add(tokens)
        self._window.add(tokens)
        self.last_loss = values["loss"]
        self.watchdog.beat("the next step was computed")
        self.guard.check(step, values)
        self.sound(step)
        self._line.append(values)
        self.reporter.step(step, self.last_loss)
        if step % self.run.config.train.log_every == 0 or step == self.run.config.train.steps:
            self._write_line(step)

    def _write_line(self, step: int) -> None:
        """Write the metrics of the steps since the last line; does nothing if there are none."""
        if not self._line:
            return
        means = {name: sum(v[name] for v in self._line) / len(self._line) for name in self._line[0]}
        rate = self._window.rate
        used = None if self.utilisation is None else self.utilisation.of(rate)
        entry = {
            "kind": "train",
            "step": step,
            "losses": [values["loss"] for values in self._line],
            "bits_per_byte": self._bits(means["cross_entropy"]),
            **{name: value for name, value in means.items() if math.isfinite(value)},
            "learning_rate": self._line[-1].get("learning_rate"),
            "tokens_per_second": rate,
            "utilisation": used,
            "memory": _memory(self.run.placement.devices),
            "passes": self._passes(step),
            "seconds": self.seconds,
        }
        self.log.write(entry)
        self.ledger.spent(step)
        self.reporter.log(step, entry)
        self._line.clear()
        self._window = _Meter()

    def _passes(self, step: int) -> float | None:
        """How often the data was read, if it knows."""
        passes: Callable[[int], float | None] | None = getattr(self.run.batches, "passes", None)
        return None if passes is None else passes(self.skips.number(step))

    def _evaluate(self, state: TrainState, step: int) -> float | None:
        """Bits per byte of the held-out text; None if there is none."""
        self._write_line(step)
        if not self.run.validation:
            return None
        # Queue every batch, then read: one wait instead of one per batch.
        during = self.watchdog.during(f"the model of step {step} was validated", "validation")
        with during, self.ledger.during("validation"):
            params = self.run.validated(state)
            results = [
                self.eval_step(params, state.model_state, self.run.placement.put_batch(batch))
                for batch in self.run.validation
            ]
            values = [np.float64(value) for value in jax.device_get(results)]
        counts = [_counted(batch) for batch in self.run.validation]
        bits = self._bits(float(np.average(values, weights=counts)))
        if not math.isfinite(bits):
            raise DivergedError(
                f"the validation loss became {bits} at step {step}. Lower optimizer.learning_rate."
            )
        self.last_bits = bits
        self.log.write({"kind": "validation", "step": step, "bits_per_byte": bits, "seconds": self.seconds})
        self.after_evaluation(step, bits)
        return bits

    def _bits(self, nats: float) -> float:
        """Bits per byte of a loss in nats per token."""
        return nats / math.log(2) / self.run.source.bytes_per_token

    def _save(self, state: TrainState, step: int, bits: float | None) -> None:
        self._write_line(step)
        self.log.sync()
        best = self._is_best(bits)
        during = self.watchdog.during(f"the checkpoint of step {step} was written", "checkpoint")
        with during, self.ledger.during("checkpoint"):
            self.save(state, step, self.seconds, bits, best)
        self.saved = step
        if best:
            self.best_bits = bits


def _memory(devices: Sequence[Any]) -> int | None:
    """Peak bytes of this process's fullest device or, where devices say nothing (CPU), of the process."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    peaks = [found.peak for found in device_memory(own) if found.peak is not None]
    return max(peaks) if peaks else host_memory().peak


def _counted(batch: Batch) -> float:
    """How many tokens the mean loss of a validation batch is over, relative to those of others."""
    if not isinstance(batch, dict) or "weights" not in batch:
        return 1.0
    counted = batch["weights"][:, 1:]
    if "reference" in batch:  # pairs, of which the chosen answers
        counted = counted[batch["segments"][:, 1:] == 1]
    return float(counted.sum())
