"""``capibara tokenizer train TEXT``: a tokenizer learned from text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from capibara.cli._json import print_json

HELP = """Learn a byte-level BPE tokenizer from text and write it as a folder, for data.tokenizer=FOLDER. Every text can
be encoded with it. Without TEXT it learns from CPython's own documentation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("action", choices=["train"], help="train: learn one")
    parser.add_argument(
        "texts",
        nargs="*",
        default=[],
        metavar="TEXT",
        help="text files, folders, '-' for standard input; as for capibara train",
    )
    parser.add_argument("--output", metavar="FOLDER", required=True, help="the folder to write")
    parser.add_argument(
        "--vocab-size", type=int, default=8192, metavar="N", help="tokens (default: 8192), at least 257"
    )
    parser.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that is one token; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Learn; return 0."""
    from capibara.cli._archives import progress_bar, reason
    from capibara.data import train_tokenizer
    from capibara.errors import ConfigError
    from capibara.files import replace_file
    from capibara.train.data import load_corpus, text_pieces

    folder = Path(args.output)
    if (folder / "tokenizer.json").exists():
        raise ConfigError(f"--output: {args.output!r} has a tokenizer.json already. Remedy: another folder")
    text = load_corpus(args.texts, validation_fraction=0).train
    with progress_bar("learning", text.size, quiet=args.json) as progress:

        def pieces() -> Iterator[str]:
            for piece in text_pieces(text.data):
                yield piece.decode()
                progress("", len(piece))

        tokenizer = train_tokenizer(pieces(), vocab_size=args.vocab_size, special_tokens=args.special)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in tokenizer.files.items():
            replace_file(folder / name, content)
    except OSError as error:
        raise ConfigError(f"--output: {reason(error)}. Remedy: a folder that can be written") from None
    tokens = sum(tokenizer.encode(piece.decode(), special=False).size for piece in text_pieces(text.data))
    ratio = text.size / tokens
    if args.json:
        print_json({"folder": args.output, "tokens": tokenizer.vocab_size, "bytes_per_token": ratio})
    else:
        print(f"{tokenizer.vocab_size:,} tokens in {args.output}; {ratio:.2f} bytes a token in this text")
    return 0
