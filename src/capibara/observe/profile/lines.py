"""Which source line of one version of a program is which of another, by their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

__all__ = ["Line", "edited_lines", "same_lines"]

# How alike two lines must be for one to be the other, edited; less where nothing else can be.
_ALIKE, _ALIKE_ALONE = 0.5, 0.25
# Pairs of lines, letters of each, and lines of a file: a profile comes from a file that may hold anything.
_MOST_COMPARED, _MOST_LETTERS, _MOST_LINES = 2_000, 300, 10_000


class Line(NamedTuple):
    """What a line shares with the same one of another version: its file's name, its text, and which of those it is."""

    file: str
    text: str
    which: int


def same_lines(lines: Mapping[str, str]) -> dict[str, Line]:
    """The lines of one version.

    Args:
      lines: their texts by place (``"folder/model.py:31"``), as :attr:`Profile.lines`.

    Returns:
      By place; a line with the same text and file in another version is equal, wherever it stands there.
    """
    alike: defaultdict[tuple[str, str], list[tuple[str, int, str]]] = defaultdict(list)
    for source, text in lines.items():
        file, _, number = source.rpartition(":")
        if text and number.isdecimal() and len(number) < 10:
            alike[file.replace("\\", "/").rpartition("/")[2], text].append((file, int(number), source))
    return {
        source: Line(*key, which)
        for key, sources in alike.items()
        for which, (_, _, source) in enumerate(sorted(sources))
    }


def edited_lines(before: Mapping[str, Line], after: Mapping[str, Line]) -> dict[Line, Line]:
    """Lines that only the first version has, each with the line of the second that it became.

    One line became another if it stands between the same neighbours, and the texts are alike.

    Args:
      before, after: what :func:`same_lines` gives.
    """
    kept = set(before.values()) & set(after.values())
    old, new = _in_order(before), _in_order(after)
    found: dict[Line, Line] = {}
    for file, mine in old.items():
        theirs = new.get(file, [])
        if max(len(mine), len(theirs)) > _MOST_LINES:
            continue
        for what, first, last, begin, end in SequenceMatcher(
            None, mine, theirs, autojunk=False
        ).get_opcodes():
            if what == "replace":
                gone = [line for line in mine[first:last] if line not in kept]
                come = [line for line in theirs[begin:end] if line not in kept]
                found.update(_pairs(gone, come))
    return found


def _in_order(lines: Mapping[str, Line]) -> dict[str, list[Line]]:
    found: defaultdict[str, list[tuple[int, Line]]] = defaultdict(list)
    for source, line in lines.items():
        found[line.file].append((int(source.rpartition(":")[2]), line))
    return {file: [line for _, line in sorted(numbered)] for file, numbered in found.items()}


def _pairs(gone: Sequence[Line], come: Sequence[Line]) -> dict[Line, Line]:
    """The most alike first, each once."""
    if len(gone) * len(come) > _MOST_COMPARED:
        return {}
    least = _ALIKE_ALONE if len(gone) == len(come) == 1 else _ALIKE
    ratios = sorted(
        (
            (
                SequenceMatcher(
                    None, one.text[:_MOST_LETTERS], other.text[:_MOST_LETTERS], autojunk=False
                ).ratio(),
                -abs(i - j),
                i,
                j,
            )
            for i, one in enumerate(gone)
            for j, other in enumerate(come)
        ),
        reverse=True,
    )
    found: dict[Line, Line] = {}
    taken: set[int] = set()
    for ratio, _, i, j in ratios:
        if ratio >= least and gone[i] not in found and j not in taken:
            found[gone[i]] = come[j]
            taken.add(j)
    return found
