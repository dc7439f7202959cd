"""``capibara migrate PATH…``: check files and folders against the installed JAX."""

from __future__ import annotations

import argparse
import os
import sys

from capibara.cli._json import print_json
from capibara.errors import CapibaraError

HELP = "check Python code for JAX names and keywords that the installed JAX no longer has"

_COLOURS = {"error": "31", "warning": "33", "info": "36"}
_FAILING = {"error": ("error",), "warning": ("error", "warning")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara migrate``."""
    parser.description = (
        "Read Python files and notebooks without running them and report every JAX name, keyword or option "
        "that fails, is deprecated or is misspelled on the installed JAX. Exit code: 0 nothing found at the "
        "level of --fail-on, 1 something found, 2 a path cannot be read."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a .py, .pyi or .ipynb file, or a folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--fail-on",
        choices=sorted(_FAILING),
        default="error",
        help="lowest severity that gives exit code 1 (default: error)",
    )
    parser.add_argument("--no-imports", action="store_true", help="skip import statements")
    parser.add_argument("--no-functions", action="store_true", help="skip names and calls")
    parser.add_argument("--no-performance", action="store_true", help="skip slow patterns")


def run(args: argparse.Namespace) -> int:
    """Run the check and print the report; returns the exit code."""
    from capibara.migrate import check_paths

    try:
        report = check_paths(
            args.paths,
            check_imports=not args.no_imports,
            check_functions=not args.no_functions,
            check_performance=not args.no_performance,
        )
    except CapibaraError as error:
        print(f"capibara migrate: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(report.to_dict(), indent=2)
    else:
        colourful = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for issue in report.issues:
            line = str(issue)
            if colourful:
                word = f"{issue.severity}:"
                line = line.replace(word, f"\033[{_COLOURS[issue.severity]}m{word}\033[0m", 1)
            print(line)
        print(report.summary())
    return 1 if report.with_severity(*_FAILING[args.fail_on]) else 0
