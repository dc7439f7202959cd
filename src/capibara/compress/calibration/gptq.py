"""Rounding by what a layer puts out, not by its weights alone.

A linear layer's squared error over inputs x is tr(D H Dᵀ) with D the error of its weights and H = E[x xᵀ]. Columns are
rounded one after another, and what a column's rounding does to the output is made up for, as well as it can be, in
the columns that are not rounded yet: with U the upper Cholesky factor of H⁻¹, ``w[:, j+1:] -= error / U[j, j] · U[j,
j+1:]`` (E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022).
The scale of a group is chosen when its first column's turn comes, from the weights as they are by then.

Float sums decide here, so this is computed in one place, with NumPy; whoever executes a codec gets its codes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from capibara.compress.codecs.fixed_search import Kind
from capibara.compress.errors import CompressError

__all__ = ["gptq"]

_PANEL = 128  # columns whose errors reach those beyond them in one product


def _factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """The upper Cholesky factor of the inverse; inputs that never occur count like rare ones."""
    mean = float(np.mean(np.diag(hessian))) or 1.0
    for more in (1, 10, 100, 1000):
        damped = hessian + np.eye(len(hessian)) * mean * max(damping, 1e-8) * more
        try:
            # The inverse by its own factor: H = L Lᵀ, H⁻¹ = L⁻ᵀ L⁻¹.
            low = np.linalg.inv(np.linalg.cholesky(damped))
            return np.linalg.cholesky(low.T @ low).T
        except np.linalg.LinAlgError:
            continue
    raise CompressError(
        "hessian: got a matrix that is not positive, even when damped. Remedy: E[x xᵀ] of the layer's inputs."
    )


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
    """Codes and scales with the error fed back.

    Args:
      weight: float64 [out, features].
      hessian: float64 [features, features], E[x xᵀ]; its scale does not matter.
      kind: what codes mean.
      book: levels of the codes; ``None`` for whole levels.
      group: numbers that share a scale.
      scale: the scales' codes, uint8 [out], for numbers [out, size].
      table: what a scale's code without its sign stands for, float64 [128].
      damping: share of the mean moment that is added to the diagonal.

    Returns:
      uint8 [out, groups], int8 [out, features].

    Raises:
      CompressError: ``hessian`` is not positive.
    """
    factor = _factor(hessian, damping)
    work = np.array(weight, np.float64)
    rows, length = work.shape
    scales = np.empty((rows, -(-length // group)), np.uint8)
    codes = np.empty((rows, length), np.int8)
    signed = np.concatenate([table, -table])
    low, high = -(1 << (kind.bits - 1)), (1 << (kind.bits - 1)) - 1
    edges = None if book is None else (book[1:] + book[:-1]) / 2
    # Panels end where groups do: a group's scale is chosen from numbers that all errors before it have reached.
    panel = group * max(_PANEL // group, 1)
    step = np.empty(rows)
    for start in range(0, length, panel):
        end = min(start + panel, length)
        errors = np.empty((rows, end - start))
        for j in range(start, end):
            if j % group == 0:
                stop = min(j + group, end)
                scales[:, j // group] = scale(work[:, j:stop])
                step = signed[scales[:, j // group]]
            ratio = work[:, j] / step
            if edges is None or book is None:
                level = np.clip(np.rint(ratio), low, high)
                codes[:, j] = level
            else:
                code = np.searchsorted(edges, ratio)
                codes[:, j], level = code, book[code]
            errors[:, j - start] = (work[:, j] - level * step) / factor[j, j]
            work[:, j + 1 : end] -= np.outer(errors[:, j - start], factor[j, j + 1 : end])
        work[:, end:] -= errors @ factor[start:end, end:]
    return scales, codes
