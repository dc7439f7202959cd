"""Rules for alerts: a bound that a metric must not pass for a time, and when it is well again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from capibara.errors import CapibaraError, did_you_mean
from capibara.observe.monitor.sources import METRICS, Reading

__all__ = ["Alert", "AlertRule", "MonitorError", "RuleState", "rules_of"]

_BELOW = frozenset({"utilization"})
_SHARES = frozenset({"memory_usage", "utilization", "host_cpu", "host_memory_usage"})


class MonitorError(CapibaraError, ValueError):
    """A monitor, or one of its rules, cannot be made as asked."""


@dataclass(frozen=True)
class AlertRule:
    """An alert is due when a metric stays beyond a bound for some seconds.

    Attributes:
      metric: a name of :data:`capibara.observe.monitor.sources.METRICS`.
      bound: shares are from 0 to 1, temperatures in °C, sizes in bytes.
      below: whether the metric must not be below the bound (for utilisation), instead of above.
      for_seconds: so long without a break it must be beyond it.
      clears_at: the alert ends when the metric is on this side of the bound again; by default 5 % within it, so that a
        metric that swings about the bound is one event.

    Raises:
      MonitorError: an unknown metric, or a number that makes no sense.
    """

    metric: str
    bound: float
    below: bool = False
    for_seconds: float = 2.0
    clears_at: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            hint = did_you_mean(str(self.metric), METRICS)
            raise MonitorError(f"metric: got {self.metric!r}.{hint} Known: {', '.join(METRICS)}")
        for name in ("bound", "for_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise MonitorError(f"{name}: got {value!r} for {self.metric}, expected a number")
        if self.metric in _SHARES and not 0 <= self.bound <= 1:
            raise MonitorError(
                f"bound: got {self.bound!r} for {self.metric}, expected a share from 0 to 1 (0.9 for 90 %)"
            )
        if self.for_seconds < 0:
            raise MonitorError(f"for_seconds: got {self.for_seconds!r}, expected seconds, from 0 on")
        clears = self.end
        if (clears < self.bound) if self.below else (clears > self.bound):
            side = "above" if self.below else "below"
            raise MonitorError(
                f"clears_at: got {clears!r}, expected a number {side} the bound {self.bound!r}, or equal to it"
            )

    @property
    def end(self) -> float:
        """The bound at which an alert ends."""
        if self.clears_at is not None:
            return self.clears_at
        return self.bound * (1.05 if self.below else 0.95)

    def beyond(self, value: float) -> bool:
        """Whether a value is beyond the bound."""
        return value < self.bound if self.below else value > self.bound

    def well(self, value: float) -> bool:
        """Whether a value ends an alert."""
        return value >= self.end if self.below else value <= self.end


@dataclass(frozen=True)
class Alert:
    """One event: from when a rule was broken for long enough, until its metric is well again.

    Attributes:
      rule: that was broken.
      value: of the metric when the alert began.
      since: when the metric went beyond the bound, in seconds since 1970. began: the alert.
      ended: when it was well again; None while the alert lasts.
    """

    rule: AlertRule
    value: float
    since: float
    began: float
    ended: float | None = None

    def __str__(self) -> str:
        rule = self.rule
        sign = "<" if rule.below else ">"
        text = (
            f"{rule.metric} {_shown(rule.metric, self.value)} {sign} {_shown(rule.metric, rule.bound)} "
            f"for {self.began - self.since:.1f} s"
        )
        return text if self.ended is None else f"{text}, well again after {self.ended - self.began:.1f} s"


def _shown(metric: str, value: float) -> str:
    if metric in _SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.1f} °C" if metric == "temperature" else f"{value:,.0f} bytes"


def rules_of(
    thresholds: Mapping[str, float] | None, rules: tuple[AlertRule, ...] = ()
) -> tuple[AlertRule, ...]:
    """Rules from ``{"memory_usage": 0.9, "utilization": 0.3}``: utilisation must not be below, the others not above.

    Low utilisation counts after 10 s: a program begins by compiling, and waits for files.

    Raises:
      MonitorError: an unknown metric, or a bound that makes no sense.
    """
    if thresholds is not None and not isinstance(thresholds, Mapping):
        raise MonitorError(
            f'alert_thresholds: got {thresholds!r}, expected a dictionary such as {{"memory_usage": 0.9}}'
        )
    made = [
        AlertRule(name, bound, below=name in _BELOW, for_seconds=10.0 if name in _BELOW else 2.0)
        for name, bound in (thresholds or {}).items()
    ]
    for one in rules:
        if not isinstance(one, AlertRule):
            raise MonitorError(f"rules: got {one!r}, expected an AlertRule")
    return (*made, *rules)


@dataclass
class RuleState:
    """A rule, and where it stands."""

    rule: AlertRule
    since: float | None = None
    active: Alert | None = field(default=None)

    def update(self, reading: Reading) -> Alert | None:
        """The alert that begins or ends with a reading; None if nothing changes. An unknown value changes nothing."""
        value = reading.values.get(self.rule.metric)
        if value is None:
            return None
        if self.active is not None:
            if not self.rule.well(value):
                return None
            old = self.active
            self.active = self.since = None
            return Alert(old.rule, old.value, old.since, old.began, reading.time)
        if not self.rule.beyond(value):
            self.since = None
            return None
        if self.since is None:
            self.since = reading.time
        if reading.time - self.since < self.rule.for_seconds:
            return None
        self.active = Alert(self.rule, value, self.since, reading.time)
        return self.active
