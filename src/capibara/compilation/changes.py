"""Why a function was compiled again: what differs between a call and the nearest program that there already is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from capibara.compilation.signature import OTHER_SETTINGS, Leaf, Signature

__all__ = ["Change", "Recompilation", "differences", "nearest"]

_MOST_SHOWN = 6


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
      where: the argument and its place in its tree, such as ``params['w']``; or the name of a setting.
      what: ``"shape"``, ``"dtype"``, ``"weak type"``, ``"sharding"``, ``"static value"``, ``"structure"`` or
        ``"setting"``.
      before, after: in the nearest known program, and in this call.
    """

    where: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Recompilation:
    """A program that a call needed although the function had been compiled before.

    Attributes:
      function: its name.
      changes: compared with the nearest known program; the fewest there are.
      known: how many programs there were.
      seconds: tracing, lowering and compiling the new one.
    """

    function: str
    changes: tuple[Change, ...]
    known: int
    seconds: float = 0.0

    def __str__(self) -> str:
        shown = [f"  {change}" for change in self.changes[:_MOST_SHOWN]]
        if (more := len(self.changes) - _MOST_SHOWN) > 0:
            shown.append(f"  and {more} more")
        programs = "1 known program" if self.known == 1 else f"the nearest of {self.known} known programs"
        return "\n".join(
            [f"{self.function} was compiled again ({self.seconds:.2f} s), unlike {programs}:", *shown]
        )


def differences(before: Signature, after: Signature, names: tuple[str, ...]) -> tuple[Change, ...]:
    """What differs between two signatures of a function whose positional arguments have these names."""
    found: list[Change] = []
    if before.tree == after.tree:
        if before.leaves != after.leaves:
            for path, old, new in zip(after.paths(names), before.leaves, after.leaves, strict=True):
                found += _of_leaf(path, old, new)
    else:
        olds = dict(zip(before.paths(names), before.leaves, strict=True))
        news = dict(zip(after.paths(names), after.leaves, strict=True))
        for path in olds.keys() | news.keys():
            if path in olds and path in news:
                found += _of_leaf(path, olds[path], news[path])
            else:
                found.append(
                    Change(path, "structure", str(olds.get(path, "absent")), str(news.get(path, "absent")))
                )
        if not found:  # a list where there was a tuple, another class of node
            found.append(Change("arguments", "structure", str(before.tree), str(after.tree)))
        found.sort(key=lambda change: change.where)
    for what, olds, news in (
        ("static value", _by_name(before), _by_name(after)),
        ("setting", dict(before.settings), dict(after.settings)),
    ):
        for name in {**olds, **news}:
            if name == OTHER_SETTINGS and name in olds and name in news:
                continue
            if name not in olds or name not in news or olds[name] != news[name]:
                found.append(Change(name, what, _text(olds.get(name)), _text(news.get(name))))
    others = dict(before.settings).get(OTHER_SETTINGS), dict(after.settings).get(OTHER_SETTINGS)
    # They contain the settings above once more, and have no names.
    if others[0] != others[1] and not any(change.what == "setting" for change in found):
        pairs = zip(others[0] or (), others[1] or (), strict=False)
        olds, news = zip(*[pair for pair in pairs if pair[0] != pair[1]] or [others], strict=True)
        found.append(Change(OTHER_SETTINGS, "setting", _text(olds), _text(news)))
    return tuple(found)


def _by_name(signature: Signature) -> dict[str, Any]:
    """Static values, with their types where these may be equal."""
    return {name: _Typed(kind, value) for name, kind, value in signature.static}


@dataclass(frozen=True)
class _Typed:
    kind: type
    value: Any

    def __repr__(self) -> str:
        return self.value if isinstance(self.value, str) else repr(self.value)


def nearest(known: Iterable[Signature], signature: Signature, names: tuple[str, ...]) -> tuple[Change, ...]:
    """The differences from the known signature that has the fewest; of several such, the last one."""
    best: tuple[Change, ...] | None = None
    for one in known:
        found = differences(one, signature, names)
        if best is None or len(found) <= len(best):
            best = found
    return best or ()


def _of_leaf(path: str, old: Leaf, new: Leaf) -> list[Change]:
    found = []
    for what, before, after in (
        ("shape", old.shape, new.shape),
        ("dtype", old.dtype, new.dtype),
        ("weak type", old.weak_type, new.weak_type),
        ("sharding", old.sharding, new.sharding),
    ):
        if before != after:
            found.append(Change(path, what, _text(before), _text(after)))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 160 else f"{text[:157]}…"
