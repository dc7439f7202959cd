"""Several slices as a table for a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from capibara.plan.report.labels import mesh_word, sharding_word
from capibara.plan.report.table import choice_lines, digits, dollars, own_lines, print_whole
from capibara.plan.sizes import unit_of

if TYPE_CHECKING:
    from capibara.plan.comparison import SliceRow, SlicesPlan

__all__ = ["print_slices", "slices_text"]

_LIMITS = {"max_hours": "deadline", "max_cost": "budget"}


def slices_text(plan: SlicesPlan, width: int = 130) -> str:
    """The comparison as plain text."""
    from rich.console import Console

    stream = io.StringIO()
    print_slices(plan, Console(file=stream, width=width, no_color=True, highlight=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_slices(plan: SlicesPlan, console: Any) -> None:
    """Print it on a ``rich`` console: the chosen slice first, those that are ruled out last."""
    from rich.table import Table
    from rich.text import Text

    for line in [plan.work, _job(plan)]:
        if line:
            console.print(Text(line), soft_wrap=True)
    found = [row.candidate for row in plan.rows if row.candidate is not None]
    scale, unit = unit_of(max((c.hbm_bytes for c in found), default=1 << 30))
    table = Table(pad_edge=False, box=None, header_style="bold")
    headings = (
        *("", "slice", "chips", "mesh", "sharding", "remat", "micro"),
        *(f"HBM {unit}", "step s", "tokens/s", "$/hour", "$/B tok", "hours", "$", "ruled out by"),
    )
    for heading in headings:
        words = heading in ("slice", "mesh", "sharding", "remat", "ruled out by")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for rank, row in enumerate(plan.rows, 1):
        table.add_row("–" if row.reason else str(rank), *_cells(row, scale))
    print_whole(table, console)
    for line in [*_chosen_lines(plan), *_reasons(plan), *_footer(plan)]:
        console.print(Text(line), soft_wrap=True)


def _job(plan: SlicesPlan) -> str:
    limits = []
    if plan.deadline_hours is not None:
        limits.append(f"{plan.deadline_hours:,g} hours")
    if plan.budget is not None:
        limits.append(f"${plan.budget:,g}")
    words = f"the {plan.goal} slice" + (f" within {' and '.join(limits)}" if limits else "")
    return words + (f" for {plan.tokens:,g} tokens" if plan.tokens is not None else "")


def _cells(row: SliceRow, scale: int) -> tuple[str, ...]:
    head = (row.target.text, str(row.target.num_chips))
    c = row.candidate
    if c is None:
        return (*head, *[""] * 11, "memory or mesh")
    return (
        *head,
        mesh_word(c.layout),
        sharding_word(c.layout),
        c.layout.remat,
        str(c.layout.microbatches),
        f"{c.hbm_bytes / scale:.2f}",
        digits(c.step_seconds),
        "" if c.tokens_per_second is None else f"{c.tokens_per_second:,.0f}",
        "" if row.usd_per_hour is None else f"{row.usd_per_hour:,.2f}",
        dollars(c.usd_per_billion_tokens),
        "" if row.hours is None else digits(row.hours),
        dollars(row.dollars),
        " and ".join(_LIMITS[name] for name, _ in row.over) or ("price" if row.reason else ""),
    )


def _chosen_lines(plan: SlicesPlan) -> list[str]:
    row = plan.chosen
    if row is None or row.plan is None:
        return [f"no slice is within the limits{f': {plan.advice}' if plan.advice else ''}"]
    job = (
        ""
        if row.hours is None
        else f": {row.hours:,.4g} hours" + ("" if row.dollars is None else f", ${row.dollars:,.2f}")
    )
    command = row.plan.command()
    lines = [f"chosen  {row.target}{job}"]
    lines += [line.strip() for line in choice_lines(row.plan.settings_choice, row.target)]
    return [*lines, *([f"run     {command}"] if command else [])]


def _reasons(plan: SlicesPlan) -> list[str]:
    """What rules slices out, and what a layout of the user's own takes on the others."""
    own = [
        f"{row.target.text}: {line.strip()}"
        for row in plan.rows
        if row.plan is not None
        for line in own_lines(row.plan)
    ]
    return own + [f"ruled out  {row.target.text}: {row.reason}" for row in plan.rows if row.reason]


def _footer(plan: SlicesPlan) -> list[str]:
    found = dict.fromkeys(str(c.price) for row in plan.rows if (c := row.candidate) and c.price is not None)
    return [*(f"price: {price}" for price in found), *(f"note: {note}" for note in plan.notes)]
