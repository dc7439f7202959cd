"""``capibara plan --topology A,B``: several slices, and which of them is cheapest or fastest."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from capibara.cli._compilations import CHOICES, compilations
from capibara.cli._json import print_json
from capibara.cli._layout_settings import GivenByHand
from capibara.errors import ConfigError

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.plan import Slice

__all__ = ["add_slices_arguments", "names_several", "run_slices", "say_unwritten"]

_JOB = ("tokens", "deadline", "budget")


def add_slices_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what says how large a job is, and what limits it."""
    group = parser.add_argument_group(
        "a whole job", "to choose between slices: --topology v4-32,v5e-64,v6e-16"
    )
    group.add_argument("--tokens", type=float, metavar="N", help="tokens to train on, as 1e12")
    group.add_argument(
        "--deadline", type=float, metavar="HOURS", help="the cheapest slice that is done in so many hours"
    )
    group.add_argument(
        "--budget", type=float, metavar="DOLLARS", help="the fastest slice that costs at most so much"
    )


def names_several(args: argparse.Namespace) -> bool:
    """Whether the command is a choice between slices.

    Raises:
      ConfigError: a number that is not above 0, or a limit without the size of the job.
    """
    for name in _JOB:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name}: got {value:g}, expected a number above 0")
    for name in _JOB[1:]:
        if getattr(args, name) is not None and args.tokens is None:
            raise ConfigError(f"--{name} needs --tokens N, the size of the job")
    return args.tokens is not None or "," in (args.topology or "")


def say_unwritten(args: argparse.Namespace) -> None:
    """Say on the standard error which files stay unwritten because there is no plan to write."""
    for option in ("report", "lock", "output"):
        path = getattr(args, option)
        if path is not None:
            print(
                f"capibara plan: --{option} {path}: not written, for no layout is within the limits",
                file=sys.stderr,
            )


def run_slices(
    args: argparse.Namespace,
    config: ModularModelConfig,
    source: str | None,
    base: ModularModelConfig | None,
    given: GivenByHand,
    *,
    compile: bool | None,
) -> int:
    """Plan each slice; return the exit code: 1 where none is within the limits."""
    from capibara.plan import plan_slices

    def announce(target: Slice) -> None:
        if not args.json:
            print(f"capibara plan: {target}", file=sys.stderr, flush=True)

    names = [each.strip() for each in (args.topology or "v4-32").split(",")]
    most = args.max_compiles + (CHOICES if args.choose_settings else 0)
    with compilations(most * len(names), quiet=args.json) as progress:
        found = plan_slices(
            config,
            names,
            tokens=args.tokens,
            deadline_hours=args.deadline,
            budget=args.budget,
            view=args.view,
            memory_limit_gb=given.memory_limit_gb,
            compile=compile,
            max_compiles=args.max_compiles,
            top=args.top,
            keep=given.kept,
            layout=args.layout,
            choose_settings=args.choose_settings,
            region=args.region,
            term=args.term,
            prices=args.prices,
            cache=args.cache,
            workers=args.workers,
            progress=progress,
            on_slice=announce,
        )
    rows = tuple(
        row
        if row.plan is None
        else dataclasses.replace(row, plan=dataclasses.replace(row.plan, config_name=source, base=base))
        for row in found.rows
    )
    found = dataclasses.replace(found, rows=rows)
    chosen = found.chosen
    if chosen is not None and chosen.plan is not None:
        try:
            if args.report:
                chosen.plan.report(args.report)
            if args.lock:
                chosen.plan.lock(args.lock)
        except OSError as error:
            raise ConfigError(f"{error.filename or 'a file'} cannot be written: {error.strerror}") from error
    else:
        say_unwritten(args)
    if args.json:
        print_json({"fits": found.fits, **found.to_json()})
    else:
        from rich.console import Console

        from capibara.plan.report.slices import print_slices

        print_slices(found, Console(highlight=False))
    return 0 if found.fits else 1
