"""A plan as a table for a terminal."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from capibara.plan.report.labels import differences, mesh_word, sharding_word
from capibara.plan.report.where import where_line, where_tables
from capibara.plan.sizes import limit_text, size_text, unit_of

if TYPE_CHECKING:
    from capibara.plan.candidate import Candidate
    from capibara.plan.improvements import Improvement
    from capibara.plan.memory.least import LeastMemory
    from capibara.plan.result import Plan
    from capibara.plan.settings_choice import SettingsChoice
    from capibara.plan.targets import Target

__all__ = [
    "candidate_lines",
    "choice_lines",
    "digits",
    "dollars",
    "own_lines",
    "plan_text",
    "print_plan",
    "print_whole",
]

_NOT_FASTER = (
    "the configured settings of the program: no others that were compiled give 0.5% more tokens per second"
)
# Characters of a column that says what else sets rows apart, and of what the compiler says against settings.
_SHORT, _LONG = 24, 300


def plan_text(plan: Plan, width: int = 130) -> str:
    """The plan as plain text."""
    from rich.console import Console

    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=width, no_color=True, highlight=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_plan(plan: Plan, console: Any, *, where: bool = False) -> None:
    """Print it on a ``rich`` console; ``where``: with tables of where time and memory go."""
    from rich.table import Table
    from rich.text import Text

    place = f"{plan.target}" if plan.slices == 1 else f"{plan.slices} slices, each {plan.target}"
    console.print(Text(f"{plan.work}\non {place}; {limit_text(plan.target, plan.limit_bytes)}"))
    scale, unit = unit_of(max((c.hbm_bytes for c in plan.candidates), default=plan.limit_bytes))
    # Of the longest step, so that none has more places than the column.
    tick = next(
        (
            pair
            for pair in ((1.0, "s"), (1e-3, "ms"))
            if any(c.step_seconds >= pair[0] for c in plan.candidates)
        ),
        (1e-6, "µs"),
    )
    table = Table(pad_edge=False, box=None, header_style="bold")
    headings = (
        "",
        "mesh",
        "sharding",
        "remat",
        "micro",
        f"HBM {unit}",
        f"step {tick[1]}",
        "range",
        "tokens/s",
        "MFU",
        "$/step",
        "$/B tok",
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (1, 2, 3) else "right", no_wrap=True)
    further, legend = _short(differences([candidate.layout for candidate in plan.candidates]), "flags")
    settings, meanings = _short([" ".join(candidate.settings) for candidate in plan.candidates], "settings")
    columns = [(name, texts) for name, texts in (("flags", further), ("settings", settings)) if any(texts)]
    for name, _ in columns:
        table.add_column(name, no_wrap=True)
    for number, candidate in enumerate(plan.candidates):
        table.add_row(
            *_row(_rank(plan, candidate, number + 1), candidate, scale, tick[0]),
            *(texts[number] for _, texts in columns),
        )
    print_whole(table, console)
    for line in [*legend, *meanings]:
        console.print(Text(line), soft_wrap=True)
    if plan.candidates:
        for line in [
            *candidate_lines(plan.best, plan.limit_bytes),
            *where_line(plan.where),
            *_least_lines(plan.least_memory, plan.target.compiler),
            *own_lines(plan),
            *choice_lines(plan.settings_choice, plan.target),
            *_run_lines(plan),
            *_improvement_lines(plan.improvements, plan.target.compiler),
        ]:
            # Settings and flags are there to be copied: no line is broken in two.
            console.print(Text(line), soft_wrap=True)
    for line in _footer(plan):
        console.print(Text(line), soft_wrap=True)
    if where and plan.where is not None:
        for line in where_tables(plan.where):
            console.print(Text(line), soft_wrap=True)


def print_whole(table: Any, console: Any) -> None:
    """Print a table with all of its cells, on lines as long as they are: a cell that is cut off is another one's."""
    from rich.measure import Measurement

    width = console.width
    wide = console.options.update(max_width=10_000)
    console.width = max(width, Measurement.get(console, wide, table).maximum)
    try:
        console.print(table)
    finally:
        console.width = width


def _short(texts: Sequence[str], what: str) -> tuple[list[str], list[str]]:
    """Texts for a column: as they are where all are short, else letters, with lines that say what these stand for.

    Args:
      what: name of the column.
    """
    if max(map(len, texts), default=0) <= _SHORT:
        return list(texts), []
    letters = {text: _letters(number) for number, text in enumerate(dict.fromkeys(filter(None, texts)))}
    return [letters.get(text, "") for text in texts], [
        f"{what} {name}: {text}" for text, name in letters.items()
    ]


def _letters(number: int) -> str:
    """``A`` … ``Z``, ``AA`` …"""
    return ("" if number < 26 else _letters(number // 26 - 1)) + chr(ord("A") + number % 26)


def _rank(plan: Plan, c: Candidate, rank: int) -> str:
    """The place of a row; of the user's own layout whose it is, beyond the listed ones without a place."""
    if plan.own is None or c is not plan.own.candidate:
        return str(rank)
    return "yours" if rank == len(plan.candidates) and rank > 1 else f"{rank} yours"


def _row(rank: str, c: Candidate, scale: int, tick: float) -> Sequence[str]:
    return (
        rank,
        mesh_word(c.layout),
        sharding_word(c.layout),
        c.layout.remat,
        str(c.layout.microbatches),
        f"{c.hbm_bytes / scale:.2f}",
        ("~" if c.scheduled else "") + digits(c.step_seconds / tick),
        f"{digits(c.time.low / tick)}–{digits(c.time.high / tick)}",
        _number(c.tokens_per_second),
        "" if c.mfu is None else f"{c.mfu:.1%}",
        dollars(c.usd_per_step),
        dollars(c.usd_per_billion_tokens),
    )


def candidate_lines(c: Candidate, limit: int) -> list[str]:
    """A breakdown of its memory and time; ``limit``: bytes that a device may use."""
    memory = ", ".join(
        f"{name} {size_text(size)}" for name, size in sorted(c.memory.items(), key=lambda i: -i[1])
    )
    time = c.time
    shares = [("compute", time.compute), ("memory", time.memory), ("communication", time.communication)]
    parts = ", ".join(f"{name} {value / time.seconds:.0%}" for name, value in shares if time.seconds)
    hidden = f" ({time.hidden:.3g} s more of it hidden behind work)" if time.hidden else ""
    source = c.target.compiler if c.memory_source == "compiler" else "an estimate"
    if c.memory_source == "compiler" and "activations" in c.memory:
        source += "; activations and temporaries separated by an estimate"
    return [
        f"best   memory  {memory}: {size_text(c.hbm_bytes)} of {size_text(limit)} [{source}]",
        f"       time    {parts}{hidden} [{_sources(c)}]",
    ]


def own_lines(plan: Plan) -> list[str]:
    """What the user's own layout costs beside the pick, or why it cannot run."""
    own = plan.own
    if own is None:
        return []
    if own.reason:
        return [f"{'yours':>12}  {own.layout}: {own.reason}"]
    if own.candidate is plan.best:
        return [f"{'yours':>12}  is the pick"]
    c = own.candidate
    assert c is not None
    figures = {
        "step_seconds": f"{c.step_seconds:.3g} s a step",
        "hbm_bytes": f"memory {size_text(c.hbm_bytes)}",
        "tokens_per_second": f"{_number(c.tokens_per_second)} tokens/s",
        "usd_per_step": f"${dollars(c.usd_per_step)} a step",
        "usd_per_billion_tokens": f"${dollars(c.usd_per_billion_tokens)} a billion tokens",
    }
    parts = [f"{figures[name]} ({ratio - 1:+.1%})" for name, ratio in own.beside(plan.best).items()]
    names = [each.name for each in fields(c.layout)]
    other = [name for name in names if getattr(c.layout, name) != getattr(plan.best.layout, name)]
    other += ["settings"] if c.settings != plan.best.settings else []
    return [f"{'yours':>12}  {', '.join(parts)} beside the pick; other {', '.join(other)}"]


def _least_lines(least: LeastMemory | None, compiler: str) -> list[str]:
    """What the best candidate takes when the compiler makes it as small as it can."""
    if least is None:
        return []
    flag = "=".join(least.layout.flags[-1])
    return [
        f"       least   {size_text(least.hbm_bytes)} with {flag}: {least.seconds:.3g} s a step [{compiler}]"
    ]


def choice_lines(choice: SettingsChoice | None, target: Target) -> list[str]:
    """Settings of the program that were chosen, what they change, and what else was compiled."""
    if choice is None:
        return []
    head, rest = f"{'settings':>13}  ", " " * 15
    faster = f"{choice.speed - 1:.1%} more tokens per second than with the configured settings"
    lines = [
        f"{shlex.join(choice.settings)}: {faster} [{target.compiler}]" if choice.settings else _NOT_FASTER
    ]
    lines += [f"{name} changes: {effect}" for name, effect in choice.effects.items()]
    for one in choice.tried:
        if one.settings != choice.settings:
            figures = f"{one.speed - 1:+.1%} ({one.seconds:.3g} s a step, {size_text(one.hbm_bytes)})"
            lines.append(f"compiled, too: {shlex.join(one.settings)}: {figures}")
    for refused in choice.refused:
        # On one line: of a compiler that died it is the last of what it printed.
        reason = " ".join(refused.message.split()) or "it does not compile"
        reason = reason if len(reason) <= _LONG else f"{reason[:_LONG]} …"
        if refused.needed_bytes is not None:
            reason = f"it takes {size_text(refused.needed_bytes)} a device, more than there is"
        lines.append(f"not chosen: {shlex.join(refused.settings)}: {reason}")
    lines += [f"not compiled: {name}: {reason}" for name, reason in choice.untried.items()]
    return [head + lines[0], *(rest + line for line in lines[1:])]


def _improvement_lines(improvements: Sequence[Improvement], compiler: str) -> list[str]:
    """Changes of settings that were compiled, and what they give."""
    lines = []
    for one in improvements:
        settings = shlex.join(one.settings)
        count = one.layout.microbatches
        parts = f", {count} microbatch{'' if count == 1 else 'es'}" if "train.batch_size" in settings else ""
        lines.append(
            f"{'' if lines else 'change':>13}  {settings}{parts}: {one.speed - 1:.1%} more tokens per second "
            f"({one.seconds:.3g} s a step, {size_text(one.hbm_bytes)}) [{compiler}]"
        )
    return lines


def _run_lines(plan: Plan) -> list[str]:
    """How to run the best candidate: a command line, its settings, or the arguments of a step function."""
    layout = plan.best.training_layout
    if plan.config is None:
        flags = " ".join(f"{name}={value}" for name, value in layout.flags)
        return [f"       as      {layout}", f"       flags   {flags or 'none'}"]
    command = plan.command()
    if command is None:
        return [f"       as      {shlex.join(layout.overrides())}"]
    return [f"       run     {command}"]


def _sources(c: Candidate) -> str:
    sources = dict.fromkeys(part.source for part in c.time.parts)
    return "predicted from " + ", ".join(sources) if sources else "predicted"


def _footer(plan: Plan) -> list[str]:
    lines = [
        f"{plan.considered} layouts, {plan.promising} may fit, {plan.compiled} compiled"
        + (f", {len(plan.refused)} of them refused" if plan.refused else "")
        + (f", {plan.scheduled} more scheduled (~: time without cycles)" if plan.scheduled else "")
    ]
    price = plan.candidates[0].price if plan.candidates else None
    if price is not None:
        lines.append(f"price: {price}")
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def dollars(usd: float | None) -> str:
    """Dollars, in about three digits."""
    if usd is None:
        return ""
    places = 0 if usd >= 100 else 2 if usd >= 1 else 4
    return f"{usd:,.{places}f}" if usd >= 0.001 else f"{usd:.2g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
