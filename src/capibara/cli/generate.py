"""``capibara generate``: text from a checkpoint, streamed as it is written."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from capibara.cli._json import print_json

HELP = """Write text with a trained model: the newest complete checkpoint of the run that --config or
--checkpoint names, or the compressed parameters that --weights names. Defaults come from the
[generate] settings of the configuration. Once a text exceeds the model's max_sequence_length, the model
reads the last half window again and continues from there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", help="use the run of this TOML file or packaged name (default: demo)")
    where.add_argument("--checkpoint", metavar="DIR", help="folder of a run, or of one checkpoint")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="a .capi file with the model's parameters; settings are those of --config, --checkpoint, or the "
        "config.toml in the same folder",
    )
    parser.add_argument(
        "--quantized",
        action="store_true",
        help="with --weights: multiply by 8-bit and 4-bit parameters without decoding them, so that they take as "
        "much memory as the file",
    )
    parser.add_argument("--prompt", default="", help="start of the text")
    parser.add_argument(
        "--length",
        "--max-tokens",
        dest="max_tokens",
        type=int,
        metavar="N",
        help="tokens (bytes) to generate",
    )
    parser.add_argument(
        "--temperature", type=float, help="0: always the likeliest token; 1: the model's probabilities"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens with total probability P; 1: all",
    )
    parser.add_argument("--seed", type=int, help="random seed; the same seed gives the same text")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming"
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _settings(args: argparse.Namespace) -> tuple[Any, Any]:
    """The settings of the model, and the checkpoint, or ``None`` where only ``--weights`` says what to read."""
    from capibara.config import ModularModelConfig
    from capibara.serve.load import find_checkpoint
    from capibara.serve.weights import settings_beside

    if args.checkpoint is not None:
        checkpoint = find_checkpoint(args.checkpoint, warn=_warn)
        return ModularModelConfig.from_toml(checkpoint.config_path), checkpoint
    if args.weights is not None:
        where = settings_beside(args.weights) if args.config is None else args.config
        return ModularModelConfig.from_toml(where), None
    config = ModularModelConfig.from_toml("demo" if args.config is None else args.config)
    return config, find_checkpoint(config.checkpoint.directory, warn=_warn)


def run(args: argparse.Namespace) -> int:
    """Generate; return 0."""
    from jax.tree_util import tree_leaves

    from capibara.cli._archives import reason
    from capibara.compress.jax_codes import is_coded
    from capibara.errors import ConfigError
    from capibara.serve.generate import BYTE_VALUES, Generator, decode_bytes, encode_text
    from capibara.serve.load import load_model
    from capibara.serve.sampling import Sampling
    from capibara.serve.weights import load_compressed

    if args.quantized and args.weights is None:
        raise ConfigError("--quantized: a checkpoint has no codes. Remedy: --weights FILE.capi.")
    config, checkpoint = _settings(args)

    def chosen(name: str) -> Any:
        given = getattr(args, name)
        return getattr(config.generate, name) if given is None else given

    # Checked before the model is loaded: a typo should not cost seconds.
    sampling = Sampling(chosen("temperature"), chosen("top_k"), chosen("top_p"))
    if args.weights is None:
        loaded = load_model(checkpoint)
    else:
        try:
            decode = "auto" if args.quantized else True
            loaded = load_compressed(args.weights, config, checkpoint=checkpoint, decode=decode)
        except OSError as error:
            raise ConfigError(f"--weights: {reason(error)}. Remedy: a .capi file that can be read.") from None
        if args.quantized and not any(map(is_coded, tree_leaves(loaded.params, is_leaf=is_coded))):
            raise ConfigError(
                f"--quantized: no parameter of {args.weights} is stored with int8, int4 or nf4. Remedy: leave it out, "
                "or compress the model with one of these strategies."
            )
    if loaded.model.pretrained is not None:
        raise ConfigError(
            f"--checkpoint: {args.checkpoint} was imported, and its tokenizer, which makes tokens of texts, is not "
            "part of it. Remedy: capibara.serve.Generator, which takes numbers of tokens."
        )
    generator = Generator(
        loaded.model, loaded.params, state=loaded.state, sampling=sampling, vocabulary=BYTE_VALUES
    )
    numbers = generator.tokens(encode_text(args.prompt), max_tokens=chosen("max_tokens"), seed=chosen("seed"))
    if not args.json:
        # A lone surrogate stands for a byte of the command line that was not UTF-8.
        sys.stdout.write(args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        sys.stdout.flush()
        for piece in decode_bytes(numbers):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return 0
    begun = time.perf_counter()
    generated = list(numbers)
    seconds = time.perf_counter() - begun
    result = {
        "prompt": args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "text": "".join(decode_bytes(generated)),
        "tokens": len(generated),
        "seconds": seconds,
        "checkpoint": None if checkpoint is None else str(checkpoint.path),
        "step": None if checkpoint is None else checkpoint.step,
        "weights": args.weights,
        "quantized": args.quantized,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": chosen("seed"),
    }
    print_json(result)
    return 0
