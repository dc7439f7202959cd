"""Compilations as they go: a bar for eyes, and a line for each that is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.sharding import Layout

__all__ = ["CHOICES", "compilations"]

CHOICES = 3
"""Combinations of settings that ``--choose-settings`` compiles at most."""


@contextlib.contextmanager
def compilations(most: int, *, quiet: bool) -> Iterator[Callable[[str, Layout, Any], None] | None]:
    """A callback for ``plan(progress=…)``; None if nothing shall be shown. ``most``: compilations that there may be."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from capibara.plan.report.labels import ProgressLabels
    from capibara.plan.sizes import size_text

    labels = ProgressLabels()
    started: dict[Any, float] = {}
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # A bar that moves is for eyes only; elsewhere the lines of what is done are enough.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("ordering layouts", total=most)

        def step(event: str, layout: Any, program: Any) -> None:
            if event == "start":
                started[layout] = time.perf_counter()
                bar.update(task, description=f"compiling {labels.of(layout)}")
                return
            took = (
                "cached"
                if program.cached
                else f"{time.perf_counter() - started.get(layout, time.perf_counter()):.0f} s"
            )
            words = {"oom": "does not fit", "error": "failed"}
            size = size_text(program.memory.total) if program.memory else words[program.status]
            stage = "" if program.complete else "scheduled, "
            bar.console.print(f"{labels.of(layout)}: {size} ({stage}{took})", soft_wrap=True)
            bar.advance(task)

        yield step
