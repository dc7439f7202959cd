"""The page that lists the library lists all of it, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from capibara import compose as ml

PAGE = Path(__file__).parents[2] / "docs/compose/library.md"


def listed() -> list[str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`((?:models\.)?[A-Z]\w*)`", row)]


def test_every_block_is_listed() -> None:
    blocks = {
        name
        for name in ml.__all__
        if inspect.isclass(block := getattr(ml, name)) and issubclass(block, ml.Block) and name != "Block"
    }
    more = {
        f"models.{name}"
        for name in dir(ml.models)
        if inspect.isclass(block := getattr(ml.models, name))
        and issubclass(block, ml.Block)
        and name not in blocks
    }
    assert (blocks | more) - set(listed()) == set()


def test_every_name_that_is_listed_is_a_block() -> None:
    for name in listed():
        block = getattr(ml.models, name[7:]) if name.startswith("models.") else getattr(ml, name)
        assert issubclass(block, ml.Block), name


def test_no_block_is_listed_twice() -> None:
    names = listed()
    assert sorted(names) == sorted(set(names))
