"""Matrix products of integers, whose result the host knows exactly.

Integers up to 256 are exact in bfloat16, and their products and sums up to 2²⁴ in float32, in any order. So a correct
device gives exactly the host's numbers, with either dtype. The matrices repeat a base of 512 × 512, so that the host
computes one small product for a large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from capibara.observe.health.work import DeviceWork

__all__ = ["DTYPES", "Problem", "make_problems", "measure", "wrong_elements"]

DTYPES = ("bfloat16", "float32")
_BASE = 512
_PATTERNS = ("random", "extremes", "powers of two")


@dataclass(frozen=True)
class Problem:
    """Two matrices and their product.

    Attributes:
      name: the pattern and the seed.
      a, b: ``[base, base]``, small integers.
      repeats: how often they are repeated along both axes.
      product: ``[base, base]``, which the product repeats.
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    repeats: int
    product: np.ndarray

    def operands(self, dtype: str, device: Any) -> tuple[jax.Array, jax.Array]:
        """The matrices on a device."""
        tile = (self.repeats, self.repeats)
        made = [np.tile(each.astype(jax.numpy.dtype(dtype)), tile) for each in (self.a, self.b)]
        return jax.device_put(made[0], device), jax.device_put(made[1], device)


def make_problems(size: int, seeds: Sequence[int]) -> list[Problem]:
    """One problem for each pattern and seed.

    Args:
      size: rows and columns; a multiple of 512, or a smaller number.
      seeds: of the random numbers.
    """
    base = min(size, _BASE)
    largest = min(127, math.isqrt((2**24 - 1) // size))
    problems = []
    for seed in seeds:
        for pattern in _PATTERNS:
            draw = np.random.default_rng((seed, len(pattern)))
            a, b = (_numbers(pattern, draw, base, largest) for _ in range(2))
            exact = (a.astype(np.float64) @ b.astype(np.float64)) * (size // base)
            problems.append(Problem(f"{pattern}, seed {seed}", a, b, size // base, exact.astype(np.float32)))
    return problems


def _numbers(pattern: str, draw: np.random.Generator, base: int, largest: int) -> np.ndarray:
    shape = base, base
    if pattern == "random":
        return draw.integers(-largest, largest + 1, shape)
    signs = draw.integers(0, 2, shape) * 2 - 1
    if pattern == "extremes":
        return signs * largest
    return signs * (1 << draw.integers(0, largest.bit_length(), shape))


def wrong_elements(problem: Problem, result: Any) -> tuple[int, str]:
    """How many elements differ from the known product, and the first of them in words."""
    found = np.asarray(jax.device_get(result))
    base, repeats = problem.product.shape[0], problem.repeats
    if found.shape != (base * repeats, base * repeats):
        return base * base * repeats * repeats, f"a result of shape {found.shape}"
    blocks = found.reshape(repeats, base, repeats, base)
    bad = (blocks != problem.product[None, :, None, :]).reshape(found.shape)  # NaN differs, too
    count = int(np.count_nonzero(bad))
    if not count:
        return 0, ""
    row, column = divmod(int(np.argmax(bad)), found.shape[1])
    right = problem.product[row % base, column % base]
    return count, (
        f"element [{row}, {column}] of a {found.shape[0]}×{found.shape[1]} product is {found[row, column]:.9g} "
        f"instead of {right:.9g}"
    )


def measure(work: DeviceWork, device: Any, operands: tuple[jax.Array, jax.Array], calls: int) -> Any:
    """The last of several products, and FLOP/s."""

    def run() -> Any:
        # Queued one behind the other, so that starting them costs little beside the products.
        for _ in range(calls - 1):
            work.multiply(*operands)
        return work.multiply(*operands)

    result, seconds = work.timed(device, run)
    rows, inner = operands[0].shape
    return result, 2.0 * rows * inner * operands[1].shape[1] * calls / max(seconds, 1e-9)
