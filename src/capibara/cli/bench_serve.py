"""``capibara bench-serve``: an endpoint under load."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

HELP = """Measure an endpoint with the API of OpenAI, such as that of capibara serve: requests come at random times or
all at once; printed are the times to the first token (TTFT), of a token (TPOT), between pieces (ITL) and of whole
texts, and goodput. Exit code: 0 every request got what it deserves (429 with a full queue included), 1 some did not, 2
invalid input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT, with or without /v1")
    add("--requests", type=int, metavar="N", help="how many (default: 100; with --duration: any number)")
    add("--duration", type=float, metavar="S", help="seconds in which requests are sent")
    add(
        "--rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second, at random (default: at once)",
    )
    add("--concurrency", type=int, metavar="N", help="most requests under way (default: any number)")
    add("--input-tokens", default="64", metavar="N|A:B", help="letters of a prompt, or a range (default: 64)")
    add("--output-tokens", default="64", metavar="N|A:B", help="tokens of a text, or a range (default: 64)")
    add("--shared-prefix", type=int, default=0, metavar="N", help="first letters that all prompts share")
    add("--dataset", metavar="FILE", help="prompts: JSONL of strings, or objects with prompt or text")
    add("--chat", action="store_true", help="ask /v1/chat/completions; needs --dataset")
    add("--model", help="the model's name in requests (default: left out)")
    add("--api-key", metavar="KEY", help="(default: the environment variable OPENAI_API_KEY)")
    add(
        "--stop-early",
        action="store_true",
        help="let texts end by themselves (for servers without ignore_eos)",
    )
    add("--cancel", type=float, default=0.0, metavar="PART", help="part of the clients that go away (0 to 1)")
    add("--malformed", type=float, default=0.0, metavar="PART", help="part of the requests that are nonsense")
    add("--ttft-ms", type=float, metavar="X", help="target of goodput: the first token")
    add("--tpot-ms", type=float, metavar="X", help="target of goodput: a token")
    add("--e2e-ms", type=float, metavar="X", help="target of goodput: a whole text")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="after which an answer has failed (default: 600)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")
    add("--plot", metavar="PNG", help="draw times and their distribution")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure; return the exit code."""
    from capibara.cli._json import print_json
    from capibara.errors import ConfigError
    from capibara.serve.bench import BenchSettings, bench_serve, parse_range, plot_bench, read_prompts

    if args.plot is not None and not Path(args.plot).absolute().parent.is_dir():
        raise ConfigError(f"--plot {args.plot!r:.200}: there is no such folder. Make it first")
    if args.chat and args.dataset is None:
        raise ConfigError("--chat: needs texts to ask. Name a file of them with --dataset")
    requests = args.requests
    if requests is None:
        requests = 100 if args.duration is None else 0
    settings = BenchSettings(
        requests=requests,
        duration_s=args.duration,
        rate=args.rate,
        concurrency=args.concurrency,
        input_tokens=parse_range("--input-tokens", args.input_tokens),
        output_tokens=parse_range("--output-tokens", args.output_tokens),
        prompts=() if args.dataset is None else read_prompts(args.dataset),
        shared_prefix=args.shared_prefix,
        chat=args.chat,
        model=args.model,
        key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        ignore_eos=not args.stop_early,
        cancel=args.cancel,
        malformed=args.malformed,
        ttft_ms=args.ttft_ms,
        tpot_ms=args.tpot_ms,
        e2e_ms=args.e2e_ms,
        timeout_s=args.timeout,
        seed=args.seed,
    )
    with _progress(requests, quiet=args.quiet or args.json) as progress:
        report = bench_serve(args.url, settings, progress=progress)
    if args.json:
        print_json(report.to_json())
    else:
        print(report)
    if args.plot is not None:
        plot_bench(report, args.plot)
    return 1 if report.undeserved else 0


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    from capibara.cli._archives import on_terminal

    if quiet or not on_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda done: bar.update(task, completed=done)
