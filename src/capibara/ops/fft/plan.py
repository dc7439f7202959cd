"""Split a length into radices, and compute roots of unity and chirps.

A transform of length ``n = r · m`` is ``m`` transforms of length ``r``, each a product with the matrix of roots of
unity, a multiplication with roots of unity (the *twiddles*), and ``r`` transforms of length ``m``. Large radices mean
few passes over memory and much arithmetic: the best choice depends on the speed of products. The cost model is that
of a TPU.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MOST", "chirp", "dft_matrix", "padded_length", "radices", "roots", "transform_cost"]

# The largest radix that is chosen here: its matrix has 4 · 256² numbers.
MOST = 256


def transform_cost(stages: Sequence[int]) -> float:
    """The modelled cost of a transform per element.

    Fitted to the TPU compiler's estimates for v4: a stage costs its pass over memory and little for its products, and
    more where the first one's frequencies do not fill the 128 lanes of a register.
    """
    if not stages:
        return 0.0
    return sum(1 + r / 1024 for r in stages) + 0.25 * max(0.0, 1 - stages[0] / 128)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(2, min(n, most) + 1) if n % d == 0]


@functools.lru_cache(maxsize=1024)
def radices(n: int, factors: tuple[int, ...] | None = None, most: int = MOST) -> tuple[int, ...] | None:
    """The radices of the cheapest transform of length ``n``; None where no product of them is ``n``.

    Args:
      n: The length.
      factors: The radices to choose from, each any number of times. If their product is ``n``, they are used in this
        order. None: all up to ``most``.
      most: The largest radix.
    """
    if factors is not None and math.prod(factors) == n:
        return factors
    allowed = _divisors(n, most) if factors is None else sorted({f for f in factors if n % f == 0})

    @functools.cache
    def best(rest: int) -> tuple[float, tuple[int, ...]] | None:
        """The cheapest stages after the first one, the largest before."""
        if rest == 1:
            return 0.0, ()
        found = None
        for r in allowed:
            if rest % r == 0 and (inner := best(rest // r)) is not None:
                cost = inner[0] + 1 + r / 1024
                if found is None or cost < found[0]:
                    found = cost, tuple(sorted((r, *inner[1]), reverse=True))
        return found

    if n == 1:
        return ()
    rows = [(r, *rest[1]) for r in allowed if (rest := best(n // r)) is not None]
    return min(rows, key=transform_cost, default=None)


@functools.lru_cache(maxsize=1024)
def padded_length(n: int, factors: tuple[int, ...] | None = None) -> int:
    """The length of the cyclic convolution that a transform of length ``n`` is made of, at least ``2 n - 1``."""
    least = 2 * n - 1
    primes = (2, 3, 5) if factors is None else tuple(sorted(set(factors)))
    most = 1
    while most < least:
        most *= primes[0]
    queue, seen, found = [1], {1}, []
    while queue:
        length = heapq.heappop(queue)
        if length >= least:
            found.append(length)
            continue
        for p in primes:
            if length * p <= most and length * p not in seen:
                seen.add(length * p)
                heapq.heappush(queue, length * p)

    def cost(length: int) -> float:
        stages = radices(length, factors)
        assert stages is not None
        return length * transform_cost(stages)

    return min(found, key=cost)


def roots(index: Any, n: int, xp: Any = np, dtype: Any = np.float64) -> tuple[Any, Any]:
    """``cos`` and ``sin`` of ``2 π index / n`` for integers ``0 <= index < n < 2**30``.

    The angle is folded into the first eighth of the circle in integers, so that large indices lose no accuracy
    and quarters of the circle are exact.
    """
    a = xp.minimum(index, n - index) * 4
    below = index > n - index
    left = a > n
    a = xp.where(left, 2 * n - a, a)
    steep = 2 * a > n
    a = xp.where(steep, n - a, a)
    angle = a.astype(dtype) * xp.asarray(np.pi / (2 * n), dtype)
    c, s = xp.cos(angle), xp.sin(angle)
    c, s = xp.where(steep, s, c), xp.where(steep, c, s)
    return xp.where(left, -c, c), xp.where(below, -s, s)


@functools.lru_cache(maxsize=64)
def dft_matrix(n: int) -> tuple[np.ndarray, np.ndarray]:
    """``cos`` and ``sin`` of ``2 π j k / n``, ``[n, n]`` each."""
    j = np.arange(n, dtype=np.int64)
    return roots(j[:, None] * j % n, n)


@functools.lru_cache(maxsize=16)
def chirp(n: int, padded: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """``exp(-i π j² / n)``, and the spectrum of the convolution that the transform becomes with it.

    Each as ``c, s`` of ``c - i s``.

    Source: Bluestein 1970, "A linear filtering approach to the computation of the discrete Fourier transform".
    """
    j = np.arange(n, dtype=np.int64)
    c, s = roots(j * j % (2 * n), 2 * n)
    kernel = np.zeros(padded, np.complex128)
    kernel[:n] = c + 1j * s
    kernel[padded - n + 1 :] = kernel[n - 1 : 0 : -1]
    spectrum = np.fft.fft(kernel)
    return (c, s), (np.real(spectrum), -np.imag(spectrum))
