"""``capibara train``: one command from text to a trained model."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.plan.planned import Planned

HELP = """Train a language model on text. Without TEXT it trains on CPython's own documentation. Run the same
command again to resume: after Ctrl-C, a kill or a power cut it continues exactly from the newest checkpoint.
Arguments with '=' are settings, such as train.steps=2000. The learning rate falls until train.steps, so a run
continued with more steps follows the longer schedule from its current step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "items",
        nargs="*",
        metavar="TEXT|key=value",
        help="text files; .jsonl, .jsonl.gz or .parquet with texts, conversations, or prompts and completions; folders "
        "(searched for .txt .md .py .rst); '-' for standard input; settings",
    )
    parser.add_argument(
        "--config",
        help="a TOML file, or a packaged name (default: demo; with --plan: the planned one)",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="train with the layout of a plan: a lockfile (capibara plan --lock) or output of capibara plan --json",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="train a model further: the folder of a published one (Hugging Face) or of a run, or a GGUF file",
    )
    parser.add_argument("--directory", help="folder of the run (default: checkpoint.directory)")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the run at the end: losses, gradients, learning rate, speed (.png, .svg, .pdf)",
    )
    parser.add_argument("--fresh", action="store_true", help="remove the run in the folder and start over")
    parser.add_argument("--allow-new-text", action="store_true", help="continue a run on different text")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the summary as JSON on standard output, all else on standard error",
    )


def split_items(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate texts from settings.

    An argument with "=" is a setting if what stands before it is the name of one. If it is not, it may be a
    file whose name has an "="; and if there is no such file, it is a setting that was misspelt, and is
    reported as that.

    Returns:
      texts and settings, each in order.
    """
    from capibara.config import ModularModelConfig
    from capibara.config.overrides import leaf_fields

    known = set(leaf_fields(ModularModelConfig))
    known |= {key.rpartition(".")[2] for key in known}
    texts, settings = [], []
    for item in items:
        key, equals, _ = item.partition("=")
        looks_like_key = re.fullmatch(r"\s*[A-Za-z_][\w.]*\s*", key) is not None
        if equals and (key.strip() in known or (looks_like_key and not os.path.lexists(item))):
            settings.append(item)
        else:
            texts.append(item)
    return texts, settings


def of_plan(planned: Planned, path: str) -> ModularModelConfig:
    """The configuration that was planned, in a run folder named like the file.

    A file that may come from somebody else says neither which folder here is written to, nor that a run in it goes.
    """
    from capibara.config import ModularModelConfig

    own = {"directory": f"runs/{Path(path).stem}"}
    return ModularModelConfig.from_dict({**planned.config.to_dict(), "checkpoint": own})


def run(args: argparse.Namespace) -> int:
    """Train; return 0, or 128 + n if signal n stopped it."""
    from capibara.train.memory import keep_freed_memory
    from capibara.train.processes import join_processes

    keep_freed_memory()
    if join_processes().count > 1 and threading.current_thread() is threading.main_thread():
        # JAX's coordination takes SIGTERM for a notice of preemption and goes on. Until training handles it, it ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from capibara.cli._models import start_from
    from capibara.compilation.persistent_cache import keep_compiled
    from capibara.config import ModularModelConfig
    from capibara.core.encoders import require_decoder
    from capibara.core.float64 import check_float64
    from capibara.data import load_tokenizer
    from capibara.errors import ConfigError
    from capibara.launch import may_be_fewer
    from capibara.train.examples import load_data
    from capibara.train.placement import Placement
    from capibara.train.plot import check_suffix, plot_run
    from capibara.train.processes import Processes
    from capibara.train.progress import SilentReporter, make_reporter
    from capibara.train.signals import stop_on_signals

    if args.plot is not None:
        check_suffix(Path(args.plot))
    texts, settings = split_items(args.items)
    planned = origin = tokenizer = None
    if args.plan is not None:
        from capibara.plan.planned import read_planned

        planned = read_planned(args.plan)
    if args.model is not None:
        if args.config is not None:
            raise ConfigError("--config cannot be combined with --model. Remedy: settings, key=value.")
        config, tokenizer, origin = start_from(
            args.model, settings, None if planned is None else planned.settings()
        )
    elif planned is None:
        config = ModularModelConfig.from_toml("demo" if args.config is None else args.config, settings)
    else:
        base = (
            of_plan(planned, str(args.plan))
            if args.config is None
            else ModularModelConfig.from_toml(args.config)
        )
        config = base.with_overrides(planned.layout.settings()).with_overrides(settings)
    if args.directory is not None:
        config = config.with_overrides({"checkpoint.directory": args.directory})
    if texts:
        config = config.with_overrides({"data.paths": texts})
    # Before the text is read and the model built.
    check_float64(config, "training")
    require_decoder(config.model, "training")
    if config.tpu.enabled:
        Placement.of(config, elastic=may_be_fewer(os.environ))
    out = sys.stderr if args.json else sys.stdout
    first = Processes.here().first
    reporter = make_reporter(out) if first else SilentReporter()
    if planned is not None:
        reporter.note(f"plan for {planned.topology}: {planned.layout}")
        if different := planned.differences(config):
            reporter.warn(
                f"the plan is for other settings, so that its memory and time do not hold: {'; '.join(different[:8])}"
                + (" …" if len(different) > 8 else "")
            )
    if tokenizer is None and config.data.tokenizer != "bytes":
        tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = load_data(config.data, objective=config.finetune.objective, tokenizer=tokenizer)
    reporter.note(str(corpus))

    with stop_on_signals() as stop, keep_compiled(reporter.note):
        from capibara.core import ModularCapibaraModel
        from capibara.train import train

        model = ModularCapibaraModel(config)
        reporter.note(f"model: {model.num_params:,} parameters; run: {config.checkpoint.directory}")
        report = train(
            config,
            model,
            corpus,
            fresh=args.fresh,
            allow_new_text=args.allow_new_text,
            reporter=reporter,
            stop=stop,
            origin=origin,
        )
    if report.reason != "already trained":
        reporter.note(str(report))
    if args.plot is not None and first:
        metrics = Path(report.directory) / "metrics.jsonl"
        drawn = plot_run(metrics, Path(args.plot), title=f"{corpus.name}, {model.num_params:,} parameters")
        reporter.note(f"drawn: {args.plot}" if drawn else f"nothing to draw: {metrics} has no lines")
    if args.json and first:
        print_json(report.to_dict())
    if report.reason == "interrupted" and report.signal is not None:
        reporter.note(f"stopped after step {report.step:,}; run the same command again to continue")
        return 128 + report.signal
    return 0
