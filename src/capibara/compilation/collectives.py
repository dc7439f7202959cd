"""How many collectives of a compiled program are asynchronous: what ``enable_async_collective`` did.

XLA writes an asynchronous collective in three ways: as two instructions (``all-gather-start`` and ``all-gather-done``);
as a call of a computation with the collective in it that has a start and a done (TPU7x); or inside several fusions, of
which the first begins it, the last waits for it and all name the same channel (v5e, v5p, v6e).
"""

from __future__ import annotations

import re

__all__ = ["COLLECTIVES", "collectives_of"]

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The kinds, by the names of HLO."""

_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_HEADER = re.compile(r"(?:ENTRY )?%?([^\s(]+) .*\{\s*$")
_STARTED = re.compile(r"-start\(.*?\b(?:calls|to_apply|async_execution)=%?([^\s,{}]+)")


def collectives_of(text: str) -> str:
    """A line on the collectives in a program's HLO, each counted once, however often a loop runs it."""
    called = set(_STARTED.findall(text))
    found: list[tuple[tuple[str, str], bool]] = []  # kind and channel, and whether it is begun here
    fused = set[tuple[str, str]]()
    name, first = "", 0
    for line in text.splitlines():
        if line[:1] not in (" ", "\t", "") and (header := _HEADER.match(line)):
            name, first = header[1], len(found)
        elif match := _COLLECTIVE.search(line):
            channel = _CHANNEL.search(line)
            found.append(((match[1], channel[1] if channel else ""), bool(match[2]) or name in called))
        elif "AsyncCollective" in line:  # begins or ends the collective of its fusion
            fused.update(key for key, _ in found[first:] if key[1])
    apart = [begun for key, begun in found if key not in fused]
    count = len(apart) + len(fused)
    return f"{sum(apart) + len(fused)} of {count} collectives asynchronous" if count else "no collectives"
