"""``capibara profile``: where a program's time goes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from capibara.observe.bottlenecks.remedies import Tried
    from capibara.observe.bottlenecks.repeated_input import RepeatedInput
    from capibara.observe.profile import PlannedStep, Profile

HELP = """Profile a Python program that uses JAX, unchanged: 'capibara profile -- python script.py'. The profile begins
with the first program that it compiles. 'capibara profile show FOLDER' prints a profile that was kept with -o, and
'capibara profile diff BEFORE AFTER' says which source lines made the difference between two, and which argument made
JAX compile a program again. Exit code: the program's;
1 the profile could not be taken; 2 invalid input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add = parser.add_argument
    add(
        "command",
        nargs="*",
        metavar="show FOLDER | diff BEFORE AFTER | -- COMMAND",
        help="a Python file, or python with its arguments",
    )
    add(
        "-o", "--output", metavar="FOLDER", help="keep the trace (XProf, Perfetto), programs and profile.json"
    )
    add("--plot", metavar="PNG", help="draw a timeline, the longest operations and the roofline")
    add("--html", metavar="FILE", help="write figure and table into one HTML file")
    add(
        "--plan",
        metavar="FILE",
        help="set the program that takes most time beside the step that 'capibara plan --json' (or --lock) predicted",
    )
    add(
        "--apply",
        action="store_true",
        help="then run the program with and without each remedy that needs no change of its source: what did it save?",
    )
    add(
        "--only",
        action="append",
        metavar="KIND",
        help="of --apply: try the remedies of this kind of bottleneck only, such as idle (may be given several times)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="runs on each side for --apply (3)")
    add("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Profile; return the exit code."""
    from capibara.errors import ConfigError
    from capibara.observe.bottlenecks.repeated_input import RepeatedInput
    from capibara.observe.profile.capture import prepare_folder
    from capibara.observe.profile.run import RUN

    what = args.command
    if not what:
        raise ConfigError("COMMAND: got none, expected 'capibara profile -- python script.py', show or diff")
    if args.repeats < 1:
        raise ConfigError(f"--repeats: got {args.repeats}, expected at least 1")
    from capibara.observe.bottlenecks.finding import KINDS

    for kind in args.only or ():
        if kind not in KINDS:
            raise ConfigError(f"--only: got {kind!r}, expected one of {', '.join(KINDS)}")
    if args.only and not args.apply:
        raise ConfigError("--only: says which remedies --apply tries: add --apply")
    if args.apply and what[0] in ("show", "diff"):
        raise ConfigError(
            f"--apply: runs a program, which {what[0]} does not: capibara profile --apply -- python …"
        )
    plan = _planned(args)
    if what[0] == "diff":
        return _diff(args, plan)
    for option, path in (("--plot", args.plot), ("--html", args.html)):
        if path is None:
            continue
        # Known before a program runs for hours. A link that leads to itself is replaced.
        above = Path(os.path.realpath(path)).parent
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise ConfigError(f"{option}: the folder of {path!r} is missing, or cannot be written to")
        if Path(path).is_dir():
            raise ConfigError(f"{option}: got the folder {path!r}, expected the name of a file")
    if what[0] == "show":
        if len(what) != 2:
            raise ConfigError(f"show: got {len(what) - 1} folders, expected one, which -o wrote")
        _write(_read(what[1]), args, plan)
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="capibara-profile-") as temporary,
        contextlib.ExitStack() as inputs,
    ):
        folder = Path(os.path.realpath(args.output or temporary))
        written = folder / "profile.json"
        prepare_folder(folder)
        before = _version(written)
        python, arguments = _python(what)
        # What the program prints is not part of our output.
        again = inputs.enter_context(RepeatedInput()) if args.apply else None
        command = [python, "-c", RUN, str(folder), *arguments]
        code = _ran(command, again and again.next(), sys.stderr if args.json else None)
        if _version(written) != before:  # not one of an earlier time
            profile = _read(folder)
            tried = _tried([python, *arguments], profile, args, again) if again and not code else None
            _write(profile, args, plan, tried)
        elif code == 0:
            print("capibara profile: the program ended before its profile was written", file=sys.stderr)
            return 1
    return code if code >= 0 else 128 - code


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None if there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _ran(command: list[str], source: int | None, output: Any) -> int:
    """Run a command to its end; its exit code, or minus the signal that ended it."""
    from capibara.errors import ConfigError

    try:
        process = subprocess.Popen(command, stdin=source, stdout=output)
    except OSError as error:
        raise ConfigError(f"COMMAND: {command[0]!r} cannot be run: {error}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal told the program, too, which may have something to keep.
            continue
        except BaseException:  # a signal that only this process has
            process.terminate()
            process.wait()
            raise


def _tried(
    command: list[str], profile: Profile, args: argparse.Namespace, again: RepeatedInput
) -> list[Tried]:
    from capibara.observe.bottlenecks.finding import KINDS
    from capibara.observe.bottlenecks.remedies import try_remedies

    def progress(words: str) -> None:
        print(f"trying {words} ({args.repeats} times, and as often without) …", file=sys.stderr, flush=True)

    script = None if command[1] == "-m" else Path(command[1])
    return try_remedies(
        command,
        script,
        profile,
        repeats=args.repeats,
        only=args.only or KINDS,
        progress=progress,
        stdin=again.next,
    )


def _python(command: list[str]) -> tuple[str, list[str]]:
    from capibara.errors import ConfigError

    first = Path(command[0]).name
    if re.fullmatch(r"(python|pypy)[0-9.]*", first):
        python, rest = command[0], command[1:]
        if python in ("python", "python3", f"python3.{sys.version_info.minor}"):
            python = sys.executable
    else:
        python, rest = sys.executable, command
    if not rest or (rest[0] == "-m" and len(rest) < 2):
        raise ConfigError("COMMAND: got no file and no -m MODULE to run, expected python script.py")
    if rest[0] != "-m":
        if rest[0].startswith("-"):
            raise ConfigError(
                f"COMMAND: got the option {rest[0]!r} of Python, expected a file, or -m MODULE: set the others by "
                "environment variables"
            )
        if not Path(rest[0]).is_file():
            raise ConfigError(f"COMMAND: {rest[0]!r} is not a file, expected a Python program")
    return python, rest


def _read(folder: str | Path) -> Profile:
    from capibara.errors import ConfigError
    from capibara.files import read_bounded
    from capibara.observe.profile import Profile

    path = Path(folder)
    path = path / "profile.json" if path.is_dir() else path
    try:
        text = read_bounded(path, 512 * 2**20).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"FOLDER: {str(folder)!r} holds no profile, as -o writes it: {error}") from error
    return Profile.from_json(text)


def _planned(args: argparse.Namespace) -> PlannedStep | None:
    from capibara.observe.profile.planned import read_planned_step

    return None if args.plan is None else read_planned_step(args.plan)


def _write(
    profile: Profile, args: argparse.Namespace, plan: PlannedStep | None, tried: list[Tried] | None = None
) -> None:
    from capibara.observe.bottlenecks import find_bottlenecks
    from capibara.observe.profile.planned import compare_with_plan
    from capibara.observe.profile.plot import plot_profile, write_page

    if args.plot:
        plot_profile(profile, args.plot)
    if args.html:
        write_page(profile, args.html)
    analysis = find_bottlenecks(profile)
    against = None if plan is None else compare_with_plan(profile, plan)
    if args.json:
        beside = {} if against is None else {"plan": against.to_dict()}
        applied = {} if tried is None else {"applied": [one.to_dict() for one in tried]}
        bottlenecks = analysis.to_dict()["bottlenecks"]
        print_json({**profile.metrics(), "bottlenecks": bottlenecks, **beside, **applied})
        return
    print(profile)
    if against is not None:
        print("beside the plan:", against, sep="\n")
    if analysis.has_bottlenecks:
        print("what slows it down, and the part of the time that a remedy would save:")
        print(*analysis.bottlenecks, sep="\n")
    if tried:
        print("what remedies saved, by turns with runs without them:")
        print(*tried, sep="\n")


def _diff(args: argparse.Namespace, plan: PlannedStep | None) -> int:
    from capibara.errors import ConfigError
    from capibara.observe.profile.diff import diff_profiles

    for option, path in (("--plot", args.plot), ("--html", args.html), ("-o", args.output)):
        if path is not None:
            raise ConfigError(
                f"{option}: a comparison is printed, or written with --json; 'show' draws a profile"
            )
    if len(args.command) != 3:
        raise ConfigError(f"diff: got {len(args.command) - 1} profiles, expected two: BEFORE and AFTER")
    found = diff_profiles(_read(args.command[1]), _read(args.command[2]), plan=plan)
    _show(found.to_dict() if args.json else found, args.json)
    return 0


def _show(what: Any, as_json: bool) -> None:
    if as_json:
        print_json(what)
    else:
        print(what)
