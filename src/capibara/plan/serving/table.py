"""A serving plan as a table for a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from capibara.plan.sizes import size_text, unit_of

if TYPE_CHECKING:
    from capibara.plan.serving.result import ServingOption, ServingPlan, ServingPoint

__all__ = ["print_serving", "serving_text"]


def serving_text(plan: ServingPlan, width: int = 130) -> str:
    """The plan as plain text."""
    from rich.console import Console

    stream = io.StringIO()
    print_serving(plan, Console(file=stream, width=width, no_color=True, highlight=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_serving(plan: ServingPlan, console: Any) -> None:
    """Print it on a ``rich`` console."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(plan.work))
    console.print(
        Text(
            f"weights {size_text(plan.weight_bytes)}, cache of a request "
            f"{size_text(plan.cache_bytes_per_request)}, all devices together; mesh: data × model{_targets(plan)}"
        )
    )
    table = Table(pad_edge=False, box=None, header_style="bold")
    targets = plan.latency is not None or plan.first_token is not None
    points = [
        (option, *each)
        for option in plan.options
        for each in _points(option, "at target" if targets else "best")
    ]
    cache = unit_of(max((point.cache_bytes for _, _, point in points), default=2**30))
    memory = unit_of(max((point.hbm_bytes for _, _, point in points), default=2**30))
    headings = (
        "/".join(dict.fromkeys(option.target.kind for option in plan.options)),
        "mesh",
        "",
        "requests",
        f"cache {cache[1]}",
        f"HBM {memory[1]}",
        "token ms",
        "range",
        "first ms",
        "tokens/s",
        "$/hour",
        "$/M tokens",
    )
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 3 else "right", no_wrap=True)
    for option, label, point in points:
        table.add_row(option.target.text, *_row(label, point, cache[0], memory[0]))
    console.print(table)
    best = plan.options[0].at_target
    if best is not None:
        for line in _best_lines(plan.options[0], best):
            console.print(Text(line))
    for option in plan.options:
        if option.failure:
            console.print(Text(f"does not fit: {option.failure}"))
        elif option.at_target is None:
            console.print(Text(f"too slow: {option.target}"))
    if best is not None and best.price is not None:
        console.print(Text(f"price: {best.price}"))
    for note in plan.notes:
        console.print(Text(f"note: {note}"))


def _targets(plan: ServingPlan) -> str:
    words = [
        f"{plan.latency * 1e3:g} ms a token" if plan.latency is not None else "",
        f"{plan.first_token * 1e3:g} ms to the first" if plan.first_token is not None else "",
    ]
    asked = " and ".join(word for word in words if word)
    return f"; target: {asked}" if asked else ""


def _points(option: ServingOption, good: str) -> list[tuple[str, ServingPoint]]:
    if option.largest is None:
        return []
    if option.at_target is option.largest or option.at_target == option.largest:
        return [("largest", option.largest)]
    rows = [("largest", option.largest)]
    if option.at_target is not None:
        return [(good, option.at_target), *rows]
    if option.smallest is not None and option.smallest != option.largest:
        rows.append(("fastest", option.smallest))
    return rows


def _row(label: str, p: ServingPoint, cache: int, memory: int) -> tuple[str, ...]:
    price = p.usd_per_million_tokens
    return (
        "×".join(str(size) for _, size in p.mesh),
        label,
        f"{p.concurrency:,}",
        f"{p.cache_bytes / cache:.2f}",
        f"{p.hbm_bytes / memory:.2f}",
        f"{p.seconds_per_token * 1e3:.3g}",
        f"{p.decode.low * 1e3:.3g}–{p.decode.high * 1e3:.3g}",
        f"{p.time_to_first_token * 1e3:,.0f}",
        f"{p.tokens_per_second:,.0f}",
        "" if p.usd_per_hour is None else f"{p.usd_per_hour:.2f}",
        "" if price is None else f"{price:.3g}",
    )


def _best_lines(option: ServingOption, p: ServingPoint) -> list[str]:
    memory = ", ".join(
        f"{name} {size_text(size)}" for name, size in sorted(p.decode_memory.items(), key=lambda i: -i[1])
    )
    total = sum(p.decode_memory.values())
    shares = (
        ("compute", p.decode.compute),
        ("memory", p.decode.memory),
        ("communication", p.decode.communication),
    )
    parts = ", ".join(f"{name} {value / p.decode.seconds:.0%}" for name, value in shares)
    longest = "; ".join(f"{part.label} {part.seconds * 1e3:.3g} ms" for part in p.decode.parts[:3])
    compiled = p.source == "compiler"
    source = (
        f"{option.target.compiler}, {option.compiled} programs"
        if compiled
        else "arithmetic, nothing was compiled"
    )
    how = (
        "predicted from the compiled program"
        if compiled
        else "bytes over bandwidth, operations over the peak"
    )
    return [
        f"best   memory  {memory}: {size_text(total)} of {size_text(option.limit_bytes)} while decoding [{source}]",
        f"       token   {parts} ({longest}) [{how}]",
        f"       prefill {p.group} prompts in {p.prefill.seconds * 1e3:.3g} ms, {p.groups} times for a batch",
    ]
