"""Distinct labels of a plan's layouts in tables, figures and lines of progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from capibara.sharding import Layout

__all__ = ["ProgressLabels", "differences", "mesh_word", "sharding_word"]


def mesh_word(layout: Layout) -> str:
    """``data 4 × model 8``."""
    return " × ".join(f"{axis} {size}" for axis, size in layout.mesh)


def sharding_word(layout: Layout) -> str:
    """What is sharded over ``data``: all parameters (``sharded``), the ``optimizer`` alone, or nothing."""
    word = layout.parameters
    if layout.optimizer == "sharded":
        # Of parameters that are sharded it says no more than these do, and is a setting all the same.
        word = "optimizer" if layout.parameters == "replicated" else "sharded, optimizer too"
    return word if layout.offload == "none" else f"{word} + host"


# What the columns of a table say of a layout.
_COLUMNS: Sequence[Callable[[Layout], object]] = (
    mesh_word,
    sharding_word,
    lambda layout: layout.remat,
    lambda layout: layout.microbatches,
)
_SAID = ("mesh", "parameters", "optimizer", "remat", "microbatches", "offload", "flags")


def differences(layouts: Sequence[Layout]) -> list[str]:
    """For each layout the settings that its columns do not show and not all of them have.

    ``""`` for all if the columns distinguish them; otherwise no two different layouts have the same columns and the
    same text. A flag is written without its prefix: ``xla_enable_async_all_gather=true`` as
    ``enable_async_all_gather=true``.
    """
    columns = [tuple(column(layout) for column in _COLUMNS) for layout in layouts]
    different = len(set(layouts))
    if len(set(columns)) == different:
        return [""] * len(layouts)
    texts: list[str] = []
    # What is short, and unambiguous for options of a compiler that stand in one order; else all that there is.
    for flags_of in (_flags_that_differ, lambda layouts: list(map(repr, layouts))):
        texts = [
            " ".join(filter(None, parts)) or "no others"
            for parts in zip(_others_that_differ(layouts), flags_of(layouts), strict=True)
        ]
        if len(set(zip(columns, texts, strict=True))) == different:
            break
    return texts


def _flags_that_differ(layouts: Sequence[Layout]) -> list[str]:
    shared = frozenset.intersection(*(frozenset(layout.flags) for layout in layouts))
    return [
        " ".join(
            f"{name.removeprefix('xla_')}={value}"
            for name, value in layout.flags
            if (name, value) not in shared
        )
        for layout in layouts
    ]


def _others_that_differ(layouts: Sequence[Layout]) -> list[str]:
    """Settings of layouts that have no column."""
    names = [field.name for field in fields(Layout) if field.name not in _SAID]
    names = [name for name in names if len({getattr(layout, name) for layout in layouts}) > 1]
    return [" ".join(f"{name}={getattr(layout, name)}" for name in names) for layout in layouts]


class ProgressLabels:
    """Texts of layouts that come one after the other: no two different ones have the same."""

    def __init__(self) -> None:
        self._of: dict[Layout, str] = {}
        self._first: dict[str, Layout] = {}

    def of(self, layout: Any) -> str:
        """What it is called; with the flags that set it apart from the first one that is called so."""
        if not isinstance(layout, Layout):  # a change of settings, which is its own text
            return str(layout)
        if layout not in self._of:
            text = str(layout)
            first = self._first.setdefault(text, layout)
            for label in (text, f"{text}{_beside(layout, first)}", repr(layout)):
                if label not in self._of.values():
                    self._of[layout] = label
                    break
        return self._of[layout]


def _beside(layout: Layout, other: Layout) -> str:
    """``", with tpu_some=1, without tpu_other=2"``: the flags of one layout beside those of another."""
    parts = [
        (
            word,
            [f"{name.removeprefix('xla_')}={value}" for name, value in mine if (name, value) not in theirs],
        )
        for word, mine, theirs in (
            ("with", layout.flags, other.flags),
            ("without", other.flags, layout.flags),
        )
    ]
    return "".join(f", {word} {' '.join(flags)}" for word, flags in parts if flags)
