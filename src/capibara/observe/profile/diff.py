"""Compare two profiles: which source line made the difference, which programs were compiled anew, and why."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from capibara.observe.profile.arguments import Recompiled, changes_between, nearest_changes, summarised
from capibara.observe.profile.planned import AgainstPlan, PlannedStep, compare_with_plan
from capibara.observe.profile.result import Operation, Profile, ProgramRuns

# Of a change of the time, the part that a change of the work must explain to be named as its cause.
_EXPLAINS = 0.5

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
        if self.floor_before and self.floor_after:
            work = self.floor_after / self.floor_before
        elif (
            self.floor_before is None
            or self.floor_after is None
            or not (self.count_before and self.count_after)
        ):
            return ""
        else:
            work = self.count_after / self.count_before
        times = math.log(self.after / self.before)
        if not times:
            return ""
        if math.log(work) / times >= _EXPLAINS:
            return "more work" if times > 0 else "less work"
        return "same work, slower" if times > 0 else "same work, faster"


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
            f"  {one.seconds * 1e3:+9.2f} ms  {one.kind:<10} {one.place}  "
            f"({one.before * 1e3:.2f} → {one.after * 1e3:.2f} ms, {one.count_before:,} → {one.count_after:,} runs"
            f"{_floor(one)})"
            for one in self.changes[:10]
        ]
        for word, plan in (("before", self.before_plan), ("after", self.after_plan)):
            if plan is not None:
                lines += [f"{word}, beside the plan:", str(plan)]
        return "\n".join(lines)


_MOST_SHOWN = 8


def _floor(change: Change) -> str:
    if change.floor_before is None or change.floor_after is None:
        return ""
    floors = f"; at best {change.floor_before * 1e3:.2f} → {change.floor_after * 1e3:.2f} ms"
    return floors + (f": {change.cause}" if change.cause else "")


def diff_profiles(before: Profile, after: Profile, *, plan: PlannedStep | None = None) -> ProfileDiff:
    """Attribute the difference of two profiles to source lines, and recompilations to arguments.

    Instructions have other names in another program, so they are compared by the line that they come from: its text and
    its file's name, whatever its number and folder are now, or, where XLA does not say it, the path in the JAX program.

    Args:
      before, after: the profiles.
      plan: what a step was predicted to take, which both are set beside (:func:`read_planned_step`).

    Raises:
      ProfileError: with a plan, a profile has no program whose runs could be compared with it.
    """
    rates = _rates(before, after)
    by_text = bool(before.lines and after.lines)
    old, new = _places(before, by_text), _places(after, by_text)
    changes = []
    for key in {*old, *new}:
        mine, theirs = old[key], new[key]
        changes.append(
            Change(
                place=_place((theirs or mine)[0]),
                kind=key[0],
                before=_spent(mine, before.devices),
                after=_spent(theirs, after.devices),
                count_before=sum(one.count for one in mine),
                count_after=sum(one.count for one in theirs),
                operations=tuple(sorted({one.name for one in (*mine, *theirs)})),
                floor_before=_at_best(mine, before.devices, rates[0]),
                floor_after=_at_best(theirs, after.devices, rates[1]),
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


def _places(profile: Profile, by_text: bool) -> defaultdict[tuple[str, ...], list[Operation]]:
    same = _same_lines(profile) if by_text else {}
    found: defaultdict[tuple[str, ...], list[Operation]] = defaultdict(list)
    for one in profile.operations:
        found[one.kind, *same.get(one.source, (_place(one),))].append(one)
    return found


def _same_lines(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Of each source line what it shares with the same one of another version: file, text, and which of those it is."""
    alike: defaultdict[tuple[str, str], list[tuple[str, int, str]]] = defaultdict(list)
    for source, text in profile.lines.items():
        file, _, number = source.rpartition(":")
        if text and number.isdecimal():
            alike[file.replace("\\", "/").rpartition("/")[2], text].append((file, int(number), source))
    return {
        source: (*key, str(place))
        for key, sources in alike.items()
        for place, (_, _, source) in enumerate(sorted(sources))
    }


def _spent(operations: Iterable[Operation], devices: int) -> float:
    return sum(one.seconds for one in operations) / devices


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
