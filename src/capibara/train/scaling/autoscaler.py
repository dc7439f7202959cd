"""``TpuAutoScaler``: a run that takes fewer or more devices while it trains.

The trainers ask it before every step (:class:`Controller`). It looks which devices there are, takes the measurements of
the loop, lets :class:`~capibara.train.scaling.rules.ScalingRules` decide, and keeps what was decided and why. A trainer
that is told to move does so between two steps: the state goes to the new devices, and the next batch is the one that
would have come anyway.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import jax

from capibara.errors import ConfigError
from capibara.hardware import Chip, UnknownPriceError, detect_chip, get_price
from capibara.train.errors import ScalingError
from capibara.train.placement import equal_share
from capibara.train.recovery.failures import answering, may_pass
from capibara.train.scaling.meter import StepMeter
from capibara.train.scaling.rules import Load, ScalingDecision, ScalingPolicy, ScalingRules

__all__ = ["Controller", "TpuAutoScaler", "active_scaler"]

_LOG = logging.getLogger("capibara.train.scaling")
_ACTIVE: ContextVar[TpuAutoScaler | None] = ContextVar("capibara_autoscaler", default=None)
# What an emulated device costs.
_ASSUMED = "tpu-v4"


def active_scaler() -> TpuAutoScaler | None:
    """The scaler of the ``managed_scaling()`` context that the caller is in; None outside of one."""
    return _ACTIVE.get()


class TpuAutoScaler:
    """Changes the number of devices of the trainings that run in its context.

    Args:
      min_chips, max_chips: the numbers of devices that a training may have; a device of JAX counts as a chip.
      target_utilization: the part of the time in which devices shall compute, 0 to 1.
      cost_limit_per_hour: US dollars that all devices together may cost; None: no limit.
      scaling_policy: ``"cost_aware"``, ``"performance"`` or ``"utilization"``; see
        :class:`capibara.train.scaling.rules.ScalingRules`.
      chip: whose price counts (:func:`capibara.hardware.get_price`); by default that of the devices, and ``tpu-v4`` for
        emulated ones.
      term, region: of the price.
      devices: called before every step: the devices that there are at that moment; by default ``jax.devices``. Those
        that a training runs on and that are missing are left, and taken again when they are back.
      every: steps between two measurements.
      patience: measurements in a row that have to ask for the same change.
      cooldown: seconds between a change and the next one that is not forced.
      clock: seconds; for tests.

    Attributes:
      decisions: what was changed, oldest first; history: what was measured.

    Raises:
      ConfigError: an argument is out of range, or ``min_chips`` already cost more than the limit.
      ChipError: ``chip`` is not known. PriceError: ``term`` is not.
      UnknownPriceError: a limit or a region is given, and the price is not known. What depends on the devices' own
        chip is raised when training begins.
    """

    def __init__(
        self,
        min_chips: int = 1,
        max_chips: int = 32,
        target_utilization: float = 0.8,
        cost_limit_per_hour: float | None = None,
        scaling_policy: ScalingPolicy = "cost_aware",
        *,
        chip: str | None = None,
        term: str = "on-demand",
        region: str | None = None,
        devices: Callable[[], Sequence[Any]] | None = None,
        every: int = 20,
        patience: int = 2,
        cooldown: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every: got {every!r}, expected an integer of at least 1")
        if devices is not None and not callable(devices):
            raise ConfigError(
                f"devices: got {type(devices).__name__}, expected a function that gives the devices that there are, "
                "as devices=jax.devices"
            )
        self.source = jax.devices if devices is None else devices
        self.every, self.clock = every, clock
        self._chip, self._term, self._region = chip, term, region
        self._settings: dict[str, Any] = {
            "min_chips": min_chips,
            "max_chips": max_chips,
            "target_utilization": target_utilization,
            "policy": scaling_policy,
            "patience": patience,
            "cooldown": cooldown,
        }
        self._limit = cost_limit_per_hour
        self._decisions: list[ScalingDecision] = []
        self._history: list[Load] = []
        self._used = False
        # Say what is wrong with them. What the devices cost is known when there are some.
        ScalingRules(**self._settings, usd_per_chip_hour=0.0, cost_limit_per_hour=cost_limit_per_hour)
        with suppress(UnknownPriceError):
            get_price(chip or _ASSUMED, term=term)
        if chip is not None:
            self.rules_for(None)

    @property
    def decisions(self) -> tuple[ScalingDecision, ...]:
        """What was changed, oldest first."""
        return tuple(self._decisions)

    @property
    def history(self) -> tuple[Load, ...]:
        """What was measured, oldest first."""
        return tuple(self._history)

    @contextmanager
    def managed_scaling(self) -> Iterator[TpuAutoScaler]:
        """Trainings inside it are scaled: ``TpuDistributedTrainer.train`` and :func:`capibara.train.train`.

        Raises:
          ConfigError: it is inside another scaler's context.
        """
        if _ACTIVE.get() is not None:
            raise ConfigError("managed_scaling(): another one is active here. Leave that context first")
        self._used = False
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)
        if not self._used:
            warnings.warn(
                "managed_scaling(): nothing was trained inside it by TpuDistributedTrainer.train or "
                "capibara.train.train, so nothing was scaled",
                stacklevel=3,
            )

    def devices(self) -> list[Any]:
        """The devices that there are at this moment.

        Raises:
          ConfigError: the function that was given for it gave something else.
        """
        found = self.source()
        if not isinstance(found, Sequence) or not all(hasattr(one, "platform") for one in found):
            raise ConfigError(
                f"devices: the function gave {found!r:.200}, expected a list of devices, as jax.devices() is"
            )
        return list(found)

    def rules_for(self, chip: Chip | None) -> ScalingRules:
        """What decides for one training, on devices of this chip; None: emulated ones.

        Raises:
          UnknownPriceError: a limit or a region is given, and the price is not known.
          ConfigError: ``min_chips`` cost more than the limit.
        """
        usd = None
        try:
            price = get_price(self._chip or chip or _ASSUMED, term=self._term, region=self._region)
            # A device may be one core of a chip.
            cores = chip.cores_per_chip if chip is not None and chip.view == "core" else 1
            usd = price.usd_per_chip_hour / (cores or 1)
        except UnknownPriceError:
            if self._limit is not None or self._region is not None:
                raise
        return ScalingRules(**self._settings, usd_per_chip_hour=usd, cost_limit_per_hour=self._limit)

    def controller(
        self,
        devices: Sequence[Any],
        counts: Callable[[Sequence[Any]], Sequence[int]],
        *,
        note: Callable[[str], None] | None = None,
    ) -> Controller:
        """What a trainer asks.

        Args:
          devices: those that it begins on.
          counts: of a list of devices, how many of them it could run on.
          note: told of each decision.
        """
        self._used = True
        return Controller(self, devices, counts, note=note)

    def record(self, entry: ScalingDecision | Load) -> None:
        """Keep a decision or a measurement."""
        if isinstance(entry, Load):
            self._history.append(entry)
        else:
            self._decisions.append(entry)
            _LOG.info("%s", entry)


class Controller:
    """One training under a :class:`TpuAutoScaler`.

    Attributes:
      devices: those that it runs on, or that it shall move to, once :meth:`asks` says so.
    """

    def __init__(
        self,
        scaler: TpuAutoScaler,
        devices: Sequence[Any],
        counts: Callable[[Sequence[Any]], Sequence[int]],
        *,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self._scaler, self._counts, self._note = scaler, counts, note
        self.moved()
        self._rules = scaler.rules_for(_chip_of(self.devices[0]))
        self._failed: set[Any] = set()

    def asks(self, step: int) -> int:
        """How many devices the training shall move to before the step after ``step`` others; 0: it stays.

        Raises:
          ScalingError: it cannot go on with the devices that there are.
        """
        load = self.meter.take(step, len(self.devices))
        if load is not None:
            self._scaler.record(load)
        available = [device for device in self._scaler.devices() if device not in self._failed]
        there = set(available)
        decision = self._rules.decide(
            now=self._scaler.clock(),
            step=step,
            chips=len(self.devices),
            counts=self._counts(available) if available else (),
            lost=sum(device not in there for device in self.devices),
            load=load,
        )
        if decision is None:
            return 0
        self._scaler.record(decision)
        if self._note is not None:
            self._note(f"scaling at {decision}")
        self.devices = tuple(equal_share(available, decision.after))
        self.moved()
        return decision.after

    def moved(self) -> None:
        """The training runs on ``devices`` now."""
        self.meter = StepMeter(self._scaler.every, inline=self.devices[0].platform == "cpu")

    def after(self, error: RuntimeError, step: int) -> None:
        """A step failed: leave out the devices that do not answer any more, if there are such.

        Raises:
          JaxRuntimeError: ``error`` itself, if all devices answer, or it will not pass.
          ScalingError: the training cannot go on with those that answer.
        """
        if not may_pass(error):
            raise error
        good = set(answering(self.devices, warn=self._note))
        gone = [device for device in self.devices if device not in good]
        if not gone:
            raise error
        self._failed.update(gone)
        if not self.asks(step):
            raise ScalingError(f"{len(gone)} devices are gone, and the run was not moved") from error


def _chip_of(device: Any) -> Chip | None:
    """The chip of a device that is not an emulated one."""
    return None if device.platform == "cpu" else detect_chip(device)
