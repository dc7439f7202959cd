"""Symbol frequencies for the coder: integers that add up to a power of two.

Only integer arithmetic and float64 divisions are used, so every machine computes the same table.
"""

from __future__ import annotations

import numpy as np

__all__ = ["SCALE", "SCALE_BITS", "cost_in_bits", "normalise"]

SCALE_BITS = 12  # a decoding table of 4096 entries stays in the first-level cache
SCALE = 1 << SCALE_BITS


def normalise(counts: np.ndarray) -> np.ndarray:
    """Frequencies that add up to 4096, nearly proportional to the counts.

    Args:
      counts: int64 [symbols], how often each occurs; at most 4096 of them occur.

    Returns:
      int64 [symbols]: 0 exactly where the count is 0. All 0 if nothing occurs.
    """
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    if total == 0:
        return np.zeros_like(counts)
    present = counts > 0
    shares = np.where(present, np.maximum(counts * SCALE // total, 1), 0)
    # One step up from f saves about count / (f + 1/2); one step down costs about count / (f - 1/2).
    while (missing := SCALE - int(shares.sum())) != 0:
        if missing > 0:
            worth = np.where(present, counts / (shares + 0.5), -1.0)
            best = np.argsort(-worth, kind="stable")[: min(missing, int(present.sum()))]
            shares[best] += 1
        else:
            price = np.where(shares > 1, counts / np.maximum(shares - 0.5, 0.5), np.inf)
            best = np.argsort(price, kind="stable")[: min(-missing, int((shares > 1).sum()))]
            shares[best] -= 1
    return shares


def cost_in_bits(counts: np.ndarray, frequencies: np.ndarray | None = None) -> float:
    """Bits that the counted symbols take with these frequencies; with their own, the empirical entropy."""
    counts = np.asarray(counts, np.float64)
    used = counts > 0
    if not used.any():
        return 0.0
    weights = counts if frequencies is None else np.asarray(frequencies, np.float64)
    return float(-(counts[used] * np.log2(weights[used] / weights.sum())).sum())
