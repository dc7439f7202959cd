"""``capibara report``: where the time of a run went."""

from __future__ import annotations

import argparse

from capibara.cli._json import print_json

HELP = """Show where the wall time of a run went, over all the processes that it took: steps that count (goodput),
input, validation, checkpoints, compilation, start, recovery, steps that were taken again, and time without a process.
Exit code: 0; 2 invalid input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="dollars of all devices together, for the whole run; otherwise the catalogue's price of its chips",
    )
    add("--region", help="region of the price")
    add("--term", default="on-demand", help="on-demand, spot, committed-1y or committed-3y")
    add("--prices", metavar="FILE", help="your own prices (TOML)")
    add("--plot", metavar="PNG", help="draw the buckets")
    add("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Report; return the exit code."""
    from capibara.observe.goodput import plot_goodput, read_goodput

    found = read_goodput(
        args.run, price_per_hour=args.price_per_hour, region=args.region, term=args.term, prices=args.prices
    )
    if args.plot:
        plot_goodput(found, args.plot)
    if args.json:
        print_json(found.to_dict())
    else:
        print(found)
    return 0
