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
        metavar="SECONDS",
        help="how long processes that are stopped after a failure may take (default: 3; of a JobSet's pods, whenever "
        "they are stopped, 120)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="start all again so often after a failure other than invalid input (default: 0; of a JobSet, and with "
        "--min-processes, 10)",
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="M",
        help="go on with fewer processes, at least M, when one cannot be replaced",
    )
    parser.add_argument(
        "--replacements",
        type=int,
        metavar="K",
        help="with --min-processes: replace a process that fails within a minute of its start so often in a row "
        "(default: 1)",
    )
    parser.add_argument(
        "--retry",
        type=float,
        metavar="SECONDS",
        help="with --min-processes: try all N again after so long with fewer (default: 300)",
    )
    cluster = parser.add_argument_group("Kubernetes: write a manifest instead of running anything")
    cluster.add_argument(
        "--jobset", metavar="NAME", help="print a JobSet of this name, for kubectl apply -f -"
    )
    cluster.add_argument("--image", help="the container image, in which Capibara is installed")
    cluster.add_argument(
        "--topology",
        metavar="SLICE",
        help="a TPU slice of GKE, such as v5e:4x4: one process on each of its hosts",
    )
    cluster.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="a persistent volume claim that all pods mount, for the folder of the run; may be given again",
    )
    cluster.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the processes",
    )
    cluster.add_argument("--namespace", help="namespace of the pods")
    cluster.add_argument("--service-account", metavar="NAME", help="service account of the pods")
    cluster.add_argument("--spot", action="store_true", help="run on spot nodes of GKE")


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
    if args.jobset is not None:
        return _print_jobset(args)
    for option in ("image", "topology", "volume", "env", "namespace", "service_account", "spot"):
        if getattr(args, option):
            raise ConfigError(
                f"--{option.replace('_', '-')} is for a manifest. Give it a name: --jobset NAME"
            )
    program = program_of(args.command)
    if args.processes is None:
        raise ConfigError(
            "-n: got none, expected the number of processes, such as: capibara launch -n 2 -- train"
        )
    elastic = {"replacements": args.replacements, "retry": args.retry}
    for name, value in elastic.items():
        if value is not None and args.min_processes is None:
            raise ConfigError(
                f"--{name} is for groups that go on with fewer. Say how many: --min-processes M"
            )
    return launch_processes(
        program,
        args.processes,
        devices=args.devices,
        logs=args.logs,
        grace=3.0 if args.grace is None else args.grace,
        restarts=args.restarts,
        min_processes=args.min_processes,
        **{name: value for name, value in elastic.items() if value is not None},
    )


def _print_jobset(args: argparse.Namespace) -> int:
    from capibara.cli import VERBS
    from capibara.errors import ConfigError
    from capibara.launch import jobset_manifest, to_yaml

    if args.image is None:
        raise ConfigError("--image: got none, expected the container image, in which Capibara is installed")
    for name in ("devices", "logs", "min_processes", "replacements", "retry"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for processes of this machine. Leave it out with --jobset"
            )
    if args.grace is not None and not args.grace.is_integer():
        raise ConfigError(f"--grace: got {args.grace}, expected whole seconds with --jobset")
    grace = {} if args.grace is None else {"grace_seconds": int(args.grace)}
    volumes = {path: claim for claim, path in _pairs("volume", args.volume, ":")}
    manifest = jobset_manifest(
        args.jobset,
        # The image has programs of its own: only verbs are known here.
        ["capibara", *args.command] if args.command[0] in VERBS else args.command,
        image=args.image,
        topology=args.topology,
        processes=args.processes,
        volumes=volumes,
        environment=dict(_pairs("env", args.env, "=")),
        namespace=args.namespace,
        service_account=args.service_account,
        spot=args.spot,
        max_restarts=10 if args.restarts is None else args.restarts,
        **grace,
    )
    sys.stdout.write(to_yaml(manifest))
    return 0


def _pairs(option: str, texts: Sequence[str], sign: str) -> list[tuple[str, str]]:
    from capibara.errors import ConfigError

    found = [text.partition(sign) for text in texts]
    for text, (name, _, value) in zip(texts, found, strict=True):
        if not name or (not value and sign not in text):
            raise ConfigError(f"--{option}: got {text!r:.80}, expected two parts with {sign!r} between them")
    return [(name, value) for name, _, value in found]
