"""Where a plan's time and memory go, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from capibara.plan.sizes import size_text

if TYPE_CHECKING:
    from capibara.plan.attribution import Attribution, Spent

__all__ = ["where_line", "where_tables"]

_IN_LINE, _IN_TABLE = 5, 20
# The width of a line's text beside its place.
_MOST_TEXT = 70


def where_line(where: Attribution | None) -> list[str]:
    """One line: the share of each pass, and the parts of the model that take most."""
    if where is None or not where.seconds:
        return []
    passes, parts = (
        ", ".join(f"{one.name} {one.seconds / where.seconds:.0%}" for one in found)
        for found in (where.passes, where.parts[:_IN_LINE])
    )
    return [f"       where   {passes}; {parts}"]


def where_tables(where: Attribution) -> list[str]:
    """Tables of parts, source lines and memory."""
    lines: list[str] = []
    if not where.seconds:
        return lines
    unit, scale = (
        ("s", 1.0) if where.seconds >= 1 else ("ms", 1e-3) if where.seconds >= 1e-3 else ("µs", 1e-6)
    )
    for title, found in (("part of the model", where.parts), ("source line", where.lines)):
        lines += ["", f"{'step':>7} {unit:>9} {'compute':>9} {'other':>9} {'waiting':>9}  {title}"]
        lines += [_row(one, where.seconds, scale) for one in found[:_IN_TABLE]]
        lines += _rest(found[_IN_TABLE:], where.seconds, scale)
    if where.memory:
        lines += ["", f"{'memory':>12}  {'kind':<10}  part of the model, at the step's peak"]
        lines += [
            f"{size_text(one.bytes):>12}  {one.kind:<10}  {one.name}" for one in where.memory[:_IN_TABLE]
        ]
    return lines


def _short(name: str) -> str:
    """A place within its package or project, and not in the folders of a machine."""
    for above in ("/site-packages/", "/src/"):
        before, found, inside = name.rpartition(above)
        if found and before:
            return inside
    return name


def _row(one: Spent, whole: float, scale: float) -> str:
    text = f"  {one.text[:_MOST_TEXT]}" if one.text else ""
    return (
        f"{one.seconds / whole:7.1%} {one.seconds / scale:9.3f} {one.compute / scale:9.3f} {one.other / scale:9.3f} "
        f"{one.communication / scale:9.3f}  "
        f"{_short(one.name)}{text}"
    )


def _rest(found: Iterable[Spent], whole: float, scale: float) -> list[str]:
    left = list(found)
    seconds = sum(one.seconds for one in left)
    return [f"{seconds / whole:7.1%} {seconds / scale:9.3f} {'':29}  {len(left)} more"] if left else []
