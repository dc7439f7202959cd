"""``capibara plan``: what a configuration needs on a TPU slice or a host of GPUs, before renting one.

Exit code 0 if a plan was made, 1 if nothing fits or ``--check`` found a difference, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._compilations import CHOICES, compilations
from capibara.cli._json import print_json
from capibara.cli._layout_settings import GivenByHand
from capibara.cli._models import further_config, named_config
from capibara.cli._serving import add_serving_arguments, check_serving_arguments, run_serving
from capibara.cli._slices import add_slices_arguments, names_several, run_slices, say_unwritten
from capibara.errors import ConfigError
from capibara.files import replace_file

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.plan import Plan
    from capibara.plan.targets import Target

HELP = """Find the fastest way to train a configuration on a TPU slice or a host of GPUs: mesh, sharding,
rematerialisation, microbatches. The TPU compiler (libtpu), or XLA's for GPUs, compiles the most promising ones on this
machine, without the device: memory is the compiler's own figure, time is predicted from the compiled program.
For instance:
capibara plan --config production/tpu_v4 --topology v4:2x2x4"""

# Changes that --explain compiles, and that --improve names.
_TRIED, _IMPROVEMENTS = 5, 3
# About so many that it compiles.
_PROPOSED = 6
# Settings that the weights of a published model decide.
_OF_WEIGHTS = ("model.vocab_size", "model.mlp_dim")

# What only the compiler can say or write.
_COMPILED = ("lock", "explain", "least_memory", "where", "choose_settings", "improve")

# What --check reads from the lockfile, or has no use for.
_LOCKED = (
    *(
        "overrides",
        "config",
        "model",
        "topology",
        "view",
        "dcn_gbps",
        "memory_limit",
        "max_compiles",
        "top",
        "explain",
        "least_memory",
        "where",
        "choose_settings",
        "improve",
        "no_compile",
        "layout",
        "tokens",
        "deadline",
        "budget",
    ),
    *("region", "term", "prices", "workers", "report", "lock", "export", "output"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the configuration's; those of a layout (model.remat, tpu.flags …) are kept",
    )
    parser.add_argument(
        "--config", default="demo", help="built-in configuration name, or path of a TOML file"
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="folder of a published model, of which only config.json is read, or a GGUF file",
    )
    parser.add_argument(
        "--topology",
        help="v4:2x2x4, v4-32, v5p:4x4x4, v5e-16, v6e:4x4 …; GPUs of one host: h100:8, h200:4, b200:8 …; two slices: "
        "2xv5p:4x4x4; several to choose from: v4-32,v5e-64 (default: v4-32)",
    )
    parser.add_argument(
        "--dcn-gbps",
        type=float,
        metavar="RATE",
        help="network between several slices, Gbit/s for each chip (default: as published for the chip)",
    )
    parser.add_argument("--view", choices=("chip", "core"), help="what a device is (v4: a chip by default)")
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="memory limit per device, if below its capacity"
    )
    parser.add_argument(
        "--max-compiles", type=int, default=8, metavar="N", help="layouts to compile (default: 8)"
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="layouts to list (default: 5)")
    parser.add_argument(
        "--layout",
        metavar="SETTINGS",
        help="your own layout, to be priced beside the pick: 'tpu.topology=16x1 model.remat=dots', or a lockfile",
    )
    parser.add_argument(
        "--least-memory",
        action="store_true",
        help="also find the least memory that the compiler fits the best layout into, and its step time",
    )
    parser.add_argument(
        "--where",
        action="store_true",
        help="list where the time and memory of the best layout go: parts of the model, source lines",
    )
    parser.add_argument(
        "--choose-settings",
        action="store_true",
        help="also choose settings of the program in the best layout (blocks compiled one by one, gradients exchanged "
        "in 16 bits): compiled alone and together, which takes several times as long",
    )
    parser.add_argument(
        "--improve",
        action="store_true",
        help="also compile changes of settings that a plan may not choose (dtypes, sizes, the batch), and name three",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="if nothing fits: list the largest buffers, and compile remedies",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="estimates only, in a second, without a compiler"
    )
    parser.add_argument("--region", help="region of the price")
    parser.add_argument("--term", default="on-demand", help="on-demand, spot, committed-1y or committed-3y")
    parser.add_argument("--prices", metavar="FILE", help="your own prices (TOML)")
    parser.add_argument("--workers", type=int, metavar="N", help="parallel compilations")
    parser.add_argument("--report", metavar="FILE", help="also write a page (.html) or figure (.png)")
    parser.add_argument("--lock", metavar="FILE", help="write the result to a lockfile")
    parser.add_argument(
        "--export",
        choices=("maxtext", "jax"),
        help="the best layout as settings of MaxText (a shell script), or as a Python file of NamedSharding",
    )
    parser.add_argument("--output", metavar="FILE", help="where --export is written (default: print only it)")
    parser.add_argument(
        "--check", metavar="FILE", help="recompile a lockfile and compare; exit code 1 if it drifted"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="PART",
        help="relative growth that --check allows (default: 0.05)",
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="folder of compiled results (default: the user's cache)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_slices_arguments(parser)
    add_serving_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan; return the exit code."""
    from capibara.plan import DoesNotFitError, plan

    _check_given(args)
    check_serving_arguments(args)
    if args.model is not None:
        _refuse(args, ("config",), "cannot be combined with --model")
    if args.serve:
        _refuse(
            args,
            (
                "explain",
                "least_memory",
                "where",
                "choose_settings",
                "improve",
                "tolerance",
                "top",
                "export",
                "output",
                "dcn_gbps",
                "layout",
                "tokens",
                "deadline",
                "budget",
            ),
            "cannot be combined with --serve",
        )
        return run_serving(args)
    if args.check is not None:
        _refuse(args, _LOCKED, "cannot be combined with --check: the lockfile says what is compiled")
        return _check(args)
    _refuse(args, ("tolerance",), "is for --check")
    for option in _COMPILED:
        if getattr(args, option) and args.no_compile:
            raise ConfigError(f"--{option.replace('_', '-')} needs the compiler: leave out --no-compile")
    _check_files(args)
    if names_several(args):
        one = ("explain", "least_memory", "where", "improve", "export", "output", "dcn_gbps")
        alone = "," in _topology(args)
        _refuse(args, one, "is for one slice: name it alone" if alone else "cannot be combined with --tokens")
    if args.model is None:
        config, source = named_config(args)
        base = None
    else:
        config, source = further_config(args.model, args.overrides), args.model
        base = further_config(args.model, ())
    given = GivenByHand.of(config, args)
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {args.workers}")
    _check_targets(args, config)
    if not args.no_compile:
        _show_compiler_notes(args)
    if names_several(args):
        return run_slices(args, config, source, base, given, compile=_compile(args))
    try:
        with compilations(
            args.max_compiles
            + (_PROPOSED if args.improve else 0)
            + (CHOICES if args.choose_settings else 0)
            + (args.layout is not None),
            quiet=args.json,
        ) as progress:
            found = plan(
                config,
                _topology(args),
                view=args.view,
                dcn_gbps=args.dcn_gbps,
                memory_limit_gb=given.memory_limit_gb,
                compile=_compile(args),
                max_compiles=args.max_compiles,
                top=args.top,
                keep=given.kept,
                layout=args.layout,
                least_memory=args.least_memory,
                choose_settings=args.choose_settings,
                improve=_IMPROVEMENTS if args.improve else 0,
                fixed=() if base is None else _OF_WEIGHTS,
                region=args.region,
                term=args.term,
                prices=args.prices,
                cache=args.cache,
                workers=args.workers,
                progress=progress,
            )
            notes = (*found.notes, *given.notes(config, found.best.training_layout.settings()))
            notes += () if args.choose_settings else _unchosen(found)
            found = dataclasses.replace(found, config_name=source, base=base, notes=notes)
    except DoesNotFitError as error:
        report = None
        if args.explain:
            with compilations(1 + _TRIED, quiet=args.json) as progress:
                report = _explained(config, error.layout, args, given.memory_limit_gb, progress)
        if args.json:
            told = {} if report is None else {"explanation": report.to_json()}
            print_json({"fits": False, "error": str(error), **told})
        else:
            print(f"capibara plan: {error}", file=sys.stderr)
            if report is not None:
                print(report)
        say_unwritten(args)
        return 1
    try:
        if args.report:
            found.report(args.report)
        if args.lock:
            found.lock(args.lock)
        exported = None if args.export is None else found.export(args.export)
        if exported is not None and args.output:
            replace_file(Path(args.output), exported)
    except OSError as error:
        raise ConfigError(f"{error.filename or 'a file'} cannot be written: {error.strerror}") from error
    if exported is not None and not args.output:
        print(exported, end="")
    elif args.json:
        print_json({"fits": True, **found.to_json()})
    else:
        _show(found, where=args.where)
    return 0


def _unchosen(found: Plan) -> tuple[str, ...]:
    """That settings of the program stayed as they are."""
    from capibara.plan.program_settings import program_changes

    if found.config is None or found.best.memory_source != "compiler" or found.slices > 1:
        return ()
    changes = [each for each in program_changes(found.config, found.best.layout) if not each.reason]
    names = ", ".join(each.name for each in changes)
    return (f"settings of the program stay as configured: {names} (--choose-settings)",) if names else ()


def _compile(args: argparse.Namespace) -> bool | None:
    """Whether to compile; None: if there is a compiler. Options that only a compiled plan supports need one."""
    if args.no_compile:
        return False
    return True if any(getattr(args, option) for option in _COMPILED) else None


def _topology(args: argparse.Namespace) -> str:
    return "v4-32" if args.topology is None else args.topology


def _targets(args: argparse.Namespace) -> Iterator[tuple[Target, int]]:
    """Every target that is named, and how many of it.

    Raises:
      TopologyError, PlanError: an unknown topology, or a rate of the network that it has no use for.
    """
    from capibara.plan import parse_target
    from capibara.plan.several import Several

    for name in _topology(args).split(","):
        several = Several.read(name.strip(), args.view, args.dcn_gbps)
        yield (
            (parse_target(name.strip(), args.view), 1) if several is None else (several.target, several.count)
        )


def _check_targets(args: argparse.Namespace, config: ModularModelConfig) -> None:
    """Before minutes are spent on compiling: refuse a lockfile or an export that cannot be made of what is planned."""
    from capibara.plan.export import check_export
    from capibara.plan.lock import check_lockable

    for target, slices in _targets(args):
        if args.lock:
            check_lockable(config, slices)
        if args.export is not None:
            check_export(config, target, args.export)


def _show_compiler_notes(args: argparse.Namespace) -> None:
    """Warn before minutes are spent on compiling; the plan's notes repeat it."""
    from capibara.plan import CompilerMissingError
    from capibara.plan.compiler import compiler_for

    notes: dict[str, None] = {}
    for target, _ in _targets(args):
        with contextlib.suppress(CompilerMissingError):
            notes |= dict.fromkeys(compiler_for(target).notes())
    for note in notes:
        print(f"capibara plan: {note}", file=sys.stderr)


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options that would be ignored, if they differ from their defaults."""
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name in names:
        if getattr(args, name) != defaults.get_default(name) and getattr(args, name) != []:
            said = "key=value settings" if name == "overrides" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{said} {why}")


def _check_given(args: argparse.Namespace) -> None:
    """Refuse empty texts, such as those of a shell's variables that are not set."""
    for name in ("config", "model", "topology", "region", "term", "prices", "cache", "check", "layout"):
        if getattr(args, name) == "":
            raise ConfigError(f"--{name}: got '', expected a value. Leave the option out for its default")
    if args.topology is not None and not all(part.strip() for part in args.topology.split(",")):
        raise ConfigError(
            f"--topology: got {args.topology!r}, expected slices separated by single commas, such as "
            "v4-32,v5e:2x2. Remove the comma that names no slice"
        )
    if args.memory_limit is not None and not 0 < args.memory_limit < float("inf"):
        raise ConfigError(f"--memory-limit: got {args.memory_limit:g}, expected GiB above 0, such as 24")


def _check_files(args: argparse.Namespace) -> None:
    """Before minutes are spent on what cannot be written down."""
    if args.report and Path(args.report).suffix.lower() not in (".html", ".png"):
        raise ConfigError(f"--report {args.report}: the name must end in .html or .png")
    if args.output is not None and args.export is None:
        raise ConfigError("--output is for --export: give --export maxtext or --export jax")
    if args.export is not None and args.output is None and (args.json or args.where):
        raise ConfigError("--export prints only the exported file: add --output FILE for it")
    for option in ("report", "lock", "output"):
        path = getattr(args, option)
        if path is not None and (
            not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir()
        ):
            raise ConfigError(f"--{option} {path!r}: expected a file in a folder that exists")


def _explained(config: Any, layout: Any, args: argparse.Namespace, limit: float | None, progress: Any) -> Any:
    from capibara.plan import parse_target
    from capibara.plan.memory import explain_oom
    from capibara.plan.several import Several
    from capibara.plan.work import TrainWork

    if layout is None:
        return None
    several = Several.read(_topology(args), args.view, args.dcn_gbps)
    return explain_oom(
        config if several is None else several.share(TrainWork(config)).config,
        layout,
        parse_target(_topology(args), args.view) if several is None else several.target,
        max_compiles=_TRIED,
        memory_limit_gb=limit,
        workers=args.workers,
        cache=args.cache,
        progress=progress,
    )


def _check(args: argparse.Namespace) -> int:
    from capibara.plan.lock import check_lock

    tolerance = 0.05 if args.tolerance is None else args.tolerance
    with compilations(1, quiet=args.json) as progress:
        found = check_lock(
            args.check,
            hbm_tolerance=tolerance,
            time_tolerance=tolerance,
            cache=args.cache,
            progress=progress,
        )
    if args.json:
        print_json(found.to_json())
    else:
        print(found)
    return 0 if found.passed else 1


def _show(found: Plan, *, where: bool) -> None:
    from rich.console import Console

    from capibara.plan.report.table import print_plan

    console = Console(highlight=False)
    # A table that wraps cannot be read: where the terminal is narrow, or there is none, lines are long instead.
    wide = console if console.width >= 130 else Console(highlight=False, width=130)
    print_plan(found, wide, where=where)
