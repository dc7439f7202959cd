"""Compare two profiles: which operation, from which source line, made the difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from capibara.observe.profile.result import Operation, Profile

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
    """

    place: str
    kind: str
    before: float
    after: float
    count_before: int
    count_after: int
    operations: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds more (less, if negative)."""
        return self.after - self.before


@dataclass(frozen=True)
class ProfileDiff:
    """Two profiles of the same work.

    Attributes:
      before: wall seconds. after: likewise.
      compile_seconds: spent compiling more (less, if negative). compiled: programs more.
      idle_seconds: in which devices ran nothing, more (less).
      changes: by their size.
    """

    before: float
    after: float
    compile_seconds: float
    compiled: int
    idle_seconds: float | None
    changes: tuple[Change, ...]

    @property
    def ratio(self) -> float:
        """Wall time after, over that before."""
        return self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "changes": [{**asdict(one), "seconds": one.seconds} for one in self.changes],
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
        lines += [
            f"  {one.seconds * 1e3:+9.2f} ms  {one.kind:<10} {one.place}  "
            f"({one.before * 1e3:.2f} → {one.after * 1e3:.2f} ms, {one.count_before:,} → {one.count_after:,} runs)"
            for one in self.changes[:10]
        ]
        return "\n".join(lines)


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    """Attribute the difference of two profiles to source lines.

    Instructions have other names in another program, so they are compared by the line that they come from (its file's
    name and number, or, where XLA does not say it, the path in the JAX program).
    """
    old, new = _places(before), _places(after)
    changes = []
    for key in {*old, *new}:
        mine, theirs = old[key], new[key]
        changes.append(
            Change(
                place=key[1],
                kind=key[0],
                before=_spent(mine, before.devices),
                after=_spent(theirs, after.devices),
                count_before=sum(one.count for one in mine),
                count_after=sum(one.count for one in theirs),
                operations=tuple(sorted({one.name for one in (*mine, *theirs)})),
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
    )


def _places(profile: Profile) -> defaultdict[tuple[str, str], list[Operation]]:
    found: defaultdict[tuple[str, str], list[Operation]] = defaultdict(list)
    for one in profile.operations:
        found[one.kind, one.source or one.path or f"{one.program} {one.opcode}"].append(one)
    return found


def _spent(operations: Iterable[Operation], devices: int) -> float:
    return sum(one.seconds for one in operations) / devices
