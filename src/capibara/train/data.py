"""Text in, one array of tokens out.

By default tokens are bytes: the vocabulary is the 256 byte values, so any UTF-8 text is data and no tokenizer has to
be trained, shipped or matched with a checkpoint. A corpus is one array: the documents one after the other, a blank line
between them; its last part is held out for validation. With a tokenizer each document ends with its end token instead.

By default, the corpus is CPython's own documentation of the language, which every CPython includes as the module
``pydoc_data.topics`` (what ``help("with")`` prints). Two steps make its held-out part meaningful: the topics are
ordered by a hash of their names, so that the held-out part is not the end of the alphabet; and a paragraph shared by
several topics is kept only once, because otherwise a fifth of the held-out text would also be in the training text.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from capibara.data import JSONL_SUFFIXES, ByteTokenizer, DocumentError, Tokenizer, read_jsonl
from capibara.train.batches import BatchSampler, validation_batches
from capibara.train.errors import DataError, TextNotFoundError

__all__ = [
    "MAX_CORPUS_BYTES",
    "TEXT_SUFFIXES",
    "Corpus",
    "load_corpus",
    "python_documentation",
    "read_text",
    "split_corpus",
    "text_files",
    "text_pieces",
]

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
"""What a folder is searched for; a file named on its own may have any suffix."""

MAX_CORPUS_BYTES = 2 * 1024**3
"""The largest text that is read: it is held in memory, one byte per byte."""

_CHUNK = 1 << 20
_PIECE = 1 << 20  # bytes that are made tokens of at once; a tokenizer takes a multiple of its text in memory
_SEPARATOR = b"\n\n"
_SHARED_PARAGRAPH = 40


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split for training and validation.

    Attributes:
      name: a readable name of the source.
      train: token ids ``[n]``, uint8 for bytes.
      validation: token ids ``[m]``; empty when the fraction was 0.
      documents: number of files, of lines in JSON Lines, or of topics.
      fingerprint: SHA-256 over the split, every byte and the tokenizer, in hexadecimal. A resumed run compares it.
      tokenizer: what made tokens of the text.
      bytes_per_token: of the held-out text, or of all if there is none.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    documents: int
    fingerprint: str
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    bytes_per_token: float = 1.0

    @property
    def unit(self) -> str:
        """What a token is: ``"byte"`` or ``"token"``."""
        return "token" if self.tokenizer.files else "byte"

    @property
    def highest(self) -> int:
        """The largest token id."""
        return int(max(part.max() for part in (self.train, self.validation) if part.size))

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> BatchSampler:
        """What a run trains on."""
        return BatchSampler(self.train, batch_size, sequence_length, seed)

    def validation_batches(
        self, *, batch_size: int, sequence_length: int, max_batches: int
    ) -> list[np.ndarray]:
        """The held-out text in fixed batches, the same ones at every evaluation; none if there is no such text."""
        if not self.validation.size:
            return []
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
        return validation_batches(self.validation, **sizes, max_batches=max_batches)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.train.size + self.validation.size:,} {self.unit}s in {self.documents:,} "
            f"document{'' if self.documents == 1 else 's'}; {self.train.size:,} to train on, "
            f"{self.validation.size:,} held out"
        )


def load_corpus(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    validation_fraction: float = 0.05,
    max_bytes: int = MAX_CORPUS_BYTES,
    stdin: BinaryIO | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Read text from files, folders and standard input, or CPython's documentation if none is given.

    Args:
      paths: files of any suffix, those of JSON Lines (:data:`capibara.data.JSONL_SUFFIXES`) by document; folders,
        searched recursively for :data:`TEXT_SUFFIXES` in sorted order (hidden folders and ``__pycache__`` left out,
        links to folders not followed); ``"-"`` for standard input.
      validation_fraction: the fraction of bytes at the end to hold out; 0 ≤ fraction < 1.
      max_bytes: refuse more text than this.
      stdin: the stream that ``"-"`` reads; ``sys.stdin.buffer`` by default.
      tokenizer: makes tokens of the text; by default bytes.
      progress: called with the number of bytes of each part that was made tokens of.

    Raises:
      TextNotFoundError: a path does not exist, or a folder contains no text file.
      DataError: a file is binary (a NUL byte) or not UTF-8, everything is empty, or there is too much of it.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    text = bytearray()
    starts: set[int] = set()  # of documents
    documents = 0
    if not paths:
        for document in python_documentation():
            starts.add(len(text) + len(_SEPARATOR) * bool(text))
            _append(text, [document.encode()], "pydoc_data.topics", max_bytes)
            documents += 1
        name = f"CPython {platform.python_version()} documentation (pydoc_data.topics)"
    else:
        for path in text_files(paths):
            if str(path).endswith(JSONL_SUFFIXES):
                for document in _documents(path):
                    starts.add(len(text) + len(_SEPARATOR) * bool(text))
                    documents += _append(text, [document.encode()], str(path), max_bytes)
                continue
            starts.add(len(text) + len(_SEPARATOR) * bool(text))
            if path == "-":
                stream = sys.stdin.buffer if stdin is None else stdin
                documents += _append(text, _checked(stream, "standard input"), "standard input", max_bytes)
            else:
                documents += _append_file(text, path, max_bytes)
        shown = ", ".join(str(path) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
        name = shown.replace("-", "standard input") if shown == "-" else shown
    corpus = split_corpus(text, name=name, documents=documents, validation_fraction=validation_fraction)
    if tokenizer is None or not tokenizer.files:
        return corpus
    return _of_tokens(corpus, memoryview(text), starts, tokenizer, progress or (lambda count: None))


def split_corpus(
    text: bytes | bytearray, *, name: str, documents: int = 1, validation_fraction: float = 0.05
) -> Corpus:
    """Hold out the last ``validation_fraction`` of ``text`` (contiguous, so no sequence straddles the parts).

    Raises:
      DataError: the text is empty or only white space, or the fraction is outside ``[0, 1)``.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(
            f"validation_fraction={validation_fraction!r} must be at least 0 and below 1, e.g. 0.05 to hold "
            "out 5 %."
        )
    if not text or text.isspace():
        raise DataError(
            f"the text ({name}) is {'empty' if not text else 'only white space'}: there is nothing to train "
            "on. Give files or folders of text, or none at all to train on CPython's documentation."
        )
    tokens = np.frombuffer(text, np.uint8)
    tokens.flags.writeable = False
    held_out = int(tokens.size * validation_fraction)
    cut = tokens.size - held_out
    digest = hashlib.sha256(f"{cut}/{tokens.size}:".encode())
    digest.update(text)
    return Corpus(name, tokens[:cut], tokens[cut:], documents, digest.hexdigest())


def _of_tokens(
    corpus: Corpus,
    text: memoryview,
    starts: Set[int],
    tokenizer: Tokenizer,
    progress: Callable[[int], None],
) -> Corpus:
    """The same corpus in tokens."""
    cut = len(corpus.train)
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # not within a character
        cut += 1
    digest = hashlib.sha256(corpus.fingerprint.encode())
    for name, content in sorted(tokenizer.files.items()):
        digest.update(f"{name}:{hashlib.sha256(content).hexdigest()}".encode())
    parts = [
        _encode(text, first, last, starts, tokenizer, progress)
        for first, last in ((0, cut), (cut, len(text)))
    ]
    train, validation = parts
    count = len(text) - cut if validation.size else cut
    return dataclasses.replace(
        corpus,
        train=train,
        validation=validation,
        fingerprint=digest.hexdigest(),
        tokenizer=tokenizer,
        bytes_per_token=count / max(1, (validation if validation.size else train).size),
    )


def _encode(
    text: memoryview,
    first: int,
    last: int,
    starts: Set[int],
    tokenizer: Tokenizer,
    progress: Callable[[int], None],
) -> np.ndarray:
    """The tokens of ``text[first:last]``: of each document, and its end token."""
    small = tokenizer.vocab_size <= 1 << 16
    found = [np.zeros(0, np.uint16 if small else np.uint32)]
    bounds = [first, *sorted(start for start in starts if first < start < last), last]
    for begin, end in itertools.pairwise(bounds if first < last else []):
        whole = end == len(text) or end != last  # the document is not cut here
        stop = end if end == len(text) or not whole else end - len(_SEPARATOR)
        special = begin in starts
        for piece in text_pieces(text[begin:stop]):
            found.append(tokenizer.encode(piece.decode(), special=special).astype(found[0].dtype))
            special = False
            progress(len(piece))
        if whole and tokenizer.end_token is not None:
            found.append(np.asarray([tokenizer.end_token], found[0].dtype))
    joined = np.concatenate(found)
    joined.flags.writeable = False
    return joined


def text_pieces(text: memoryview) -> Iterator[bytes]:
    """Cut a text into pieces of about a mebibyte, each of whole lines if possible, of whole characters always."""
    at = 0
    while at < len(text):
        piece = bytes(text[at : at + _PIECE])
        if at + len(piece) < len(text):
            piece = piece[: _line_end(piece)]
        yield piece
        at += len(piece)


def _line_end(piece: bytes) -> int:
    """Where a piece of text can be cut: after its last line, or else before its last character."""
    if (end := piece.rfind(b"\n") + 1) > 0:
        return end
    end = len(piece) - 1
    while piece[end] & 0xC0 == 0x80:
        end -= 1
    return end


def python_documentation() -> Iterator[str]:
    """Yield the topics of ``pydoc_data.topics`` in the order of their names' SHA-256.

    A paragraph of 40 characters or more that an earlier topic already contained is omitted.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        kept = []
        for paragraph in topics[name].strip("\n").split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) >= _SHARED_PARAGRAPH:
                if key in seen:
                    continue
                seen.add(key)
            kept.append(paragraph)
        if kept:
            yield "\n\n".join(kept)


def read_text(path: Path | str, stdin: BinaryIO | None = None, *, max_bytes: int = MAX_CORPUS_BYTES) -> bytes:
    """The bytes of one text, UTF-8; ``"-"`` is standard input.

    Raises:
      DataError: as :func:`load_corpus`.
    """
    text = bytearray()
    if path == "-":
        stream, name = sys.stdin.buffer if stdin is None else stdin, "standard input"
        _append(text, _checked(stream, name), name, max_bytes)
    else:
        _append_file(text, path, max_bytes)
    return bytes(text)


def text_files(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Path | str]:
    """The files that paths name; a folder is searched as :func:`load_corpus` says.

    Raises:
      TextNotFoundError: a path does not exist, or a folder contains no text file.
      DataError: it is neither a file nor a folder.
    """
    for given in paths:
        if given == "-":
            yield "-"
            continue
        path = Path(given)
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TextNotFoundError(
                f"no text at {str(given)!r} ({reason}). Name a file or folder that exists, '-' for standard "
                "input, or nothing to train on CPython's documentation."
            ) from None
        if stat.S_ISDIR(mode):
            yield from _folder_files(path)
        elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            yield path
        else:
            raise DataError(f"{str(given)!r} is neither a file nor a folder. Use '-' for standard input.")


def _folder_files(folder: Path) -> list[Path]:
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [
            Path(root, name) for name in files if name.endswith(TEXT_SUFFIXES) and not name.startswith(".")
        ]
    found = sorted(path for path in found if path.is_file())
    if not found:
        raise TextNotFoundError(
            f"the folder {str(folder)!r} holds no text: looked in it and below it for files named "
            f"{', '.join('*' + suffix for suffix in TEXT_SUFFIXES)}. Name files of other suffixes one by one."
        )
    return found


def _documents(path: Path | str) -> Iterator[str]:
    try:
        yield from read_jsonl(path)
    except DocumentError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"could not read {str(path)!r}: {error.strerror}. Check its permissions.") from error


def _append_file(text: bytearray, path: Path | str, max_bytes: int) -> bool:
    try:
        with open(path, "rb") as stream:
            return _append(text, _checked(stream, str(path)), str(path), max_bytes)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"could not read {str(path)!r}: {error.strerror}. Check its permissions.") from error


def _append(text: bytearray, chunks: Iterable[bytes], source: str, max_bytes: int) -> bool:
    """Append one document after a blank line; return whether it had any bytes."""
    begun = False
    for chunk in chunks:
        if not chunk:
            continue
        if text and not begun:
            text += _SEPARATOR
        begun = True
        text += chunk
        if len(text) > max_bytes:
            raise DataError(
                f"the text is larger than {max_bytes:,} bytes (reached while reading {source!r}); it is held "
                "in memory. Give less text."
            )
    return begun


def _checked(stream: BinaryIO, source: str) -> Iterator[bytes]:
    """Yield the stream in bounded chunks; refuse NUL bytes and what is not UTF-8, saying where."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    position = 0
    while chunk := stream.read(_CHUNK):
        if (nul := chunk.find(0)) >= 0:
            raise DataError(
                f"{source!r} looks like a binary file: byte {position + nul:,} is NUL. Training reads UTF-8 "
                "text; convert the file (a UTF-16 text: iconv -f UTF-16 -t UTF-8) or leave it out."
            )
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            _refuse_encoding(source, position - pending + error.start, error)
        position += len(chunk)
        yield chunk
    pending = len(decoder.getstate()[0])
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        _refuse_encoding(source, position - pending + error.start, error)


def _refuse_encoding(source: str, position: int, error: UnicodeDecodeError) -> None:
    raise DataError(
        f"{source!r} is not UTF-8 text: byte {position:,} (0x{error.object[error.start]:02x}) can not be "
        "decoded. Convert it, e.g. iconv -f LATIN1 -t UTF-8, or leave it out."
    ) from None
