"""Sizes that only a loss's target says: a network's output that nothing else fixes has its target's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from capibara.compose.logical.block import Block
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import set_size, settle

__all__ = ["follow_targets"]


def follow_targets(model: Model, shapes: Mapping[Any, Any], constants: Mapping[Any, Any]) -> None:
    """Give sizes of predictions that are open the sizes of their targets; in a transaction."""
    known = dict(shapes)
    known |= {key: value.shape for key, value in constants.items() if hasattr(value, "shape")}
    for key, shape in known.items():
        if key in model.wires:
            model.set_shapes({key: tuple(shape)})
    for block in _losses(model):
        pair = [block.wires[key].find().shape.dims() for key in ("input", "target")]
        if None in pair:
            continue
        for mine, wanted in zip(pair[0][::-1], pair[1][::-1], strict=False):  # type: ignore[index]
            size = wanted.find().size
            if mine.find().size is None and size is not None:
                set_size(mine.find(), size)
                settle()


def _losses(model: Model) -> Iterator[Block]:
    stack: list[Block] = [model]
    while stack:
        block = stack.pop()
        if isinstance(block, Model):
            stack.extend(child.block for child in block.children)
        elif {"input", "target"} == set(block.input_keys):
            yield block
