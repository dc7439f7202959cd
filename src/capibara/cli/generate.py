"""``capibara generate``: text from a checkpoint, streamed as it is written."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

HELP = """Write text with a trained model: the newest whole checkpoint of the run that --config or
--checkpoint names. What is not given is taken from the [generate] settings of the configuration. A text
longer than the model's max_sequence_length is continued by reading its last half window again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", help="a TOML file or packaged name whose run to use (default: demo)")
    where.add_argument("--checkpoint", metavar="DIR", help="folder of a run, or of one checkpoint")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument(
        "--length", "--max-tokens", dest="max_tokens", type=int, metavar="N", help="tokens (bytes) to write"
    )
    parser.add_argument(
        "--temperature", type=float, help="0: always the likeliest token; 1: as the model has it"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="choose among the likeliest tokens that have probability P; 1: all",
    )
    parser.add_argument("--seed", type=int, help="the same seed writes the same text")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming"
    )


def run(args: argparse.Namespace) -> int:
    """Generate; return 0."""
    from capibara.config import ModularModelConfig
    from capibara.serve.generate import BYTE_VALUES, Generator, decode_bytes, encode_text
    from capibara.serve.load import find_checkpoint, load_model
    from capibara.serve.sampling import Sampling

    config: Any = None
    folder = args.checkpoint
    if folder is None:
        config = ModularModelConfig.from_toml("demo" if args.config is None else args.config)
        folder = config.checkpoint.directory
    checkpoint = find_checkpoint(folder, warn=lambda text: print(f"warning: {text}", file=sys.stderr))
    if config is None:
        config = ModularModelConfig.from_toml(checkpoint.config_path)

    def chosen(name: str) -> Any:
        given = getattr(args, name)
        return getattr(config.generate, name) if given is None else given

    # Checked before the model is loaded: a typo should not cost seconds.
    sampling = Sampling(chosen("temperature"), chosen("top_k"), chosen("top_p"))
    loaded = load_model(checkpoint)
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
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": chosen("seed"),
    }
    print(json.dumps(result, indent=1))
    return 0
