"""How many collectives of a compiled program are asynchronous: what ``enable_async_collective`` did."""

from __future__ import annotations

import re

__all__ = ["collectives_of"]

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"
_START = re.compile(rf" (?:{_KINDS})-start\(")
_WHOLE = re.compile(rf" (?:{_KINDS})\(")


def collectives_of(text: str) -> str:
    """A line on the collectives in a program's HLO, each counted once, however often a loop runs it."""
    started, whole = len(_START.findall(text)), len(_WHOLE.findall(text))
    if not started + whole:
        return "no collectives"
    return f"{started} of {started + whole} collectives asynchronous"
