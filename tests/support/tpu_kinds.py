"""The kinds of TPU that kernels are compiled for, one small slice each."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["TOPOLOGIES", "few_or_all", "topologies"]

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def topologies(*quick: str) -> list[Any]:
    """A parameter for each. Those of other kinds than ``quick`` (such as ``"v4"``) are slow."""
    assert set(quick) <= {t.partition(":")[0] for t in TOPOLOGIES}
    return [
        t if t.partition(":")[0] in quick else pytest.param(t, marks=pytest.mark.slow) for t in TOPOLOGIES
    ]


def few_or_all(kind: str) -> list[Any]:
    """Arguments of a script: ``few`` and one kind, for some of its programs; and, slow, each kind, for all of them."""
    (quick,) = (t for t in TOPOLOGIES if t.partition(":")[0] == kind)
    return [f"few {quick}", *topologies()]
