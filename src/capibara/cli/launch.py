"""``capibara launch``: one command as several processes that work together."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

HELP = """Run a command as several processes of this machine that train one model together, such as
'capibara launch -n 4 -- train text.txt'. Lines of output begin with the number of their process. If one process fails,
the others are stopped, and the last line tells which and why. Ctrl-C and SIGTERM are passed on: training stops after
the same step everywhere, and is saved."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="a verb of capibara with its arguments, a Python file, or another program",
    )
    parser.add_argument("-n", "--processes", type=int, metavar="N", help="number of processes")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="K",
        help="emulated CPU devices of each process (default: the machine's own)",
    )
    parser.add_argument(
        "--logs",
        metavar="FOLDER",
        help="also write the output of each process to process-0.log … in this folder",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="how long processes that are stopped after a failure may take (default: 3)",
    )


def program_of(command: Sequence[str]) -> list[str]:
    """The program and arguments of a command: a verb of capibara, a Python file, or another program.

    Raises:
      ConfigError: it is none of these.
    """
    from capibara.cli import VERBS
    from capibara.errors import ConfigError, did_you_mean

    name, *rest = command
    if name == "capibara" and rest:
        name, *rest = rest
    if name in VERBS and name != "launch":
        return [sys.executable, "-m", "capibara", name, *rest]
    if name.endswith(".py"):
        return [sys.executable, name, *rest]
    if shutil.which(name) is None or name == "launch":
        raise ConfigError(
            f"command: got {name!r:.200}, expected a verb of capibara, such as train, a Python file or a program."
            f"{did_you_mean(name, VERBS)}"
        )
    return [name, *rest]


def run(args: argparse.Namespace) -> int:
    """Launch; return 0, or the exit code of the first process that failed."""
    from capibara.errors import ConfigError
    from capibara.launch import launch_processes

    if not args.command:
        raise ConfigError(
            "command: got none. Give one after --, such as: capibara launch -n 2 -- train text.txt"
        )
    program = program_of(args.command)
    if args.processes is None:
        raise ConfigError(
            "-n: got none, expected the number of processes, such as: capibara launch -n 2 -- train"
        )
    return launch_processes(program, args.processes, devices=args.devices, logs=args.logs, grace=args.grace)
