"""Flat names, as Mithril gives them: ``weight``, or ``weight_0``, ``weight_1`` … where several have no other name.

What the author named at the top of the model keeps its name. Everything else that the compiled model reads is named
by the last name that it has further in, numbered in the order in which blocks were added if others have the same; or,
with ``use_short_namings=False``, by its place (``encoder_layer_0_weight``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from capibara.compose.logical.block import Block, Primitive
from capibara.compose.logical.model import Model
from capibara.compose.logical.wires import Wire
from mithril.connecting import as_identifier

__all__ = ["name_all"]

Place = tuple[tuple[str, ...], str, Wire]


def name_all(model: Model, *, short: bool = True) -> None:
    """Give every input, parameter and state of a model a name of its own; in a transaction, if it is to be undone."""
    model._finish()
    taken = set(model.wires)
    places = list(_unnamed(model))
    counts = Counter(key for _, key, _ in places)
    numbers: Counter[str] = Counter()
    for path, key, wire in places:
        if not short:
            name = as_identifier("_".join((*path, key)))
        elif counts[key] == 1 and key not in taken:
            name = key
        else:
            name = f"{key}_{numbers[key]}"
            while name in taken:
                numbers[key] += 1
                name = f"{key}_{numbers[key]}"
            numbers[key] += 1
        while name in taken:
            name = f"_{name}"
        taken.add(name)
        model._name(name, wire)


def _unnamed(model: Model) -> Iterator[Place]:
    """What comes from outside and has no name in the model: where its outermost name stands, and the value."""
    seen = {id(wire.find()) for wire in model.wires.values()}
    stack: list[tuple[Block, tuple[str, ...]]] = _inside(model, ())
    while stack:
        block, path = stack.pop()
        keys = block.ports_in if isinstance(block, Primitive) else list(block.wires)
        for key in keys:
            root = block.wires[key].find()
            if root.producer is None and root.role != "constant" and id(root) not in seen:
                seen.add(id(root))
                yield path, key, root
        if isinstance(block, Model):
            stack.extend(_inside(block, path))


def _inside(model: Model, path: tuple[str, ...]) -> list[tuple[Block, tuple[str, ...]]]:
    """The blocks of a model, last first, under Mithril's names: their own, or that of their class, numbered."""
    kinds = Counter(_kind(child.block) for child in model.children if not _title(child.block))
    numbers: Counter[str] = Counter()
    found = []
    for child in model.children:
        name, kind = _title(child.block), _kind(child.block)
        if not name:
            name = kind if kinds[kind] == 1 else f"{kind}_{numbers[kind]}"
            numbers[kind] += 1
        found.append((child.block, (*path, name.lower())))
    return found[::-1]


def _title(block: Block) -> str | None:
    """The name that the author gave."""
    return block.__dict__.get("title") or block.name


def _kind(block: Block) -> str:
    return type(block).__name__.lower()
