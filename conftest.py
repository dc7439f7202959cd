"""Runs the Python of README.md and docs/ as tests, so that no page shows code that does not work.

Each page is one program: its blocks run in order and share their names. It runs in an empty folder of its own,
so that a page may write files.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# What was measured on the machine that runs the tests must not decide what they test.
os.environ.setdefault("CAPIBARA_TUNING", "0")

_FOLDER = "__folder_of_the_page__"


def _enter(namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory(prefix="capibara-page-", ignore_cleanup_errors=True)
    namespace[_FOLDER] = os.getcwd(), folder
    os.chdir(folder.name)


def _leave(namespace: dict[str, Any]) -> None:
    before, folder = namespace.pop(_FOLDER)
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter,
    teardown=_leave,
).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The blocks of a page need each other: with `-n` a whole file has to go to one worker.
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadfile"


@pytest.fixture(scope="module", autouse=True)
def kept_objects_are_not_looked_at_again() -> Iterator[None]:
    """JAX keeps what it traced: after a thousand tests, looking through all of it for garbage takes its time."""
    yield
    gc.collect()
    gc.freeze()
