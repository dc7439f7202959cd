"""Records: what a line of JSON Lines, a row of Parquet or a file of text says.

A record is an object with ``text``; with ``messages``, a conversation; with ``prompt`` and ``completion``; or, for
preferences, with ``prompt``, ``chosen`` and ``rejected``. A file of text is one record.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capibara.data.errors import DocumentError
from capibara.errors import MissingExtraError, printable

__all__ = ["JSONL_SUFFIXES", "PARQUET_SUFFIX", "RECORD_SUFFIXES", "read_jsonl", "read_records"]

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
"""What a file of JSON Lines is named."""
PARQUET_SUFFIX = ".parquet"
RECORD_SUFFIXES = (*JSONL_SUFFIXES, PARQUET_SUFFIX)
"""What a file of records is named."""

_AGAIN = "Remedy: get the file again"
_MOST_LINE = 64 << 20
_ROWS = 256  # of Parquet that are in memory at once
_COLUMNS = ("text", "messages", "conversations", "prompt", "completion", "chosen", "rejected")


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a file, each with its place for messages; lines of white space are passed over.

    Args:
      path: named as one of :data:`RECORD_SUFFIXES`.

    Raises:
      DocumentError: a line is not an object, or too long; the message says which. Or the file is damaged.
      MissingExtraError: the package ``pyarrow``, which reads Parquet, is not installed.
      OSError: it cannot be read.
    """
    path = Path(path)
    yield from _parquet(path) if path.name.endswith(PARQUET_SUFFIX) else _jsonl(path)


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the texts of a file whose records all have ``text``.

    Raises:
      DocumentError, OSError: as :func:`read_records`; or a record has no text.
    """
    for where, record in _jsonl(Path(path)):
        yield text_of(record, "text", where)


def text_of(record: Mapping[str, Any], key: str, where: str) -> str:
    """A string of a record.

    Raises:
      DocumentError: there is none under ``key``, or it has half of a surrogate pair.
    """
    value = record.get(key)
    if not isinstance(value, str):
        raise DocumentError(
            f"{where}: expected a string under {key!r}, got "
            + (f"{type(value).__name__}" if key in record else f"the keys {sorted(record)!s:.200}")
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DocumentError(
            f"{where}: {key} has half of a surrogate pair, which is not a character. Remedy: replace it"
        ) from None
    return value


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as stream:
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(_MOST_LINE + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DocumentError(
                    f"{path}: damaged gzip after line {number - 1}: {error}. {_AGAIN}"
                ) from None
            if not line:
                return
            if len(line) > _MOST_LINE:
                raise DocumentError(
                    f"{path}: line {number} has more than {_MOST_LINE:,} bytes, expected one record a line"
                )
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DocumentError(
                    f"{where} is not JSON: {error!s:.200}. Expected one object a line"
                ) from None
            if not isinstance(value, dict):
                raise DocumentError(f"{where} holds {type(value).__name__}, expected an object")
            yield where, value


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise MissingExtraError("pyarrow", "data", "reading Parquet") from None
    path.stat()  # an OSError of the system's, where the package would give its own
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            known = [name for name in file.schema_arrow.names if name in _COLUMNS]
            if not known:
                raise DocumentError(
                    f"{path}: has the columns {file.schema_arrow.names!s:.200}, expected text, messages, or prompt and "
                    "completion"
                )
            for batch in file.iter_batches(batch_size=_ROWS, columns=known):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", {k: v for k, v in row.items() if v is not None}
    except (ArrowException, OSError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"{path}: damaged after row {number}: {printable(error)}. {_AGAIN}") from None
