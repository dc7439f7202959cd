"""How far two nested results are from one another."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["far"]


def far(ours: Any, theirs: Any) -> float:
    """The largest difference of two trees of arrays, against the largest value of its array where that is above 1."""

    def one(a: Any, b: Any) -> float:
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        return float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b))))

    return max(jax.tree.leaves(jax.tree.map(one, ours, theirs)))
