"""Rounding that minimises the error of a layer's output instead of its weights'.

A linear layer's squared error over inputs x is tr(D H Dᵀ) with D the error of its weights and H = E[x xᵀ]. Columns
are rounded one after another, and the effect of a column's rounding on the output is compensated, as far as possible,
in the columns that are not rounded yet: with U the upper Cholesky factor of H⁻¹, ``w[:, j+1:] -= error / U[j, j] ·
U[j, j+1:]`` (E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022). The scale of a group is chosen when its first column is reached, from the weights at that point.

The result depends on floating-point sums, so it is computed in one place, with NumPy, for all engines.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from capibara.compress.calibration.blas import one_thread
from capibara.compress.codecs.fixed_search import Kind
from capibara.compress.errors import CompressError

__all__ = ["feed_back", "get_factor", "gptq"]

_PANEL = 32  # columns whose errors reach those beyond them in one product


class _Factors:
    """The factors of hessians that are still there: a tensor is coded again and again while its rate is looked for.

    Args:
      most: bytes that are kept at once, if that is more than one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._lock = threading.RLock()  # collecting garbage may enter it again
        self._kept: OrderedDict[tuple[int, float], tuple[weakref.ref[np.ndarray], bytes, np.ndarray]]
        self._kept = OrderedDict()

    def get(self, hessian: np.ndarray, damping: float) -> np.ndarray:
        """The factor of what the hessian holds now."""
        digest = hashlib.blake2b(np.ascontiguousarray(hessian).data).digest()
        key = id(hessian), damping
        with self._lock:
            if (kept := self._kept.get(key)) is not None and kept[0]() is hessian and kept[1] == digest:
                self._kept.move_to_end(key)
                return kept[2]
        factor = _factor(hessian, damping)
        with self._lock:
            self._drop(key)
            self._kept[key] = weakref.ref(hessian, lambda gone: self._drop(key, gone)), digest, factor
            self._size += factor.nbytes
            while self._size > self._most and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
        return factor

    def _drop(self, key: tuple[int, float], gone: weakref.ref[np.ndarray] | None = None) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and (gone is None or gone is kept[0]):
                del self._kept[key]
                self._size -= kept[2].nbytes


_FACTORS = _Factors(1 << 28)


def get_factor(hessian: np.ndarray, damping: float = 0.01) -> np.ndarray:
    """The upper Cholesky factor U of the inverse of the damped hessian, UᵀU = (H / mean(diag H) + damping · 1)⁻¹.

    Damping is at least 1e-8, and up to 1000 times as much if the hessian is not positive otherwise.

    Args:
      hessian: float64 [features, features], E[x xᵀ].
      damping: share of the mean moment that is added to the diagonal.

    Raises:
      CompressError: ``hessian`` is not positive.
    """
    return _FACTORS.get(hessian, damping)


def _factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """The upper Cholesky factor of the inverse; inputs that never occur count like rare ones."""
    second = hessian / (float(np.mean(np.diag(hessian))) or 1.0)
    with one_thread(len(second)):
        return _damped_factor(second, damping)


def _damped_factor(second: np.ndarray, damping: float) -> np.ndarray:
    for more in (1, 10, 100, 1000):
        damped = second + np.eye(len(second)) * max(damping, 1e-8) * more
        try:
            # The inverse by its own factor: H = L Lᵀ, H⁻¹ = L⁻ᵀ L⁻¹.
            low = np.linalg.inv(np.linalg.cholesky(damped))
            return np.linalg.cholesky(low.T @ low).T
        except np.linalg.LinAlgError:
            continue
    raise CompressError(
        "hessian: got a matrix that is not positive, even when damped. Remedy: E[x xᵀ] of the layer's inputs."
    )


def feed_back(
    weight: np.ndarray,
    factor: np.ndarray,
    rounded: Callable[[int, np.ndarray], np.ndarray],
    *,
    panel: int = _PANEL,
) -> None:
    """Round columns one after another, and compensate for each in the following ones.

    Args:
      weight: float64 [out, features].
      factor: of :func:`get_factor`.
      rounded: function of the index j of a column and the columns from there to the end of its panel, float64 [≤
        panel, out]; returns the decoded column j, float64 [out].
      panel: columns whose errors are propagated to the following ones in one product.
    """
    columns = np.array(weight.T, np.float64, order="C")
    length, rows = columns.shape
    errors = np.empty((min(panel, length), rows))
    with one_thread(length):
        for start in range(0, length, panel):
            end = min(start + panel, length)
            for j in range(start, end):
                error = errors[j - start]
                np.subtract(columns[j], rounded(j, columns[j:end]), out=error)
                error /= factor[j, j]
                columns[j + 1 : end] -= factor[j, j + 1 : end, None] * error
            columns[end:] -= factor[start:end, end:].T @ errors[: end - start]


def gptq(
    weight: np.ndarray,
    hessian: np.ndarray,
    kind: Kind,
    book: np.ndarray | None,
    group: int,
    scale: Callable[[np.ndarray], np.ndarray],
    table: np.ndarray,
    *,
    damping: float = 0.01,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, with error feedback.

    Args:
      weight: float64 [out, features].
      hessian: float64 [features, features], E[x xᵀ]; its scale does not matter.
      kind: what codes mean.
      book: levels of the codes; ``None`` for integer levels.
      group: elements that share a scale.
      scale: function that returns the scales' codes, uint8 [out], for values [out, size].
      table: the scale of each code without its sign, float64 [128].
      damping: share of the mean moment that is added to the diagonal.

    Returns:
      uint8 [out, groups], int8 [out, features].

    Raises:
      CompressError: ``hessian`` is not positive.
    """
    rows, length = weight.shape
    scales = np.empty((rows, -(-length // group)), np.uint8)
    codes = np.empty((rows, length), np.int8)
    signed = np.concatenate([table, -table])
    low, high = -(1 << (kind.bits - 1)), (1 << (kind.bits - 1)) - 1
    edges = None if book is None else (book[1:] + book[:-1]) / 2
    step = np.empty(rows)

    def rounded(j: int, columns: np.ndarray) -> np.ndarray:
        if j % group == 0:
            scales[:, j // group] = scale(np.ascontiguousarray(columns[:group].T))
            step[:] = signed[scales[:, j // group]]
        ratio = columns[0] / step
        if edges is None or book is None:
            level = np.clip(np.rint(ratio), low, high)
            codes[:, j] = level
        else:
            code = np.searchsorted(edges, ratio)
            codes[:, j], level = code, book[code]
        return level * step

    # Panels end where groups do: a group's scale is chosen from numbers that all errors before it have reached.
    feed_back(weight, get_factor(hessian, damping), rounded, panel=group * max(_PANEL // group, 1))
    return scales, codes
