"""Fit the next layer to fewer neurons: least squares over all directions, or over data.

Without data, the error of a merged layer is averaged over ``z = (x, 1)`` with uniformly distributed directions,
standard normal in each coordinate. By homogeneity this is the mean squared difference of support functions over the
sphere: the L2 counterpart of the Hausdorff distance of the zonotopes. The products ``E[relu(a · z) relu(b · z)]`` are
known in closed form, the arc-cosine kernel of Y. Cho and L. Saul, "Kernel methods for deep learning" (NIPS 2009), and
the best columns for given rows solve a linear system. The kernel's gradient is used to refine the rows.

With data the next layer's inputs before its activation are matched by least squares. In both cases a small penalty
pulls towards the columns of the merge, so that neurons that the data cannot distinguish, and exact merges, stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["fit_data", "fit_sphere", "refine_data", "refine_sphere", "sphere_error"]

_PENALTY = 1e-8


def _angles(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    long, wide = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    scale = np.where(long > 0, long, 1)[:, None] * np.where(wide > 0, wide, 1)
    cosines = np.clip(a @ b.T / scale, -1, 1)
    return long, wide, np.arccos(cosines), np.sqrt(1 - cosines**2)


def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``E[relu(a_i · z) relu(b_j · z)]`` [p, q] over standard normal z, of rows [p, d] and [q, d]."""
    long, wide, angles, sines = _angles(a, b)
    return np.outer(long, wide) * (sines + (np.pi - angles) * np.cos(angles)) / (2 * np.pi)


def _kernel_gradient(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The gradient [p, d] of ``sum(weights * kernel(a, b))`` in a."""
    long, wide, angles, sines = _angles(a, b)
    along = weights * sines * wide / np.where(long > 0, long, 1)[:, None]
    return ((weights * (np.pi - angles)) @ b + along.sum(1, keepdims=True) * a) / (2 * np.pi)


def sphere_error(
    rows: np.ndarray, columns: np.ndarray, new_rows: np.ndarray, new_columns: np.ndarray
) -> float:
    """The relative root mean square error over all directions of a layer pair [n, d], [n, m] by [k, d], [k, m]."""
    whole = float(np.sum(kernel(rows, rows) * (columns @ columns.T)))
    cross = float(np.sum(kernel(rows, new_rows) * (columns @ new_columns.T)))
    now = float(np.sum(kernel(new_rows, new_rows) * (new_columns @ new_columns.T)))
    return float(np.sqrt(max(0.0, whole - 2 * cross + now) / whole)) if whole > 0 else 0.0


def _towards(gram: np.ndarray, right: np.ndarray, free: int = 0) -> np.ndarray:
    """The solution of ``(gram + penalty) x = right``; the last ``free`` unknowns are not penalised."""
    size = len(gram)
    level = _PENALTY * max(float(np.trace(gram)) / max(size, 1), 1e-300)
    damped = gram.copy()
    damped[np.diag_indices(size - free)] += level
    return np.linalg.solve(damped, right)


def fit_sphere(rows: np.ndarray, columns: np.ndarray, new_rows: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The columns [k, m] of the least error over all directions for merged rows [k, d]."""
    gram = kernel(new_rows, new_rows)
    return start + _towards(gram, kernel(new_rows, rows) @ columns - gram @ start)


class _Adam:
    """Steps that fall to nothing along a cosine, on rows of length 1."""

    def __init__(self, shape: tuple[int, ...], steps: int, rate: float) -> None:
        self.mean, self.square = np.zeros(shape), np.zeros(shape)
        self.step, self.steps, self.rate = 0, steps, rate

    def move(self, rows: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.step += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.01 * (gradient**2 - self.square)
        ahead = self.mean / (1 - 0.9**self.step)
        size = np.sqrt(self.square / (1 - 0.99**self.step)) + 1e-30
        rate = self.rate * 0.5 * (1 + np.cos(np.pi * self.step / (self.steps + 1)))
        rows = rows - rate * ahead / size
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1)


def refine_sphere(
    rows: np.ndarray, columns: np.ndarray, new_rows: np.ndarray, start: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns after ``steps`` that reduce the error over all directions; the best ones found."""
    best = new_rows, fit_sphere(rows, columns, new_rows, start)
    least = sphere_error(rows, columns, *best)
    adam = _Adam(new_rows.shape, steps, 0.02)
    at, fit = best
    for _ in range(steps):
        gradient = _kernel_gradient(at, at, fit @ fit.T) - _kernel_gradient(at, rows, fit @ columns.T)
        at = adam.move(at, gradient)
        fit = fit_sphere(rows, columns, at, fit)
        if (error := sphere_error(rows, columns, at, fit)) < least:
            best, least = (at, fit), error
    return best


def fit_data(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], start: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The columns and the shift with the least squared error on data.

    Args:
      batches: pairs of the next layer's inputs, float [q, k], and targets, float [q, m].
      start: columns [k, m] of the merge.
      shift: the next layer's bias [m].

    Returns:
      Columns [k, m] and shift [m].
    """
    width = len(start) + 1
    gram, right = np.zeros((width, width)), np.zeros((width, start.shape[1]))
    for read, wanted in batches:
        ones = np.concatenate([read, np.ones((len(read), 1))], axis=1)
        gram += ones.T @ ones
        right += ones.T @ (wanted - read @ start - shift)
    change = _towards(gram, right, free=1)
    return start + change[:-1], shift + change[-1]


def refine_data(
    inputs: np.ndarray,
    wanted: np.ndarray,
    new_rows: np.ndarray,
    start: np.ndarray,
    shift: np.ndarray,
    steps: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and shift after ``steps`` that reduce the squared error on data; the best ones found.

    Args:
      inputs: the merged layer's inputs, float [q, d], with a column of ones if the rows include a bias.
      wanted: the targets of the next layer, float [q, m].
      new_rows: [k, d].
      start: columns [k, m].
      shift: [m].
      steps: each takes a few passes over the data.
    """
    adam = _Adam(new_rows.shape, steps, 0.01)
    best, least = (new_rows, start, shift), np.inf
    at = new_rows
    for step in range(steps + 1):
        hidden = inputs @ at.T
        active = np.maximum(hidden, 0)
        start, shift = fit_data([(active, wanted)], start, shift)
        miss = active @ start + shift - wanted
        if (error := float(np.sum(miss**2))) < least:
            best, least = (at, start, shift), error
        if step < steps:
            at = adam.move(at, (miss @ start.T * (hidden > 0)).T @ inputs / len(inputs))
    return best
