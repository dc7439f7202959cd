"""When a run takes fewer or more devices: a decision from what was measured, without devices and without a clock.

A step takes ``seconds`` from its beginning to the next one's. The host needs ``host_seconds`` of that for its own work
(reading and placing batches, writing lines) and waits for the devices in the rest; the devices compute while they are
waited for, and perhaps beside the host's work, for ``compute_seconds`` at least if a step that was run alone took so
long. Their utilization is the part of the time in which they compute. On ``n`` times as many devices a step is expected
to compute for the ``n``-th part of its time, and to last as long as the slower of the two.

Measurements are noisy, and a move costs a compilation. So a change that only utilization asks for has to be asked for
several times in a row, comes a while after the last one, and shrinking needs a utilization that is lower by a margin
than that at which growing stops. What has to be (devices that are gone, a limit that is exceeded) is done at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from capibara.errors import ConfigError, did_you_mean
from capibara.train.errors import ScalingError

__all__ = ["Load", "ScalingDecision", "ScalingPolicy", "ScalingRules"]

ScalingPolicy = Literal["cost_aware", "performance", "utilization"]
Action = Literal["grow", "shrink", "replace"]
# A number of chips that was not worth it is tried again when there is so many times as much to compute.
_HEAVIER = 1.5


@dataclass(frozen=True)
class Load:
    """What was measured over some steps on one number of chips.

    Attributes:
      step: the last of them.
      chips: devices that they ran on.
      seconds: from the beginning of a step to that of the next, on average.
      compute_seconds: of one step alone, from its call until its results are there.
      host_seconds: what the host did in each without waiting for the devices.
    """

    step: int
    chips: int
    seconds: float
    compute_seconds: float
    host_seconds: float

    @property
    def utilization(self) -> float:
        """The part of the time in which the devices computed, 0 to 1."""
        return self.busy_seconds / self.seconds if self.seconds > 0 else 1.0

    @property
    def busy_seconds(self) -> float:
        """How long they computed in a step."""
        return min(self.seconds, max(self.compute_seconds, self.seconds - self.host_seconds))

    def expected(self, chips: int) -> float:
        """The utilization on another number of chips, if a step's work is shared equally."""
        compute = self.busy_seconds * self.chips / chips
        return compute / max(compute, self.host_seconds) if compute > 0 else 0.0

    def heavier(self, than: Load) -> bool:
        """Whether there is clearly more to compute for what the host does than at another time."""
        now = self.busy_seconds * self.chips * than.host_seconds
        return now > _HEAVIER * than.busy_seconds * than.chips * self.host_seconds


@dataclass(frozen=True)
class ScalingDecision:
    """A change of the number of chips, or of the chips.

    Attributes:
      step: optimizer steps that were taken before it.
      seconds: the time, of the clock that was given.
      action: ``"grow"``, ``"shrink"``, or ``"replace"`` by as many others.
      before, after: the number of chips.
      reason: in words, with the figures that led to it.
      utilization: as measured; None if it did not matter.
      usd_per_hour: what ``after`` chips cost; None without a price.
    """

    step: int
    seconds: float
    action: Action
    before: int
    after: int
    reason: str
    utilization: float | None
    usd_per_hour: float | None

    def __str__(self) -> str:
        cost = "" if self.usd_per_hour is None else f" (${self.usd_per_hour:,.2f} per hour)"
        return (
            f"step {self.step:,}: {self.action} from {self.before} to {self.after} chips{cost}: {self.reason}"
        )


class ScalingRules:
    """Decides for one run.

    Args:
      min_chips, max_chips: the numbers of chips that a run may have.
      target_utilization: above 0, at most 1.
      usd_per_chip_hour: what a chip costs; None: not known.
      cost_limit_per_hour: US dollars; None: no limit.
      policy: ``"utilization"`` keeps the devices as busy as the target says: it grows while more chips would still be,
        and shrinks when they wait for the host. ``"cost_aware"`` does the same, and goes back when growing has
        brought less than the target's part of the added chips' speed: then a step costs more. ``"performance"`` grows
        in the same way, and goes back only when that has made steps slower.
      patience: how many measurements in a row have to ask for the same change.
      cooldown: seconds between a change and the next one that is not forced.
      margin: how far utilization has to be below the target before a run shrinks.

    Raises:
      ConfigError: an argument is out of range, or ``min_chips`` already cost more than the limit.
    """

    def __init__(
        self,
        min_chips: int,
        max_chips: int,
        target_utilization: float,
        *,
        usd_per_chip_hour: float | None = None,
        cost_limit_per_hour: float | None = None,
        policy: ScalingPolicy = "cost_aware",
        patience: int = 2,
        cooldown: float = 60.0,
        margin: float = 0.05,
    ) -> None:
        for name, count in (("min_chips", min_chips), ("max_chips", max_chips), ("patience", patience)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}: got {count!r}, expected an integer of at least 1")
        if max_chips < min_chips:
            raise ConfigError(f"max_chips: got {max_chips}, expected at least min_chips={min_chips}")
        if not _number(target_utilization) or not 0 < target_utilization <= 1:
            raise ConfigError(
                f"target_utilization: got {target_utilization!r}, expected a number above 0, up to 1"
            )
        for name, value in (("cooldown", cooldown), ("margin", margin)):
            if not _number(value) or value < 0:
                raise ConfigError(f"{name}: got {value!r}, expected a number of at least 0")
        known = get_args(ScalingPolicy)
        if policy not in known:
            raise ConfigError(
                f"scaling_policy: got {policy!r}, expected one of {', '.join(known)}.{did_you_mean(str(policy), known)}"
            )
        if cost_limit_per_hour is not None:
            if not _number(cost_limit_per_hour) or cost_limit_per_hour <= 0:
                raise ConfigError(
                    f"cost_limit_per_hour: got {cost_limit_per_hour!r}, expected US dollars above 0"
                )
            if usd_per_chip_hour is None:
                raise ConfigError("cost_limit_per_hour: needs a price; give usd_per_chip_hour")
            if min_chips * usd_per_chip_hour > cost_limit_per_hour:
                raise ConfigError(
                    f"cost_limit_per_hour: {cost_limit_per_hour:g} is less than what min_chips={min_chips} cost: "
                    f"${min_chips * usd_per_chip_hour:,.2f} per hour. Raise it, or lower min_chips"
                )
        self.min_chips, self.max_chips, self.target = min_chips, max_chips, target_utilization
        self.price, self.cost_limit, self.policy = usd_per_chip_hour, cost_limit_per_hour, policy
        self.patience, self.cooldown, self.margin = patience, cooldown, margin
        self._wanted: int | None = None
        self._last: float | None = None
        self._asked: tuple[str, int] = ("", 0)
        self._loads: dict[int, Load] = {}
        self._not_worth: dict[int, Load] = {}

    def allows(self, chips: int) -> bool:
        """Whether so many chips are within the limits."""
        affordable = self.cost_limit is None or self.price is None or chips * self.price <= self.cost_limit
        return self.min_chips <= chips <= self.max_chips and affordable

    def decide(
        self,
        *,
        now: float,
        step: int,
        chips: int,
        counts: Sequence[int],
        lost: int = 0,
        load: Load | None = None,
    ) -> ScalingDecision | None:
        """What to change before the next step.

        Args:
          now: seconds, of any clock that does not go back.
          chips: the number of devices that the run is on.
          counts: the numbers that it could have of the devices that there are now.
          lost: how many of those that it is on are gone.
          load: a new measurement, if there is one.

        Raises:
          ScalingError: no number of chips is within the limits.
        """
        allowed = sorted(count for count in counts if self.allows(count))
        if not allowed:
            raise ScalingError(
                f"no number of chips is within the limits: a mesh can have {_listed(counts)} of the devices that there "
                f"are, and {self._limits()} are allowed. What was trained so far is kept"
            )
        first = self._wanted is None
        wanted = self._wanted = chips if self._wanted is None else self._wanted
        at_most = [count for count in allowed if count <= wanted]
        target = at_most[-1] if at_most else allowed[0]
        if lost or chips not in allowed:
            if not lost:  # there is nothing to go back to
                self._wanted = target
            return self._change(now, step, chips, target, self._why_forced(chips, counts, lost, first))
        if target > chips:
            return self._come_back(now, step, chips, target)
        if self._asked[0] == "back":
            self._asked = ("", 0)
        return None if load is None else self._of_load(now, step, chips, allowed, load)

    def _of_load(
        self, now: float, step: int, chips: int, allowed: Sequence[int], load: Load
    ) -> ScalingDecision | None:
        self._loads[chips] = load
        where = allowed.index(chips)
        up = allowed[where + 1] if where + 1 < len(allowed) else None
        down = allowed[where - 1] if where else None
        used = load.utilization
        wish: tuple[str, int, str] | None = None
        if (disappointed := self._disappointed(chips, load, allowed)) is not None:
            wish = ("back off", *disappointed)
        elif down is not None and self.policy != "performance" and used < self.target - self.margin:
            words = f"the devices compute {used:.0%} of the time, less than the target of {self.target:.0%}"
            wish = ("shrink", down, words)
        elif up is not None and self._worth(up, load) and load.expected(up) >= self.target:
            words = (
                f"the devices compute {used:.0%} of the time, and the host can feed {up} of them at the target of "
                f"{self.target:.0%}"
            )
            wish = ("grow", up, words)
        if wish is None:
            self._asked = ("", 0)
            return None
        kind, after, reason = wish
        self._asked = (kind, self._asked[1] + 1 if self._asked[0] == kind else 1)
        if self._asked[1] < self.patience or self._cooling(now):
            return None
        if kind != "grow":
            self._not_worth[chips] = load
        self._wanted = after
        return self._change(now, step, chips, after, reason, load)

    def _worth(self, chips: int, load: Load) -> bool:
        """Whether so many chips may be tried: they were not yet in vain, or there is more to compute than then."""
        before = [one for count, one in self._not_worth.items() if count <= chips]
        return all(load.heavier(one) for one in before)

    def _disappointed(self, chips: int, load: Load, allowed: Sequence[int]) -> tuple[int, str] | None:
        """To how many chips the run should go back, on which it was measured too, and why."""
        before = [self._loads[n] for n in allowed if n < chips and n in self._loads]
        if self.policy == "utilization" or not before:
            return None
        old = max(before, key=lambda one: one.chips)
        gained, added = old.seconds / load.seconds if load.seconds > 0 else math.inf, chips / old.chips
        if self.policy == "performance":
            if gained < 1:
                words = (
                    f"a step takes {load.seconds:.3g} s, and took {old.seconds:.3g} s on {old.chips} chips"
                )
                return old.chips, words
            return None
        if gained >= self.target * added:
            return None
        words = f"{added:.3g} times as many chips as {old.chips} made steps {gained:.2f} times as fast"
        return old.chips, f"{words}, less than {self.target:.0%} of what they cost"

    def _come_back(self, now: float, step: int, chips: int, target: int) -> ScalingDecision | None:
        """Devices that were gone are there again."""
        self._asked = ("back", self._asked[1] + 1 if self._asked[0] == "back" else 1)
        if self._asked[1] < self.patience or self._cooling(now):
            return None
        return self._change(now, step, chips, target, "devices are there again")

    def _why_forced(self, chips: int, counts: Sequence[int], lost: int, first: bool) -> str:
        if lost:
            return f"{lost} of {chips} devices are gone"
        if chips < self.min_chips:
            return f"fewer than min_chips={self.min_chips}"
        if chips > self.max_chips:
            return f"more than max_chips={self.max_chips}"
        if not self.allows(chips):
            return f"more than cost_limit_per_hour={self.cost_limit:g}"
        return f"{chips} chips cannot share a batch of this size" if first else "no mesh has as many devices"

    def _cooling(self, now: float) -> bool:
        return self._last is not None and now - self._last < self.cooldown

    def _change(
        self, now: float, step: int, chips: int, after: int, reason: str, load: Load | None = None
    ) -> ScalingDecision:
        self._last, self._asked = now, ("", 0)
        action: Action = "grow" if after > chips else "shrink" if after < chips else "replace"
        cost = None if self.price is None else self.price * after
        used = None if load is None else load.utilization
        return ScalingDecision(step, now, action, chips, after, reason, used, cost)

    def _limits(self) -> str:
        limits = f"{self.min_chips} to {self.max_chips} chips"
        if self.cost_limit is not None and self.price is not None:
            limits += f" for at most ${self.cost_limit:g} per hour at ${self.price:g} each"
        return limits


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(counts))) or "none"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
