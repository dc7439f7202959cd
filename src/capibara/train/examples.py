"""Records to train on: conversations, prompts with completions, and texts, packed into rows.

The counterpart of :mod:`capibara.train.data`, which reads all text as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from capibara.config.sections import DataSection
from capibara.data import (
    RECORD_SUFFIXES,
    ByteTokenizer,
    Documents,
    PackedBatches,
    Tokenizer,
    examples_of,
    is_packed,
    pack,
    packed_rows,
    pairs_of,
    read_records,
)
from capibara.train.data import MAX_CORPUS_BYTES, Corpus, load_corpus, read_text, text_files
from capibara.train.errors import DataError
from capibara.train.preferences import PairCorpus

__all__ = ["PackedCorpus", "load_data"]


@dataclass(frozen=True, eq=False)
class PackedCorpus:
    """Documents in tokens, some of them held out for validation.

    Attributes:
      name: a readable name of the sources.
      sources: the documents of each.
      train, held_out: for each source the numbers of its documents that are trained on, and of those held out.
      weights: how often each source is drawn from; None: each document once, then again.
      split: whether longer documents go on in another row.
      tokenizer: what made tokens of the text.
      fingerprint: SHA-256 over all of it and the tokenizer, in hexadecimal. A resumed run compares it.
    """

    name: str
    sources: list[Documents]
    train: list[np.ndarray]
    held_out: list[np.ndarray]
    weights: tuple[float, ...] | None
    split: bool
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def documents(self) -> int:
        """Their number."""
        return sum(map(len, self.sources))

    @property
    def unit(self) -> str:
        """What a token is: ``"byte"`` or ``"token"``."""
        return "token" if self.tokenizer.files else "byte"

    @property
    def bytes_per_token(self) -> float:
        """Of all text."""
        return sum(one.size for one in self.sources) / sum(one.tokens.size for one in self.sources)

    @property
    def highest(self) -> int:
        """The largest token id."""
        return max(int(one.tokens.max()) for one in self.sources)

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> PackedBatches:
        """What a run trains on."""
        return PackedBatches(
            self.sources,
            batch_size=batch_size,
            sequence_length=sequence_length,
            weights=self.weights,
            seed=seed % 2**32,
            split=self.split,
            chosen=self.train,
        )

    def validation_batches(
        self, *, batch_size: int, sequence_length: int, max_batches: int
    ) -> list[dict[str, np.ndarray]]:
        """The held-out documents packed into fixed batches, the same ones at every evaluation."""
        found = [
            (source, int(number))
            for source, numbers in zip(self.sources, self.held_out, strict=True)
            for number in numbers
        ]
        lengths = [int(source.lengths[number]) for source, number in found]
        rows = [
            [(found[p.document][0], p._replace(document=found[p.document][1])) for p in row]
            for row in pack(lengths, sequence_length + 1, split=self.split)
        ]
        size = min(batch_size, len(rows))
        count = max(1, min(max_batches, len(rows) // size)) if rows else 0
        chosen = [rows[at * len(rows) // (size * count)] for at in range(size * count)]
        cuts = pairwise(range(0, size * count + 1, size)) if rows else ()
        return [packed_rows(chosen[first:last], sequence_length) for first, last in cuts]

    def __str__(self) -> str:
        tokens = sum(one.tokens.size for one in self.sources)
        answers = sum(
            one.tokens.size if one.answers is None else int(one.answers.sum()) for one in self.sources
        )
        learnt = "" if answers == tokens else f", {answers:,} of them trained on"
        held = sum(map(len, self.held_out))
        return (
            f"{self.name}: {tokens:,} {self.unit}s in {self.documents:,} documents{learnt}; "
            f"{self.documents - held:,} documents to train on, {held:,} held out"
        )


def load_data(
    settings: DataSection,
    *,
    objective: str = "next_token",
    tokenizer: Tokenizer | None = None,
    stdin: BinaryIO | None = None,
    max_bytes: int = MAX_CORPUS_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Corpus | PackedCorpus | PairCorpus:
    """Read what the ``[data]`` settings name, as one text or as documents to be packed.

    Args:
      settings: the section. objective: ``finetune.objective``. tokenizer: makes tokens of the text; by default bytes.
      stdin: what the path ``"-"`` reads. max_bytes: refuse more text than this.
      progress: called with the number of bytes of each part that was made tokens of.

    Raises:
      TextNotFoundError, DataError: a path does not exist, or a file of text is damaged.
      DocumentError: a file of records is damaged, or has records that are not known.
      ChatTemplateError: conversations cannot be rendered.
    """
    if objective == "dpo":
        return _load_pairs(settings, ByteTokenizer() if tokenizer is None else tokenizer, stdin)
    if not is_packed(settings):
        return load_corpus(
            settings.paths,
            validation_fraction=settings.validation_fraction,
            max_bytes=max_bytes,
            stdin=stdin,
            tokenizer=tokenizer,
            progress=progress,
        )
    if settings.weights and len(settings.weights) != len(settings.paths):
        raise DataError(
            f"data.weights has {len(settings.weights)} numbers, expected one for each of the {len(settings.paths)} "
            "paths."
        )
    made = ByteTokenizer() if tokenizer is None else tokenizer
    sources, left = [], max_bytes
    for path in settings.paths:
        examples = examples_of(_records(path, stdin), made)
        if settings.learn == "all":
            examples = (replace(one, answers=None) for one in examples)
        try:
            sources.append(Documents.of(str(path), examples, most_bytes=left, progress=progress))
        except OSError as error:
            raise DataError(
                f"could not read {str(path)!r}: {error.strerror}. Check its permissions."
            ) from error
        left -= sources[-1].size
    if not sources:
        raise DataError("data.packing=documents needs data.paths: files or folders of documents.")
    held_out = [_held_out(len(one), settings.validation_fraction) for one in sources]
    digest = hashlib.sha256(
        f"{settings.validation_fraction}:{settings.weights}:{settings.long_documents}".encode()
    )
    for one in sources:
        digest.update(one.digest.encode())
    for name, content in sorted(made.files.items()):
        digest.update(f"{name}:{hashlib.sha256(content).hexdigest()}".encode())
    return PackedCorpus(
        ", ".join(map(str, settings.paths[:3])) + (", …" if len(settings.paths) > 3 else ""),
        sources,
        [np.setdiff1d(np.arange(len(one)), held) for one, held in zip(sources, held_out, strict=True)],
        held_out,
        settings.weights or None,
        settings.long_documents == "split",
        made,
        digest.hexdigest(),
    )


def _load_pairs(settings: DataSection, tokenizer: Tokenizer, stdin: BinaryIO | None) -> PairCorpus:
    if settings.weights or settings.packing != "auto":
        raise DataError(
            "data.weights and data.packing do not go with finetune.objective=dpo: a row is a pair. Leave them out."
        )
    pairs = []
    for path in settings.paths:
        try:
            pairs += pairs_of(_records(path, stdin), tokenizer)
        except OSError as error:
            raise DataError(
                f"could not read {str(path)!r}: {error.strerror}. Check its permissions."
            ) from error
    if not pairs:
        raise DataError(
            "finetune.objective=dpo needs data.paths with records of 'prompt', 'chosen' and 'rejected'."
        )
    digest = hashlib.sha256(f"pairs {settings.validation_fraction}".encode())
    for pair in pairs:
        for one in pair:
            for array in (one.tokens, one.answers):
                digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    held_out = min(int(len(pairs) * settings.validation_fraction), len(pairs) - 1)
    name = ", ".join(map(str, settings.paths[:3])) + (", …" if len(settings.paths) > 3 else "")
    return PairCorpus(name, pairs, held_out, tokenizer, digest.hexdigest())


def _records(path: str, stdin: BinaryIO | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in text_files([path]):
        if str(file).endswith(RECORD_SUFFIXES):
            yield from read_records(file)
        else:
            yield str(file), {"text": read_text(file, stdin).decode()}


def _held_out(count: int, fraction: float) -> np.ndarray:
    """Evenly spaced documents, about ``fraction`` of them; at least one is left to train on."""
    places = np.arange(count + 1) * fraction
    return np.flatnonzero(np.floor(places[1:]) > np.floor(places[:-1]))[: count - 1]
