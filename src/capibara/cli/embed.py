"""``capibara embed MODEL TEXT``: vectors of texts."""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from capibara.serve import Embedder

HELP = """Make a vector of each text with a model: the published one in the folder MODEL (Hugging Face; the files of
sentence-transformers in it say how), or a run. TEXT is a text; or the name of a .jsonl, .jsonl.gz or .parquet file,
whose records have "text"; or of a .txt file, whose lines are texts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder of a published model or of a run, or a .gguf file"
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text, or a file of texts")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the vectors as a NumPy file, float32 [texts, dimension]"
    )
    parser.add_argument(
        "--pooling",
        choices=["mean", "cls", "last", "max"],
        help="of a text's hidden states; default: what the folder says, or the mean (of a decoder the last)",
    )
    parser.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="vectors of length 1; default: what the folder says, or not",
    )
    parser.add_argument("--prompt", metavar="NAME", help="the folder's prompt that is put before each text")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of a text at most")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens that are computed together (default: 4096)",
    )
    parser.add_argument("--dtype", help="of parameters and arithmetic; default: the file's")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, without --output with the vectors"
    )


def run(args: argparse.Namespace) -> int:
    """Embed; return 0."""
    import numpy as np

    from capibara.cli._archives import progress_bar, reason
    from capibara.errors import ConfigError
    from capibara.files import replace_file

    if args.output is None and not args.json:
        raise ConfigError("--output is missing: name a file for the vectors, or print them with --json")
    texts = list(_texts(args.texts))
    if not texts:
        raise ConfigError(f"TEXT: {', '.join(args.texts)!s:.200} has no texts")
    embedder = _embedder(args)
    begun = time.perf_counter()
    with progress_bar("embedding", len(texts), quiet=args.json) as progress:
        vectors = embedder.embed(
            texts, batch_tokens=args.batch_tokens, progress=lambda count: progress("", count)
        )
    seconds = time.perf_counter() - begun
    if args.output is not None:
        content = io.BytesIO()
        np.save(content, vectors)
        try:
            replace_file(Path(args.output), content.getvalue())
        except OSError as error:
            raise ConfigError(f"--output: {reason(error)}. Remedy: a file that can be written") from None
    if args.json:
        found = {
            "texts": len(texts),
            "dimension": embedder.dimension,
            "pooling": embedder.pooling,
            "normalised": embedder.normalise,
            "max_length": embedder.max_length,
            "prompt": embedder.prompt,
            "seconds": seconds,
            "output": args.output,
        }
        print_json(found | ({} if args.output is not None else {"vectors": vectors.tolist()}))
    else:
        print(f"{len(texts):,} vectors of {embedder.dimension} in {args.output} ({seconds:.1f} s)")
    return 0


def _texts(given: Sequence[str]) -> Iterator[str]:
    from capibara.data import RECORD_SUFFIXES, read_records
    from capibara.data.records import text_of
    from capibara.errors import ConfigError

    for one in given:
        if not one.endswith((*RECORD_SUFFIXES, ".txt")):
            yield one
            continue
        try:
            if one.endswith(".txt"):
                with open(one, encoding="utf-8") as stream:
                    yield from (line.rstrip("\r\n") for line in stream if line.strip())
            else:
                yield from (text_of(record, "text", where) for where, record in read_records(one))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"TEXT: {one}: {getattr(error, 'strerror', None) or error}. Expected a file of texts"
            ) from None


def _embedder(args: argparse.Namespace) -> Embedder:
    from capibara.cli._models import is_published, warn_on_stderr
    from capibara.errors import ConfigError
    from capibara.serve import Embedder, find_checkpoint, load_model

    if is_published(args.model):
        return Embedder.from_pretrained(
            args.model,
            dtype=args.dtype,
            pooling=args.pooling,
            normalise=args.normalise,
            max_length=args.max_length,
            prompt=args.prompt,
        )
    if args.dtype is not None:
        raise ConfigError(f"--dtype is for folders of published models, and {args.model!r:.200} is not one")
    loaded = load_model(find_checkpoint(args.model, warn=warn_on_stderr))
    return Embedder.of(
        loaded.model,
        loaded.params,
        pooling=args.pooling,
        normalise=args.normalise,
        max_length=args.max_length,
        prompt=args.prompt,
    )
