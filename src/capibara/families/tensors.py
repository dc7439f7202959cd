"""Which tensors of a folder are which parameters, and how their numbers lie.

A :class:`Rule` says it in the notation of einops: ``"(heads dim) embed -> embed heads dim"`` is a matrix whose rows
are the features of the heads, one head after the other, and whose transpose in three dimensions is the parameter. A
tensor may hold several parameters, one after the other along an axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from capibara.compress.safetensors_file import Stored
from capibara.families.errors import FamilyError

__all__ = ["ModelTensors", "Piece", "Placed", "Rule", "places"]


class ModelTensors(Protocol):
    """The tensors of a published model, open for reading; used as a context manager, and iterated over for names.

    Attributes:
      folder: where they are, for errors.
      tensors: name → an object whose ``numbers(name)`` gives the bits, and how the tensor appears.
      dtypes: name → the format in which a folder is to have it, where that is another.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, tuple[Any, Stored]]: ...

    @property
    def dtypes(self) -> Mapping[str, str]: ...

    def __iter__(self) -> Iterator[str]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True)
class Piece:
    """A parameter in a tensor.

    Attributes:
      path: of the parameter in its block (or, outside of blocks, in the model): ``"attention.query.weight"``.
      form: how it lies in the tensor → how the parameter is: ``"(heads dim) embed -> embed heads dim"``.
    """

    path: str
    form: str

    @cached_property
    def _groups(self) -> tuple[list[list[str]], list[str]]:
        before, after = self.form.split("->")
        groups = [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\S+", before)]
        names = after.split()
        if sorted(names) != sorted(name for group in groups for name in group):
            raise ValueError(f"{self.path}: {self.form!r} has other names before the arrow than after it")
        return groups, names

    @property
    def leading(self) -> bool:
        """Whether the first dimension of the tensor, alone, is the first one of the parameter."""
        groups, names = self._groups
        return groups[:1] == [names[:1]]

    @property
    def entry(self) -> Piece:
        """How an entry of the first dimension lies in one of the tensor's, if they are the same."""
        groups, names = self._groups
        before = " ".join(f"({' '.join(group)})" for group in groups[1:])
        return Piece(self.path, f"{before} -> {' '.join(names[1:])}")

    @property
    def order(self) -> tuple[int, ...]:
        """The dimension of the taken-apart tensor that each dimension of the parameter is."""
        groups, names = self._groups
        flat = [name for group in groups for name in group]
        return tuple(flat.index(name) for name in names)

    def apart(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape with every group taken apart, for a parameter of this shape."""
        groups, names = self._groups
        sizes = dict(zip(names, shape, strict=True))
        return tuple(sizes[name] for group in groups for name in group)

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, for a parameter of this shape."""
        groups, names = self._groups
        sizes = dict(zip(names, shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in groups)


@dataclass(frozen=True)
class Rule:
    """A tensor's name and what is in it.

    Attributes:
      name: in the folder; ``{layer}`` stands for the number of the block. With ``{expert}`` there is a tensor for each
        entry of the parameters' first dimension, and pieces say how one entry lies in it.
      pieces: the parameters in it, in order. axis: along which they lie one after the other.
      interleaved: along it their entries take turns: the first of each, then the second of each.
    """

    name: str
    pieces: tuple[Piece, ...]
    axis: int = 0
    interleaved: bool = False

    @classmethod
    def of(cls, name: str, *pieces: tuple[str, str], axis: int = 0, interleaved: bool = False) -> Rule:
        """``Rule.of("…q_proj.weight", ("attention.query.weight", "(heads dim) embed -> embed heads dim"))``."""
        return cls(name, tuple(Piece(path, form) for path, form in pieces), axis, interleaved)


@dataclass(frozen=True)
class Placed:
    """A rule for one tensor of one model.

    Attributes:
      name: the tensor's. shape: its shape.
      axis: along which several parameters lie.
      parts: for each parameter its piece, path, index in stacks (of blocks, of experts; ``()``: in none), its shape
        (of one entry) and where it starts along ``axis``.
      step: its entries along ``axis`` are so far apart.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    parts: tuple[tuple[Piece, tuple[str, ...], tuple[int, ...], tuple[int, ...], int], ...]
    step: int = 1

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of matrices, and parameters take turns in each of them."""
        several = self.step > 1 and self.axis > 0 and len(self.shape) > 2
        return several and all(piece.leading for piece, *_ in self.parts)

    def entries(self) -> Iterator[Placed]:
        """Of a ``stacked`` tensor, each entry of its first dimension as a tensor."""
        for row in range(self.shape[0]):
            parts = tuple(
                (piece.entry, path, (*index, row), shape[1:], start)
                for piece, path, index, shape, start in self.parts
            )
            yield replace(self, shape=self.shape[1:], axis=self.axis - 1, parts=parts)


def places(
    outside: tuple[Rule, ...],
    inside: tuple[Rule, ...],
    blocks: list[tuple[tuple[str, ...], int]],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
) -> Iterator[Placed]:
    """The tensors of a model.

    Args:
      outside, inside: rules for what stands outside of blocks and in each block. A rule whose parameters the model
        does not have is left out.
      blocks: for each block the path of its parameters and its index in their stacks.
      shapes: of the parameters, by path.

    Raises:
      FamilyError: a parameter has no tensor.
    """
    left = {
        path: (shape[0] if any(path[: len(p)] == p for p, _ in blocks) else 1)
        for path, shape in shapes.items()
    }

    def each(rule: Rule, prefix: tuple[str, ...], index: tuple[int, ...], layer: int) -> Iterator[Placed]:
        paths = [(*prefix, *piece.path.split(".")) for piece in rule.pieces]
        if not any(path in shapes for path in paths):
            return
        for path in paths:
            if path not in shapes:
                raise FamilyError(f"{rule.name}: the model has no parameter {'.'.join(path)}")
        if "{expert}" not in rule.name:
            entries = [index]
        else:
            entries = [(*index, expert) for expert in range(shapes[paths[0]][len(index)])]
        for path in paths:
            left[path] -= 1
        for entry in entries:
            parts, at, stored = [], 0, ()
            for piece, path in zip(rule.pieces, paths, strict=True):
                shape = shapes[path][len(entry) :]
                stored = piece.stored(shape)
                parts.append((piece, path, entry, shape, len(parts) if rule.interleaved else at))
                at += stored[rule.axis]
            whole = (*stored[: rule.axis], at, *stored[rule.axis + 1 :])
            name = rule.name.format(layer=layer, expert=entry[-1] if entry else 0)
            yield Placed(name, whole, rule.axis, tuple(parts), len(parts) if rule.interleaved else 1)

    for rule in outside:
        yield from each(rule, (), (), 0)
    for layer, (prefix, index) in enumerate(blocks):
        for rule in inside:
            yield from each(rule, prefix, (index,), layer)
    if rest := [".".join(path) for path, count in left.items() if count]:
        raise FamilyError(
            f"this family has no tensor for {rest[0]}{f' and {len(rest) - 1} others' if rest[1:] else ''}. Remedy: "
            "other settings of [model], or another family"
        )
