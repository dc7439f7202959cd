"""How far a few constants bring predictions to what was measured, and what that is worth.

A predicted step is a sum of parts (computing, communication that nothing hides, …). Each constant multiplies one part,
so that it says what a second of that part, as it was predicted, takes in truth. The constants are those of the least
squares of the relative errors, none below 0. What they are worth, *leave-one-out* says: each row is predicted with
constants that were fitted to the other rows.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["fit", "leave_one_out", "median_error"]


def fit(parts: ArrayLike, seconds: ArrayLike) -> np.ndarray:
    """Constants [k] for parts [rows, k] whose sums are to be ``seconds`` [rows].

    Raises:
      ValueError: fewer rows than constants, or a row that did not take any time.
    """
    matrix, target = np.asarray(parts, np.float64), np.asarray(seconds, np.float64)
    if matrix.ndim != 2 or target.shape != matrix.shape[:1] or len(target) < matrix.shape[1]:
        raise ValueError(
            f"parts of shape {matrix.shape} and seconds of shape {target.shape}: expected [n, k], [n], n ≥ k"
        )
    if not (target > 0).all():
        raise ValueError("seconds: expected every one above 0")
    scaled = matrix / target[:, None]
    columns = range(matrix.shape[1])
    best, best_error = np.zeros(len(columns)), np.inf
    # With a handful of constants the sets that are above 0 can all be tried.
    for size in columns:
        for chosen in map(list, combinations(columns, size + 1)):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(target)), rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
            if (found >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(len(columns)), error
                best[chosen] = found
    return best


def leave_one_out(parts: ArrayLike, seconds: ArrayLike) -> np.ndarray:
    """Predictions [rows], each with the constants of all the other rows."""
    matrix, target = np.asarray(parts, np.float64), np.asarray(seconds, np.float64)
    rows = np.arange(len(target))
    return np.array([matrix[i] @ fit(matrix[rows != i], target[rows != i]) for i in rows])


def median_error(predicted: ArrayLike, seconds: ArrayLike) -> float:
    """The median of the relative errors, without their signs."""
    return float(np.median(np.abs(np.asarray(predicted) / np.asarray(seconds) - 1)))
