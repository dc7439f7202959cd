"""Rules for alerts: a bound that a metric must not pass for a time, and when it is well again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from capibara.errors import CapibaraError, did_you_mean
from capibara.observe.monitor.sources import METRICS, Reading

__all__ = ["DEFAULT_THRESHOLDS", "Alert", "AlertRule", "MonitorError", "RuleState", "rules_of"]

DEFAULT_THRESHOLDS: Mapping[str, float] = MappingProxyType(
    {"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3}
)

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
      for_seconds: so long without a break it must be beyond it. A value that is not known is a break.
      clears_at: the alert ends when the metric is on this side of the bound again; by default 5 % within it, so that a
        metric that swings about the bound is one event.
      clear_seconds: so long without a break it must be there before the alert ends.

    Raises:
      MonitorError: an unknown metric, or a number that makes no sense.
    """

    metric: str
    bound: float
    below: bool = False
    for_seconds: float = 2.0
    clears_at: float | None = None
    clear_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.metric not in METRICS:
            hint = did_you_mean(str(self.metric), METRICS)
            raise MonitorError(f"metric: got {self.metric!r}, expected one of {', '.join(METRICS)}.{hint}")
        for name in ("bound", "for_seconds", "clears_at", "clear_seconds"):
            value = getattr(self, name)
            if name == "clears_at" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise MonitorError(f"{name}: got {value!r} for {self.metric}, expected a finite number")
        if self.metric in _SHARES and not 0 <= self.bound <= 1:
            raise MonitorError(
                f"bound: got {self.bound!r} for {self.metric}, expected a share from 0 to 1 (0.9 for 90 %)"
            )
        for name in ("for_seconds", "clear_seconds"):
            if (value := getattr(self, name)) < 0:
                raise MonitorError(f"{name}: got {value!r}, expected seconds, at least 0")
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
        margin = 0.05 * abs(self.bound)
        if not self.below:
            return self.bound - margin
        # A share is never above 1.
        return min(1.0, self.bound + margin) if self.metric in _SHARES else self.bound + margin

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
      where: the device that the value is of, such as ``TPU_0``; empty if it is not of one device.
    """

    rule: AlertRule
    value: float
    since: float
    began: float
    ended: float | None = None
    where: str = ""

    def __str__(self) -> str:
        rule = self.rule
        sign = "<" if rule.below else ">"
        text = (
            f"{rule.metric} {_shown(rule.metric, self.value)} {sign} {_shown(rule.metric, rule.bound)} "
            f"for {self.began - self.since:.1f} s"
        )
        if self.where:
            text += f" on {self.where}"
        return text if self.ended is None else f"{text}, well again after {self.ended - self.began:.1f} s"


def _shown(metric: str, value: float) -> str:
    if metric in _SHARES:
        return f"{100 * value:.1f} %"
    if metric == "temperature":
        return f"{value:.1f} °C"
    return f"{value:.2f} cores" if metric == "process_cpu" else f"{value:,.0f} bytes"


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
    made = []
    for name, bound in (thresholds or {}).items():
        try:
            made.append(
                AlertRule(name, bound, below=name in _BELOW, for_seconds=10.0 if name in _BELOW else 2.0)
            )
        except MonitorError as error:
            raise MonitorError(f"alert_thresholds[{name!r}]: {error}") from None
    for one in rules:
        if not isinstance(one, AlertRule):
            raise MonitorError(f"rules: got {one!r}, expected an AlertRule")
    return (*made, *rules)


class RuleState:
    """A rule, and where it stands. Durations are counted by a monotonic clock: the time of day may be set."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.active: Alert | None = None
        self._since: float | None = None  # beyond the bound, or well again if there is an alert
        self._began = 0.0

    def update(self, reading: Reading, now: float) -> Alert | None:
        """The alert that begins or ends with a reading at a monotonic time; None if nothing changes."""
        rule, value = self.rule, reading.values.get(self.rule.metric)
        alert = self.active
        turns = value is not None and (rule.beyond(value) if alert is None else rule.well(value))
        if value is None or not turns:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        lasted = now - self._since
        if lasted < (rule.for_seconds if alert is None else rule.clear_seconds):
            return None
        self._since = None
        if alert is not None:
            self.active = None
            return replace(alert, ended=alert.began + (now - self._began))
        self._began = now
        where = reading.where.get(rule.metric, "")
        self.active = Alert(rule, value, reading.time - lasted, reading.time, where=where)
        return self.active
