"""Documents in JSON Lines: one object a line, its text under ``"text"``; also compressed with gzip."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from capibara.data.errors import DocumentError

__all__ = ["JSONL_SUFFIXES", "read_jsonl"]

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
"""What a file of such documents is named."""

_MOST_LINE = 64 << 20
_CONVERSATION = ("messages", "conversations", "prompt", "completion")


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the documents of a file; lines of white space are passed over.

    Raises:
      DocumentError: a line is not an object with a text, or too long; the message says which. Or the file is damaged.
      OSError: it cannot be read.
    """
    path = Path(path)
    with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as stream:
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(_MOST_LINE + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DocumentError(f"{path}: damaged gzip after line {number - 1}: {error}") from None
            if not line:
                return
            if len(line) > _MOST_LINE:
                raise DocumentError(f"{path}: line {number} has more than {_MOST_LINE:,} bytes")
            if line.strip():
                yield _text(line, f"{path}: line {number}")


def _text(line: bytes, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where} is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise DocumentError(f"{where} holds {type(value).__name__}, expected an object with a text")
    text = value.get("text")
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DocumentError(
                f"{where}: text has half of a surrogate pair, which is not a character"
            ) from None
        return text
    if found := [key for key in _CONVERSATION if key in value]:
        raise DocumentError(
            f"{where} has {found[0]!r}: conversations are not read yet. Write each as one text, with the chat "
            'template: {"text": …}'
        )
    raise DocumentError(f"{where}: expected a string under 'text', got the keys {sorted(value)!s:.200}")
