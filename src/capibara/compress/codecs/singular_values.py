"""Singular values of matrices, which of them are worth their bits, and the cost of dropping the others.

Decompositions are slow, and an allocator needs the same ones repeatedly: :func:`remember` caches them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from capibara.compress.calibration.blas import one_thread

__all__ = ["decompose", "estimate", "gaussians", "once", "remember", "singular_values", "worth"]

_TALL = 4  # a side that is so many times the other is left out of a decomposition
_remembered: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("capibara_low_rank", default=None)


@contextlib.contextmanager
def remember() -> Iterator[None]:
    """In this context and thread, a matrix that is encoded with several settings is decomposed once."""
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def once(
    what: Callable[[np.ndarray, np.ndarray | None], Any], matrix: np.ndarray, hessian: np.ndarray | None
) -> Any:
    """``what(matrix, hessian)``, or its cached value inside :func:`remember`."""
    if (known := _remembered.get()) is None:
        with one_thread(min(matrix.shape)):
            return what(matrix, hessian)
    some = [matrix] if hessian is None else [matrix, hessian]
    key = (what, *((a.shape, hashlib.blake2b(np.ascontiguousarray(a).data).digest()) for a in some))
    if key not in known:
        with one_thread(min(matrix.shape)):
            known[key] = what(matrix, hessian)
    return known[key]


def _thin(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, σ and V of a matrix; of a long one from its short side, by the Gram matrix.

    What that loses are values below 1e-8 of the largest: U·diag(σ)·V is the matrix all the same.
    """
    if matrix.shape[1] >= _TALL * len(matrix):
        left, singular, right = _thin(matrix.T)
        return right.T, singular, left.T
    if len(matrix) < _TALL * matrix.shape[1]:
        return np.linalg.svd(matrix, full_matrices=False)
    right = np.linalg.eigh(matrix.T @ matrix)[1][:, ::-1].T
    scaled = matrix @ right.T
    singular = np.sqrt((scaled**2).sum(0))
    order = np.argsort(-singular, kind="stable")
    singular = singular[order]
    return scaled[:, order] / np.maximum(singular, 1e-300), singular, right[order]


def decompose(matrix: np.ndarray, hessian: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U [out, k], σ [k] and R [k, features]: U·diag(σ)·R is the matrix; its outputs depend most on the first."""
    if hessian is None:
        return _thin(matrix)
    values, vectors = np.linalg.eigh(hessian)
    root = np.sqrt(np.maximum(values, values[-1] * 1e-12))
    left, singular, right = np.linalg.svd(matrix @ (vectors * root), full_matrices=False)
    return left, singular, (right / root) @ vectors.T


def singular_values(matrix: np.ndarray, hessian: np.ndarray | None) -> np.ndarray:
    """Those of :func:`decompose` alone, from the Gram matrix of the shorter side: good to 1e-8 of the largest."""
    if len(matrix) <= matrix.shape[1]:
        gram = (matrix if hessian is None else matrix @ hessian) @ matrix.T
    else:
        gram = matrix.T @ matrix
        if hessian is not None:
            lower = np.linalg.cholesky(hessian)
            gram = lower.T @ gram @ lower
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))


def worth(singular: np.ndarray, shape: tuple[int, ...], step: float) -> np.ndarray:
    """Which singular values reduce the error by more than their bits would elsewhere.

    A bit elsewhere reduces a squared error of step² / 12 at the rate of ln 4.
    """
    saved, bits = singular**2, np.zeros(len(singular))
    for size in shape:
        rate, error = gaussian(singular / (math.sqrt(size) * step))
        bits, saved = bits + size * rate, saved - size * step**2 * error
    return (saved > math.log(4) / 12 * step**2 * bits) & (singular > 0)


@cache
def gaussians() -> np.ndarray:
    """For Gaussian values with deviations of 2⁻⁴ … 2⁸ steps: log₂ of these, bits, mean squared errors [3, 49].

    Rounded to the nearest multiple, entropy-coded, and decoded as the mean of the values rounded to it.
    """
    rows = []
    for exponent in np.arange(-4, 8.25, 0.25):
        deviation = 2.0**exponent
        edges = (np.arange(-int(8 * deviation) - 2, int(8 * deviation) + 2) + 0.5) / deviation
        below = np.array([0.0, *(0.5 * math.erfc(-x / math.sqrt(2)) for x in edges), 1.0])
        density = np.array([0.0, *(np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)), 0.0])
        share, moment = np.diff(below), -np.diff(density)
        used = share > 1e-15
        bits = -float((share[used] * np.log2(share[used])).sum())
        error = 1 - float((moment[used] ** 2 / share[used]).sum())
        rows.append((exponent, bits, max(error, 0.0) * deviation**2))
    return np.array(rows).T


def gaussian(deviations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits, and mean squared errors in steps², of Gaussian values with these standard deviations in steps."""
    logs, bits, errors = gaussians()
    at = np.log2(np.maximum(deviations, 1e-30))
    rate = np.interp(at, logs, bits) + np.maximum(at - logs[-1], 0)
    small = at < logs[0]
    return np.where(small, 0.0, rate), np.where(small, deviations**2, np.interp(at, logs, errors))


def estimate(singular: np.ndarray, shape: tuple[int, ...], step: float) -> tuple[float, float]:
    """The squared error and the bits of both factors at a step."""
    kept = singular[worth(singular, shape, step)]
    error, bits = float((singular**2).sum() - (kept**2).sum()), 0.0
    for size in shape:
        rate, lost = gaussian(kept / (math.sqrt(size) * step))
        bits += size * float(rate.sum())
        error += size * step**2 * float(lost.sum())
    return error, bits
