"""parallel_scan on random steps against NumPy and lax.scan; many more: python tests/support/random_steps.py 0 400."""

from __future__ import annotations

import jax
import pytest
from random_steps import check


# The first two mix axes of a broadcast carry, and meet sizes of 1 in one primitive.
@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (19, 7))])
def test_a_random_step(seed: int):
    with jax.enable_x64(True):
        assert check(seed) in ("affine", "sequential", "reference")
