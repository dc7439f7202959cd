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
    lines = []
    for title, found in (("part of the model", where.parts), ("source line", where.lines)):
        lines += ["", f"{'step':>7} {'seconds':>9} {'compute':>9} {'other':>9} {'waiting':>9}  {title}"]
        lines += [_row(one, where.seconds) for one in found[:_IN_TABLE]]
        lines += _rest(found[_IN_TABLE:], where.seconds)
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


def _row(one: Spent, whole: float) -> str:
    text = f"  {one.text[:_MOST_TEXT]}" if one.text else ""
    return (
        f"{one.seconds / whole:7.1%} {one.seconds:9.4f} {one.compute:9.4f} {one.other:9.4f} {one.communication:9.4f}  "
        f"{_short(one.name)}{text}"
    )


def _rest(found: Iterable[Spent], whole: float) -> list[str]:
    left = list(found)
    seconds = sum(one.seconds for one in left)
    return [f"{seconds / whole:7.1%} {seconds:9.4f} {'':29}  {len(left)} more"] if left else []
