"""Every name that a package offers is there, also those that are imported only when they are asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import capibara

ROOT = Path(capibara.__path__[0])
LAZY = sorted(
    ".".join(["capibara", *path.parent.relative_to(ROOT).parts])
    for path in ROOT.rglob("__init__.py")
    if "on_demand(" in path.read_text()
)


@pytest.mark.parametrize("name", LAZY)
def test_a_package_that_imports_on_demand_has_the_names_that_it_offers(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
