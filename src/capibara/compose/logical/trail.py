"""Taking changes back: what building a model changes is written down while a :func:`transaction` is open.

A connection changes dimensions, shapes, wires and names all over a model before it turns out to be wrong. Whoever
changes something does it through :func:`put` (an attribute), :func:`symbol` (a name) or tells :func:`on_undo` how to
take it back, and a transaction that fails leaves everything as it was.

Each thread has a trail of its own: models may be built in several at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["building", "building_alone", "on_undo", "put", "root_of", "symbol", "transaction", "what_if"]


class _Building(threading.local):
    def __init__(self) -> None:
        self.trail: list[tuple[Any, str, Any]] | None = None
        self.waiting: deque[Any] = deque()  # constraints to try again: see shapes.settle


building = _Building()

building_alone = threading.RLock()
"""Held while a model is changed for a moment and put back, as compiling does: one model may be in several threads."""


def put(obj: Any, attribute: str, value: Any) -> None:
    """Set an attribute so that an open :func:`transaction` can take it back."""
    trail = building.trail
    if trail is not None:
        trail.append((obj, attribute, getattr(obj, attribute)))
    setattr(obj, attribute, value)


def on_undo(action: Callable[[], Any]) -> None:
    """Run ``action`` if the open :func:`transaction` is taken back: for changes that are not attributes."""
    trail = building.trail
    if trail is not None:
        trail.append((action, "", None))


def root_of(node: Any) -> Any:
    """The representative of a union-find node (anything with a ``parent``).

    Long ways are shortened as they are walked, or a chain of n connected values would take n² steps to build.
    """
    parent = node.parent
    if parent is None:
        return node
    if parent.parent is None:
        return parent
    root = parent
    while root.parent is not None:
        root = root.parent
    while node.parent is not root:
        after = node.parent
        put(node, "parent", root)
        node = after
    return root


def symbol(symbols: dict[str, Any], name: str, new: Any) -> Any:
    """What a name stands for, ``new`` if it is the first of that name, in a way that can be taken back."""
    if name not in symbols:
        symbols[name] = new
        trail = building.trail
        if trail is not None:
            trail.append((symbols, name, None))
    return symbols[name]


@contextmanager
def transaction() -> Iterator[None]:
    """Undo every change to dimensions, shapes, wires and symbols if the block raises. Transactions nest."""
    outer = building.trail
    building.trail = trail = []
    try:
        yield
    except BaseException:
        for obj, attribute, value in reversed(trail):
            if isinstance(obj, dict):
                del obj[attribute]  # a symbol that was new
            elif not attribute:
                obj()
            else:
                setattr(obj, attribute, value)
        building.trail = outer
        building.waiting.clear()
        raise
    if outer is not None:
        outer.extend(trail)
    building.trail = outer


@contextmanager
def what_if() -> Iterator[None]:
    """A :func:`transaction` that is always undone: to see what follows from more being known, and forget it."""

    class Undo(Exception):
        pass

    try:
        with transaction():
            yield
            raise Undo
    except Undo:
        pass
