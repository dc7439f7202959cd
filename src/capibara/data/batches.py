"""Batches of packed documents in one order, whoever reads them.

Documents of all sources are shuffled and mixed by `grain <https://google-grain.readthedocs.io>`_, whose datasets give
the document at any place of an endless order that depends on the seed alone. They are taken a block at a time, and each
block is packed into rows by itself. So all that a batch depends on is its rows' numbers: the same rows come out for any
number of readers, each of which makes its own part of every batch. Grain's own packing reads one after another, in each
reader for itself, so that its rows depend on how many readers there are.

How many rows a block has is known once it is packed. A position in the order, to go on from, is therefore a block and a
row in it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capibara.data.documents import Documents
from capibara.data.errors import DocumentError
from capibara.data.packing import Piece, pack
from capibara.errors import MissingExtraError

__all__ = ["Batch", "PackedBatches", "endless_order", "packed_rows"]

_BLOCK = 1024

Batch = dict[str, np.ndarray]


class PackedBatches:
    """An endless sequence of batches of packed documents.

    Args:
      sources: documents.
      weights: how often each source is drawn from, relative to one another, in documents; None: by their number, so
        that each document comes once before any comes again.
      batch_size: rows of a batch, of all readers.
      sequence_length: positions of a row; it has one more token, for the last target.
      seed: of the order, 0 to 2^32 - 1.
      reader, readers: this one makes rows ``reader * batch_size / readers`` and following of each batch.
      split: whether a longer document goes on in another row; otherwise its end is cut off.
      chosen: for each source the documents that are used, by number; None: all.

    Raises:
      DocumentError: an argument is out of range; the message names it.
      MissingExtraError: the package ``grain`` is not installed.
    """

    def __init__(
        self,
        sources: Sequence[Documents],
        *,
        batch_size: int,
        sequence_length: int,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        reader: int = 0,
        readers: int = 1,
        split: bool = True,
        chosen: Sequence[np.ndarray] | None = None,
    ) -> None:
        if batch_size < 1 or sequence_length < 1:
            raise DocumentError(
                f"batch_size={batch_size!r}, sequence_length={sequence_length!r}: expected at least 1"
            )
        if not 0 <= reader < readers or batch_size % readers:
            raise DocumentError(
                f"reader={reader!r} of readers={readers!r}: expected one of 0 to readers - 1, whose number divides "
                f"batch_size={batch_size}"
            )
        if weights is not None and (
            len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights)
        ):
            raise DocumentError(
                f"weights={list(weights)!r}: expected a positive number for each of the {len(sources)} sources"
            )
        self.sources, self.batch_size, self.sequence_length = list(sources), batch_size, sequence_length
        self._chosen = (
            [np.arange(len(one)) for one in sources] if chosen is None else [np.asarray(c) for c in chosen]
        )
        total = sum(map(len, self._chosen))
        if not sources or not all(map(len, self._chosen)):
            raise DocumentError("sources: expected at least one, each with documents")
        self._split = split
        self._own = slice(reader * (batch_size // readers), (reader + 1) * (batch_size // readers))
        self._order = endless_order([len(one) for one in self._chosen], weights, seed)
        self._block = min(_BLOCK, total)
        self._first: dict[int, int] = {0: 0}  # block → the number of its first row, where it is known
        self._packed = functools.lru_cache(maxsize=4)(self._pack)

    def batch(self, step: int) -> Batch:
        """This reader's part of a batch, counted from 0: arrays ``[rows, sequence_length + 1]``.

        ``tokens int32``; ``segments int32``, 1 and up, 0 for padding; ``positions int32``, from 0 in each segment;
        ``weights float32``, 1 for each token that is to be predicted.
        """
        block, row = self._find(step * self.batch_size)
        rows: list[list[tuple[Documents, Piece]]] = []
        while len(rows) < self.batch_size:
            rows += self._packed(block)[row : row + self.batch_size - len(rows)]
            block, row = block + 1, 0
        return packed_rows(rows[self._own], self.sequence_length)

    def passes(self, step: int) -> float:
        """How often the documents were read before a step: places in the order of them, over their number."""
        block, row = self._find(step * self.batch_size)
        places = (block + row / len(self._packed(block))) * self._block
        return places / sum(len(numbers) for numbers in self._chosen)

    def position(self, step: int) -> dict[str, int]:
        """Where the batch of a step begins: what :meth:`seek` takes, as JSON values."""
        block, row = self._find(step * self.batch_size)
        return {"block": block, "row": row}

    def seek(self, step: int, position: Mapping[str, Any]) -> None:
        """Say where the batch of a step begins, so that the blocks before it need not be packed.

        Raises:
          DocumentError: this is no position of these documents.
        """
        block, row = position.get("block"), position.get("row")
        if (
            not (isinstance(block, int) and isinstance(row, int))
            or min(block, row) < 0
            or row > step * self.batch_size
            or row >= len(self._packed(block))
        ):
            raise DocumentError(f"position={dict(position)!r:.80}: expected a block and a row in it")
        self._first[block] = step * self.batch_size - row

    def _find(self, number: int) -> tuple[int, int]:
        """The block of a row, and its number in it."""
        block = max(block for block, first in self._first.items() if first <= number)
        while number >= (end := self._first[block] + len(self._packed(block))):
            block += 1
            self._first[block] = end
        return block, number - self._first[block]

    def _pack(self, block: int) -> list[list[tuple[Documents, Piece]]]:
        places = range(block * self._block, (block + 1) * self._block)
        drawn = [self._order[place] for place in places]
        found = [(self.sources[source], int(self._chosen[source][number])) for source, number in drawn]
        lengths = [int(source.starts[n + 1] - source.starts[n]) for source, n in found]
        rows = pack(lengths, self.sequence_length + 1, split=self._split)
        # A piece by its own document's number.
        return [
            [(found[p.document][0], Piece(found[p.document][1], p.first, p.length)) for p in row]
            for row in rows
        ]


def packed_rows(rows: Sequence[Sequence[tuple[Documents, Piece]]], sequence_length: int) -> Batch:
    """The arrays of rows, as :meth:`PackedBatches.batch` gives them."""
    shape = len(rows), sequence_length + 1
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    for at, row in enumerate(rows):
        end = 0
        for number, (source, piece) in enumerate(row, start=1):
            start = int(source.starts[piece.document]) + piece.first
            own, here = slice(start, start + piece.length), slice(end, end + piece.length)
            tokens[at, here] = source.tokens[own]
            segments[at, here] = number
            positions[at, here] = np.arange(piece.length)
            weights[at, here] = 1.0 if source.answers is None else source.answers[own]
            weights[at, end] = 0  # nothing of its segment stands before it
            end += piece.length
    return {"tokens": tokens, "segments": segments, "positions": positions, "weights": weights}


def endless_order(counts: Sequence[int], weights: Sequence[float] | None, seed: int) -> Any:
    """An endless order of documents: ``order[place]`` is a source's number and a document's in it."""
    grain = _library()
    if weights is None:
        bounds = np.cumsum([0, *counts])

        def place(number: int) -> tuple[int, int]:
            source = int(np.searchsorted(bounds, number, side="right")) - 1
            return source, int(number - bounds[source])

        return grain.MapDataset.range(int(bounds[-1])).shuffle(seed=seed).repeat().map(place)
    # Each source by its own seed: two of one size would otherwise be in one order.
    seeds = np.random.SeedSequence(seed).generate_state(len(counts))
    sources = [
        grain.MapDataset.range(count).shuffle(seed=int(own)).repeat().map(functools.partial(_tagged, source))
        for source, (count, own) in enumerate(zip(counts, seeds, strict=True))
    ]
    return grain.MapDataset.mix(sources, weights=[float(w) / float(sum(weights)) for w in weights])


def _tagged(source: int, number: int) -> tuple[int, int]:
    return source, int(number)


@functools.cache
def _library() -> Any:
    try:
        return importlib.import_module("grain")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "grain":
            raise
        raise MissingExtraError("grain", "data", "packing and mixing documents") from None
