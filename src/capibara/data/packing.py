"""Documents into rows of one length: several short ones in a row, long ones over several rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Piece", "pack"]


class Piece(NamedTuple):
    """A part of a document: its number among those that are packed, its first token, and how many."""

    document: int
    first: int
    length: int


def pack(lengths: Sequence[int], size: int, *, split: bool = True) -> list[list[Piece]]:
    """Put documents into rows of at most ``size`` tokens: best fit, the longest first.

    Best fit decreasing needs at most 11/9 of the fewest possible rows (Johnson et al., "Worst-Case Performance Bounds
    for Simple One-Dimensional Packing Algorithms", 1974).

    Args:
      lengths: tokens of each document, at least 2.
      size: tokens of a row, at least 2.
      split: a longer document goes on in another row, which repeats its last token, so that every token but the first
        is predicted once. Otherwise its end is cut off.

    Returns:
      The pieces of each row in the order of documents; rows in the order of their first ones.
    """
    pieces = []
    for document, length in enumerate(lengths):
        whole = int(length)
        pieces.append(Piece(document, 0, min(whole, size)))
        first = size - 1
        while split and first < whole - 1:
            pieces.append(Piece(document, first, min(size, whole - first)))
            first += size - 1
    rows: list[list[Piece]] = []
    space: list[tuple[int, int]] = []  # what is free in a row, and its number; sorted
    for piece in sorted(pieces, key=lambda one: -one.length):
        at = bisect.bisect_left(space, (piece.length, -1))
        if at == len(space):
            free, row = size, len(rows)
            rows.append([])
        else:
            free, row = space.pop(at)
        rows[row].append(piece)
        if free - piece.length >= 2:
            bisect.insort(space, (free - piece.length, row))
    for row in rows:
        row.sort()
    return sorted(rows)
