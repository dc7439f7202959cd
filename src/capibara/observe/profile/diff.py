"""Compare two profiles: which source line made the difference, which programs were compiled anew, and why."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from capibara.observe.profile.arguments import Recompiled, changes_between, nearest_changes, summarised
from capibara.observe.profile.lines import Line, edited_lines, same_lines
from capibara.observe.profile.planned import AgainstPlan, PlannedStep, compare_with_plan
from capibara.observe.profile.result import Operation, Profile, ProgramRuns

# Of a change of the time, the part that a change of the work must explain to be named as its cause.
_EXPLAINS = 0.5
# FLOPs of a product in the time of one operation on an element, about.
_ELEMENT = 8

__all__ = ["Change", "ProfileDiff", "diff_profiles"]


@dataclass(frozen=True)
class Change:
    """What one place in the source costs in each of two profiles.

    Attributes:
      place: the source line, or the path in the JAX program, or the instruction.
      kind: ``"compute"``, ``"collective"``, ``"copy"`` or ``"kernel"``.
      before: seconds on one device. after: likewise.
      count_before: operations. count_after: likewise.
      operations: names of the instructions.
      flops_before: of matrix products and convolutions. flops_after: likewise.
      elementwise_before: operations on elements (:attr:`Operation.elementwise`); None in profiles of earlier versions.
        elementwise_after: likewise.
      was: the source line before, if it was edited; its operations before are that line's.
      floor_before: seconds that they could not go below (roofline: FLOPs at the device's peak, or bytes at its
        memory's bandwidth, whichever is longer); None if these are not known. floor_after: likewise. Caches of a CPU
        can be faster than that.
    """

    place: str
    kind: str
    before: float
    after: float
    count_before: int
    count_after: int
    operations: tuple[str, ...]
    floor_before: float | None = None
    floor_after: float | None = None
    flops_before: int = 0
    flops_after: int = 0
    elementwise_before: int | None = 0
    elementwise_after: int | None = 0
    was: str = ""

    @property
    def seconds(self) -> float:
        """Seconds more (less, if negative)."""
        return self.after - self.before

    @property
    def cause(self) -> str:
        """``"more work"``, ``"less work"``, ``"same work, slower"``, ``"same work, faster"``, ``"new"`` or ``"gone"``;
        empty if there is no change, or the work is not known."""
        if not self.before or not self.after:
            return "new" if self.after else "gone" if self.before else ""
        times = math.log(self.after / self.before)
        works = [*self._bounds(), *self._elements()]
        if not times or not works:
            return ""
        if any(math.log(work) / times >= _EXPLAINS for work in works):
            return "more work" if times > 0 else "less work"
        return "same work, slower" if times > 0 else "same work, faster"

    def _bounds(self) -> list[float]:
        """How many times what the roofline counts grew, if that is known."""
        if self.floor_before and self.floor_after:
            return [self.floor_after / self.floor_before]
        known = self.floor_before is not None and self.floor_after is not None
        return (
            [self.count_after / self.count_before] if known and self.count_before and self.count_after else []
        )

    def _elements(self) -> list[float]:
        """Likewise the work on elements, which bytes do not show: a logarithm moves as many as a sum."""
        if self.elementwise_before is None or self.elementwise_after is None:
            return []
        before, after = (
            flops + _ELEMENT * elements
            for flops, elements in (
                (self.flops_before, self.elementwise_before),
                (self.flops_after, self.elementwise_after),
            )
        )
        known = self.floor_before is not None and self.floor_after is not None
        return [after / before] if known and before and after else []

    @property
    def by_elements(self) -> bool:
        """Whether it is not FLOPs and bytes whose growth explains that of the time."""
        times = math.log(self.after / self.before) if self.before and self.after else 0.0
        return bool(times) and not any(math.log(work) / times >= _EXPLAINS for work in self._bounds())


@dataclass(frozen=True)
class ProfileDiff:
    """Two profiles of the same work.

    Attributes:
      before: wall seconds. after: likewise.
      compile_seconds: spent compiling more (less, if negative). compiled: programs more.
      idle_seconds: in which devices ran nothing, more (less).
      changes: by their size.
      recompiled: programs that were compiled in the second and not in the first, and which argument changed, by the
        time that it took.
      before_plan: the first beside the prediction of a plan; None without one. after_plan: likewise.
    """

    before: float
    after: float
    compile_seconds: float
    compiled: int
    idle_seconds: float | None
    changes: tuple[Change, ...]
    recompiled: tuple[Recompiled, ...] = ()
    before_plan: AgainstPlan | None = None
    after_plan: AgainstPlan | None = None

    @property
    def ratio(self) -> float:
        """Wall time after, over that before."""
        return self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        plans = {"before": self.before_plan, "after": self.after_plan}
        kept = {name: value for name, value in asdict(self).items() if not name.endswith("_plan")}
        return {
            **kept,
            "ratio": self.ratio,
            "changes": [{**asdict(one), "seconds": one.seconds, "cause": one.cause} for one in self.changes],
            "plan": None
            if self.after_plan is None
            else {name: one and one.to_dict() for name, one in plans.items()},
        }

    def __str__(self) -> str:
        word = "slower" if self.after > self.before else "faster"
        lines = [
            f"{self.before * 1e3:.2f} ms → {self.after * 1e3:.2f} ms: {abs(self.ratio - 1):.1%} {word}".replace(
                "%", " %"
            ),
        ]
        if self.compiled or abs(self.compile_seconds) > 1e-3:
            lines.append(f"  compiling {self.compile_seconds * 1e3:+.2f} ms ({self.compiled:+d} programs)")
        if self.idle_seconds is not None:
            lines.append(f"  devices idle {self.idle_seconds * 1e3:+.2f} ms")
        lines += [f"  {one}" for one in self.recompiled[:_MOST_SHOWN]]
        if (more := len(self.recompiled) - _MOST_SHOWN) > 0:
            lines.append(f"  and {more} more programs")
        lines += [
            f"  {one.seconds * 1e3:+9.2f} ms  {one.kind:<10} {one.place}{' (edited)' if one.was else ''}  "
            f"({one.before * 1e3:.2f} → {one.after * 1e3:.2f} ms, {one.count_before:,} → {one.count_after:,} runs"
            f"{_floor(one)})"
            for one in self.changes[:10]
            if abs(one.seconds) >= _LEAST_SHOWN * min(self.before, self.after)
        ]
        for word, plan in (("before", self.before_plan), ("after", self.after_plan)):
            if plan is not None:
                lines += [f"{word}, beside the plan:", str(plan)]
        return "\n".join(lines)


_MOST_SHOWN = 8
# Of the time, what a change is at least.
_LEAST_SHOWN = 1e-4


def _floor(change: Change) -> str:
    if change.floor_before is None or change.floor_after is None:
        return ""
    known = f"; at best {change.floor_before * 1e3:.2f} → {change.floor_after * 1e3:.2f} ms"
    if change.cause in ("more work", "less work") and change.by_elements:
        known = f"; {change.elementwise_before:,} → {change.elementwise_after:,} operations on elements"
    return known + (f": {change.cause}" if change.cause else "")


def diff_profiles(before: Profile, after: Profile, *, plan: PlannedStep | None = None) -> ProfileDiff:
    """Attribute the difference of two profiles to source lines, and recompilations to arguments.

    Instructions have other names in another program, so they are compared by the line that they come from: its text and
    its file's name, whatever its number and folder are now, or, where XLA does not say it, the path in the JAX program.
    A line that is alike and stands between the same neighbours is taken for the same, edited. The time of an operation
    that XLA made of several lines is divided between them by their work.

    Args:
      before, after: the profiles.
      plan: what a step was predicted to take, which both are set beside (:func:`read_planned_step`).

    Raises:
      ProfileError: with a plan, a profile has no program whose runs could be compared with it.
    """
    rates = _rates(before, after)
    old_lines, new_lines = (
        (same_lines(before.lines), same_lines(after.lines)) if before.lines and after.lines else ({}, {})
    )
    edited = edited_lines(old_lines, new_lines)
    # Profiles of earlier versions do not say what an operation is made of.
    divided = _knows_parts(before) and _knows_parts(after)
    old = _places(before, {source: edited.get(line, line) for source, line in old_lines.items()}, divided)
    new = _places(after, new_lines, divided)
    places_before = {line: source for source, line in old_lines.items()}
    was: dict[Line | str, str] = {line: places_before[earlier] for earlier, line in edited.items()}
    changes = []
    for key in {*old, *new}:
        mine, theirs = old[key], new[key]
        changes.append(
            Change(
                place=_place((theirs or mine)[0]),
                kind=key[0],
                before=_spent(mine, before),
                after=_spent(theirs, after),
                count_before=sum(one.count for one in mine),
                count_after=sum(one.count for one in theirs),
                operations=tuple(sorted({one.name for one in (*mine, *theirs)})),
                floor_before=_at_best(mine, before.devices, rates[0]),
                floor_after=_at_best(theirs, after.devices, rates[1]),
                flops_before=sum(one.flops for one in mine),
                flops_after=sum(one.flops for one in theirs),
                elementwise_before=_elements(mine),
                elementwise_after=_elements(theirs),
                was=was.get(key[1], ""),
            )
        )
    idle = None
    if before.busy_seconds is not None and after.busy_seconds is not None:
        idle = (after.wall_seconds - after.busy_seconds) - (before.wall_seconds - before.busy_seconds)
    return ProfileDiff(
        before=before.wall_seconds,
        after=after.wall_seconds,
        compile_seconds=after.compile_seconds - before.compile_seconds,
        compiled=after.compiled - before.compiled,
        idle_seconds=idle,
        changes=tuple(sorted((one for one in changes if one.seconds), key=lambda one: -abs(one.seconds))),
        recompiled=_recompiled(before, after),
        before_plan=None if plan is None else compare_with_plan(before, plan),
        after_plan=None if plan is None else compare_with_plan(after, plan),
    )


def _place(one: Operation) -> str:
    return one.source or one.path or f"{one.program} {one.opcode}"


def _knows_parts(profile: Profile) -> bool:
    return all(one.elementwise is not None for one in profile.operations)


def _elements(operations: Iterable[Operation]) -> int | None:
    counts = [one.elementwise for one in operations]
    return None if None in counts else sum(count or 0 for count in counts)


def _places(
    profile: Profile, lines: Mapping[str, Line], divided: bool
) -> defaultdict[tuple[str, Line | str], list[Operation]]:
    found: defaultdict[tuple[str, Line | str], list[Operation]] = defaultdict(list)
    for whole in profile.operations:
        for one in _by_line(whole) if divided else [whole]:
            found[one.kind, lines.get(one.source, _place(one))].append(one)
    return found


def _by_line(one: Operation) -> list[Operation]:
    """An operation of several lines as one of each."""
    return [
        replace(
            one,
            source=source,
            seconds=one.seconds * share,
            flops=round(one.flops * share),
            bytes=round(one.bytes * share),
            elementwise=round((one.elementwise or 0) * share),
            parts=(),
        )
        for source, share in one.parts
    ] or [one]


def _spent(operations: Iterable[Operation], profile: Profile) -> float:
    return sum(one.seconds for one in operations) / profile.at_once


_Rates = tuple[float, float] | None


def _rates(before: Profile, after: Profile) -> tuple[_Rates, _Rates]:
    """FLOP/s and bytes per second of a device in each profile; those of one machine, measured twice, are the same."""
    sides = [
        (one.peak_flops, one.peak_bandwidth) if one.peak_flops and one.peak_bandwidth else None
        for one in (before, after)
    ]
    if None not in sides and (before.platform, before.chip) == (after.platform, after.chip):
        best = max(one[0] for one in sides if one), max(one[1] for one in sides if one)
        return best, best
    return sides[0], sides[1]


def _at_best(operations: Iterable[Operation], devices: int, rates: _Rates) -> float | None:
    if rates is None:
        return None
    return sum(max(one.flops / rates[0], one.bytes / rates[1]) for one in operations) / devices


def _recompiled(before: Profile, after: Profile) -> tuple[Recompiled, ...]:
    """Programs that were compiled in the second profile and not in the first, with the reason of each."""
    found: list[Recompiled] = []
    names: dict[str, list[ProgramRuns]] = {}
    for one in after.programs:
        names.setdefault(one.name, []).append(one)
    for name, programs in names.items():
        known = [one for one in before.programs if one.name == name]
        # Each program of the first stands for one of the second that is like it.
        left = list(known)
        for one in sorted(programs, key=lambda one: one.compiled_at or 0.0):
            like = next((other for other in left if _alike(other, one)), None)
            if like is not None:
                left.remove(like)
            if like is not None and (one.compile_seconds is None or like.compile_seconds is not None):
                continue
            changes, left_out = ((), 0) if like or not known else _nearest(known, one)
            if one.compile_seconds is None and not changes:
                continue
            reason = (
                "compiled earlier"
                if like
                else "new"
                if not known
                else "arguments"
                if changes
                else "same arguments"
            )
            found.append(
                Recompiled(
                    program=name,
                    function=one.function,
                    times=1,
                    seconds=one.compile_seconds or 0.0,
                    reason=reason,
                    known=len(known),
                    changes=changes,
                    left_out=left_out,
                )
            )
    return summarised(found)


def _alike(one: ProgramRuns, other: ProgramRuns) -> bool:
    """Whether two programs were compiled for the same; true where profiles of earlier versions do not say it."""
    if not one.arguments_from or not other.arguments_from or one.arguments == other.arguments:
        return True
    same_source = one.arguments_from == other.arguments_from
    return not changes_between(one.arguments, other.arguments, same_source=same_source)


def _nearest(known: list[ProgramRuns], one: ProgramRuns) -> tuple[Any, int]:
    # Programs of one name may be of several functions, such as lambdas: of the same place in the source, if there are.
    same = [other for other in known if other.function == one.function]
    return nearest_changes(
        [(other.arguments_from, other.arguments) for other in same or known],
        one.arguments_from,
        one.arguments,
    )
