"""A profile beside the step that ``capibara plan`` predicted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError
from capibara.files import read_bounded
from capibara.observe.errors import ProfileError
from capibara.observe.profile.result import Profile
from capibara.plan import parse_target

__all__ = ["AgainstPlan", "PlannedStep", "compare_with_plan", "read_planned_step"]

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class PlannedStep:
    """A step as a plan predicts it.

    Attributes:
      work: what is planned, as text.
      topology: the slice (``"v4:2x2x4"``). chip: its chip's name in the catalogue. devices: of the slice.
      seconds: of one step. low, high: its range; None in a lockfile.
      communication_seconds: collectives beside which nothing else runs; None in a lockfile.
      flops: of one device in one step; None if it is not known. They are the model's own, without what is computed
        again (rematerialisation), or, in a lockfile, those of the compiled program.
      bytes: that one device moves between itself and its memory; None except in a lockfile.
      peak_memory_bytes: of one device.
    """

    work: str
    topology: str
    chip: str
    devices: int
    seconds: float
    low: float | None
    high: float | None
    communication_seconds: float | None
    flops: float | None
    bytes: float | None
    peak_memory_bytes: float


@dataclass(frozen=True)
class AgainstPlan:
    """A profile's longest program beside a plan's step. Figures are of one run on one device.

    Attributes:
      plan: the prediction.
      program: that took most time. runs: executions, one for each device. devices: that ran it.
      seconds: in its operations.
      wall_seconds: from one run to the next, on average: the region's time over the runs of one device.
      communication_seconds: collectives beside which nothing else ran, likewise; None if it was not captured.
      flops, bytes: as the profile counts them; None if it does not know them.
      peak_memory_bytes: in the region, of the fullest device; None likewise.
      notes: why the two are not the same, as text.
    """

    plan: PlannedStep
    program: str
    runs: int
    devices: int
    seconds: float
    wall_seconds: float
    communication_seconds: float | None
    flops: float | None
    bytes: float | None
    peak_memory_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def ratios(self) -> dict[str, float | None]:
        """Measured over predicted, by the figure's name; None where one of the two is not known, or 0."""
        pairs = {
            "seconds": (self.seconds, self.plan.seconds),
            "wall_seconds": (self.wall_seconds, self.plan.seconds),
            "communication_seconds": (self.communication_seconds, self.plan.communication_seconds),
            "flops": (self.flops, self.plan.flops),
            "bytes": (self.bytes, self.plan.bytes),
            "peak_memory_bytes": (self.peak_memory_bytes, self.plan.peak_memory_bytes),
        }
        return {
            name: measured / predicted if measured is not None and predicted else None
            for name, (measured, predicted) in pairs.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "ratios": self.ratios}

    def __str__(self) -> str:
        plan, ratios = self.plan, self.ratios
        span = "" if plan.low is None or plan.high is None else f" ({_ms(plan.low)} to {_ms(plan.high)})"
        rows = [
            ("time in operations", _ms(plan.seconds) + span, _ms(self.seconds), "seconds"),
            ("time from run to run", _ms(plan.seconds), _ms(self.wall_seconds), "wall_seconds"),
            (
                "communication alone",
                _ms(plan.communication_seconds),
                _ms(self.communication_seconds),
                "communication_seconds",
            ),
            ("FLOPs", _scaled(plan.flops, "FLOP"), _scaled(self.flops, "FLOP"), "flops"),
            ("bytes moved", _scaled(plan.bytes, "B"), _scaled(self.bytes, "B"), "bytes"),
            (
                "peak memory",
                _scaled(plan.peak_memory_bytes, "B"),
                _scaled(self.peak_memory_bytes, "B"),
                "peak_memory_bytes",
            ),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (1, 2)]
        lines = [
            f"  {self.program}, one run on one device; the plan: {plan.work or plan.topology}",
            f"  {'':<22} {'predicted':>{max(9, widths[0])}}  {'measured':>{max(8, widths[1])}}  ratio",
        ]
        for label, predicted, measured, name in rows:
            ratio = ratios[name]
            shown = "" if ratio is None else f"{ratio:.3g}"
            lines.append(
                f"  {label:<22} {predicted:>{max(9, widths[0])}}  {measured:>{max(8, widths[1])}}  {shown}".rstrip()
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.3f} ms"


def _scaled(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    power = min(5, int(math.log10(value)) // 3) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def compare_with_plan(profile: Profile, plan: PlannedStep) -> AgainstPlan:
    """Set the program of a profile that takes most time beside a plan's step.

    Raises:
      ProfileError: the profile has no program.
    """
    step = max((one for one in profile.programs if one.runs), key=lambda one: one.seconds, default=None)
    if step is None:
        raise ProfileError(
            f"{profile.name}: got a profile without a program that ran, expected one to set beside the plan: profile "
            "a step with capture_flops"
        )
    turns = step.runs / profile.devices
    exposed = profile.communication_seconds
    known = profile.flops is not None
    notes = []
    if profile.chip != plan.chip:
        notes.append(
            f"the plan is for {plan.devices} × {plan.chip}, the profile is of {profile.devices} × {profile.chip}: the "
            "ratios say nothing about the plan's accuracy"
        )
    elif profile.devices != plan.devices:
        notes.append(
            f"the plan is for {plan.devices} devices, and {profile.devices} of this process ran: the others are other "
            "processes', or the layout is another one"
        )
    if profile.compiled:
        notes.append(
            f"{profile.compiled} programs were compiled in the region, in {_ms(profile.compile_seconds)}: this is "
            "part of the time from run to run"
        )
    others = sum(one.seconds for one in profile.programs) - step.seconds
    if others > 0.1 * step.seconds:
        notes.append(f"other programs took {_ms(others / step.runs)} beside each run")
    if plan.low is not None:
        notes.append("the plan's FLOPs are the model's own, without what is computed again")
    return AgainstPlan(
        plan=plan,
        program=step.name,
        runs=step.runs,
        devices=profile.devices,
        seconds=step.seconds / step.runs,
        wall_seconds=profile.wall_seconds / turns,
        communication_seconds=None if exposed is None else exposed / turns,
        flops=step.flops / step.runs if known else None,
        bytes=step.bytes / step.runs if known else None,
        peak_memory_bytes=profile.peak_memory_bytes,
        notes=tuple(notes),
    )


def read_planned_step(path: str | os.PathLike[str]) -> PlannedStep:
    """Read the output of ``capibara plan --json`` (its best candidate), or a lockfile of ``capibara plan --lock``.

    Raises:
      ProfileError: there is no such file, or it is something else, too large or damaged.
    """
    shown = str(path)[:200]
    try:
        text = read_bounded(Path(path), _MOST_BYTES).decode()
    except (OSError, ValueError, CapibaraError) as error:  # ValueError: not UTF-8; the path holds a NUL
        raise ProfileError(
            f"plan: {shown!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        data = _mapping(json.loads(text))
        if data.get("fits") is False:
            raise ValueError("it says that nothing fits")
        if "options" in data:
            raise ValueError("it plans serving, and a profile is set beside a step")
        return _of_candidate(data) if "candidates" in data else _of_lock(data)
    except KeyError as error:
        raise ProfileError(f"plan: {shown!r} is not a valid plan file: missing {error}. {_REMEDY}") from None
    except (ValueError, TypeError, RecursionError, CapibaraError) as error:
        raise ProfileError(f"plan: {shown!r} is not a valid plan file: {error}. {_REMEDY}") from None


_REMEDY = "Write one with capibara plan --json > FILE"


def _of_candidate(data: Mapping[str, Any]) -> PlannedStep:
    candidates = data["candidates"]
    if not isinstance(candidates, list) or not candidates:
        raise ValueError("it has no candidate")
    best = _mapping(candidates[0])
    target = parse_target(_text(best["topology"]), best["view"], rented=False)
    time = _mapping(best["time"])
    flops = best["model_flops"]
    return PlannedStep(
        work=_text(data["work"]),
        topology=target.text,
        chip=target.chip.name,
        devices=target.num_devices,
        seconds=_number(best["step_seconds"], "step_seconds", least=1e-12),
        low=_number(time["low"], "low"),
        high=_number(time["high"], "high"),
        communication_seconds=_number(time["communication"], "communication"),
        flops=None if flops is None else _number(flops, "model_flops") / target.num_devices,
        bytes=None,
        peak_memory_bytes=_number(best["hbm_bytes"], "hbm_bytes"),
    )


def _of_lock(data: Mapping[str, Any]) -> PlannedStep:
    target = parse_target(_text(data["topology"]), data["view"], rented=False)
    figures = _mapping(data.get("figures", {}))  # lockfiles of earlier versions have none
    flops, moved = figures.get("FLOPs"), figures.get("bytes moved")
    return PlannedStep(
        work=_text(data["work"]),
        topology=target.text,
        chip=target.chip.name,
        devices=target.num_devices,
        seconds=_number(data["step_seconds"], "step_seconds", least=1e-12),
        low=None,
        high=None,
        communication_seconds=None,
        flops=None if flops is None else _number(flops, "FLOPs"),
        bytes=None if moved is None else _number(moved, "bytes moved"),
        peak_memory_bytes=_number(data["hbm_bytes"], "hbm_bytes"),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"got {value!r:.100}, expected an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise ValueError(f"got {value!r:.100}, expected printable text")
    return value


def _number(value: Any, name: str, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**90:
        raise ValueError(f"{name}: got {value!r:.100}, expected a number of at least {least:g}")
    return float(value)
