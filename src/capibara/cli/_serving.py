"""``capibara plan --serve``: a slice's concurrent requests, latency and price."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from capibara.cli._json import print_json
from capibara.cli._layout_settings import GivenByHand
from capibara.cli._models import named_config
from capibara.errors import ConfigError

__all__ = ["add_serving_arguments", "check_serving_arguments", "run_serving"]

# What says how requests look makes no sense without --serve, and these nothing with it.
_SERVING = ("prompt_length", "output_length", "latency_ms", "first_token_ms", "dtype")
_TRAINING = ("check", "lock", "report")


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that only serving plans read."""
    group = parser.add_argument_group(
        "serving", "with --serve; --topology may then name several slices: v5e:2x2,v6e:2x2"
    )
    group.add_argument(
        "--serve",
        action="store_true",
        help="plan prefill and decoding instead of training: concurrent requests, tokens per second, price",
    )
    group.add_argument("--prompt-length", type=int, metavar="N", help="tokens per request")
    group.add_argument("--output-length", type=int, metavar="N", help="tokens per answer")
    group.add_argument("--latency-ms", type=float, metavar="X", help="maximum milliseconds per token")
    group.add_argument(
        "--first-token-ms", type=float, metavar="X", help="maximum milliseconds until the first token"
    )
    group.add_argument("--dtype", help="dtype of weights and cache: bfloat16 (default), float16, float32")


def check_serving_arguments(args: argparse.Namespace) -> None:
    """Refuse options of the other kind of plan.

    Raises:
      ConfigError: naming them.
    """
    wrong = _TRAINING if args.serve else _SERVING
    given = [f"--{name.replace('_', '-')}" for name in wrong if getattr(args, name) is not None]
    if given:
        said = "cannot be combined with --serve" if args.serve else "is for serving plans: add --serve"
        raise ConfigError(f"{given[0]} {said}")
    if args.serve:
        for name in ("prompt_length", "output_length"):
            if getattr(args, name) is None:
                raise ConfigError(f"--serve needs --{name.replace('_', '-')} N, in tokens")


def run_serving(args: argparse.Namespace) -> int:
    """Plan; return the exit code: 1 where nothing fits, or nothing is fast enough."""
    from capibara.plan.errors import DoesNotFitError
    from capibara.plan.serving import UnreachableTargetError, plan_serving

    config, _ = named_config(args)
    given = GivenByHand.of(config, args)
    if given.kept:
        print(
            f"capibara plan: {', '.join(given.kept)}: settings of training, without effect here",
            file=sys.stderr,
        )
    topology = None if args.topology is None else [each.strip() for each in args.topology.split(",")]
    try:
        with _progress(quiet=args.json) as progress:
            found = plan_serving(
                config,
                topology,
                prompt_length=args.prompt_length,
                output_length=args.output_length,
                latency_ms_per_token=args.latency_ms,
                time_to_first_token_ms=args.first_token_ms,
                dtype=args.dtype or "bfloat16",
                view=args.view,
                memory_limit_gb=given.memory_limit_gb,
                compile=not args.no_compile,
                max_compiles=args.max_compiles,
                region=args.region,
                term=args.term,
                prices=args.prices,
                cache=args.cache,
                workers=args.workers,
                progress=progress,
            )
    except (DoesNotFitError, UnreachableTargetError) as error:
        if args.json:
            fits = not isinstance(error, DoesNotFitError)
            print_json({"fits": fits, "error": str(error)})
        else:
            print(f"capibara plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        print_json({"fits": True, **found.to_json()})
    else:
        from rich.console import Console

        from capibara.plan.serving.table import print_serving

        console = Console(highlight=False)
        print_serving(found, console if console.width >= 130 else Console(highlight=False, width=130))
    return 0


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, str, Any], None] | None]:
    """Shows the current compilation with its elapsed time; finished ones stay as lines."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    started: dict[str, float] = {}
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("ordering slices")

        def step(event: str, words: str, program: Any) -> None:
            if event == "start":
                started[words] = time.perf_counter()
                bar.update(task, description=f"compiling {words}")
                return
            took = "cached" if program.cached else f"{time.perf_counter() - started[words]:.0f} s"
            size = f"{program.memory.total / 2**30:.2f} GiB" if program.memory else "does not fit"
            bar.console.print(f"{words}: {size} ({took})", soft_wrap=True)

        yield step
