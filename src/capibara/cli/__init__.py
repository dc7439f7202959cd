"""The command line: ``capibara VERB …``, one module per verb.

``capibara --help`` has to be fast, so a verb's module (and with it JAX) is imported only when that verb is
called; :data:`VERBS` describes each verb in one line. A verb's module has ``HELP``,
``add_arguments(parser)`` and ``run(args) -> int``.

Exit codes: 0 success; 1 the request failed, or a check found something; 2 wrong usage or invalid input, with
one clear message and no traceback; 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from capibara.cli._leaving import leave, report_error
from capibara.cli._signals import end_on_signals, raise_on_sigterm
from capibara.errors import CapibaraError, did_you_mean

__all__ = ["VERBS", "main"]

VERBS: dict[str, str] = {
    "train": "train a model on text; run again to resume",
    "generate": "write text from a trained model",
    "serve": "answer requests over HTTP, with the API of OpenAI",
    "bench-serve": "measure an endpoint under load: times of tokens, goodput",
    "embed": "make vectors of texts",
    "import": "make a run of a published model (a folder of Hugging Face, GGUF)",
    "export": "write a model in a form that others load (Hugging Face, vLLM, llama.cpp)",
    "launch": "run a command as several processes that train one model",
    "tokenizer": "learn a tokenizer from text",
    "compress": "compress a safetensors file or a model, losslessly or to a ratio",
    "decompress": "write safetensors files from archives",
    "inspect": "show what a model, a run or an archive is made of",
    "verify": "decode every tensor of archives and check their checksums",
    "plan": "plan a configuration on a TPU slice: memory, time, price",
    "doctor": "show what is installed, which devices are available and which implementations run",
    "health": "exercise every device: exact products, memory patterns, links; what failed is named",
    "profile": "find where the time of a program goes, operation by operation",
    "monitor": "watch this machine and its devices, with alerts",
    "report": "show where the wall time of a run went",
    "tune": "measure the fastest block sizes and implementations on this device",
    "migrate": "check source code against the installed JAX",
}

# These handle SIGTERM themselves: a run stops between two steps, and is saved.
_OWN_SIGNALS = ("train", "launch", "serve")
# What stands after -- is another command, with options of its own.
_COMMANDS = ("launch", "profile")
# These write large files on many threads, or wait for threads inside JAX: one that is still there when Python exits
# aborts the process, and an exception of a handler is lost in JAX's callbacks.
_ENDING = ("compress", "decompress", "embed", "export", "health")
# Threads that Python does not survive or waits for on its way out: of saves that hang, of work on devices, and of
# imports beside a start that ends early.
_THREADS = ("capibara-checkpoint-", "capibara-health", "capibara-imports")


class _Parser(argparse.ArgumentParser):
    """Suggests the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments:"):
            wrong = message.partition(":")[2].split()[0].partition("=")[0]
            hint = did_you_mean(
                wrong, [name for name in self._option_string_actions if name.startswith("--")]
            )
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}.{hint} See '{self.prog} --help'.\n")


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return (
        "usage: capibara VERB …\n\n"
        "Write a JAX model once, then train, serve and compress it.\n\n"
        f"verbs:\n{verbs}\n\n"
        "options:\n  --version  print the version\n"
        "  --help     print this; 'capibara VERB --help' describes a verb\n"
    )


def _load(verb: str) -> ModuleType:
    name = f"{__name__}.{verb.replace('-', '_')}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise CapibaraError(
            f"this installation of Capibara lacks the module {name}. Install it again: "
            f"pip install --force-reinstall capibara-jax"
        ) from None


def _run(arguments: list[str], *, own_process: bool = False) -> int:
    if not arguments:
        sys.stderr.write(_overview())
        return 2
    verb, *rest = arguments
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if verb in ("-V", "--version"):
        from capibara import __version__

        print(f"capibara {__version__}")
        return 0
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "verb"
        hint = did_you_mean(verb, [*VERBS, "--help", "--version"])
        raise CapibaraError(f"there is no {kind} {verb!r}.{hint} The verbs are: {', '.join(VERBS)}.")
    module = _load(verb)
    parser = _Parser(prog=f"capibara {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    # Intermixed: texts and key=value settings may stand before, between and after options.
    after: list[str] = []
    if verb in _COMMANDS and "--" in rest:
        rest, after = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    parsed = parser.parse_intermixed_args(rest)
    if after:
        parsed.command = [*parsed.command, *after]
    with _handlers(verb, own_process):
        return module.run(parsed)


def _handlers(verb: str, own_process: bool) -> contextlib.AbstractContextManager[None]:
    if verb in _OWN_SIGNALS:
        return contextlib.nullcontext()
    return end_on_signals() if own_process and verb in _ENDING else raise_on_sigterm()


def _is_waited_for() -> bool:
    """Whether Python would wait or abort on its way out: for other processes, which wait for this one, or threads."""
    if any(thread.name.startswith(_THREADS) for thread in threading.enumerate()):
        return True
    distributed = sys.modules.get("jax.distributed")
    return distributed is not None and distributed.is_initialized()


def _open_outputs() -> None:
    """What is printed where the caller closed an output goes nowhere, and its number is of no file that is opened."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments after the program's name; ``sys.argv[1:]`` by default.

    Returns:
      The exit code.
    """
    _open_outputs()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), own_process=argv is None)
        sys.stdout.flush()
    except BaseException as error:
        if argv is None and _is_waited_for():
            leave(error)
        if (code := report_error(error)) is None:
            raise
    return code
