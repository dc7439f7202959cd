"""Linear algebra of NumPy with its derivatives: the part of :mod:`.numpy_space` that factorises and solves."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.compose.backends.tape import record, value_of

__all__ = ["cholesky", "eigvalsh", "solve_triangular", "svd_rows"]


def cholesky(x: Any) -> Any:
    v = value_of(x)
    try:
        out = np.linalg.cholesky(v)
    except np.linalg.LinAlgError:
        return np.full_like(v, np.nan)  # as on JAX: not positive definite

    def back(g: Any) -> Any:
        # Murray (2016), arXiv:1602.07527, eq. 10; symmetrised.
        inner = np.tril(np.swapaxes(out, -1, -2) @ g)
        n = v.shape[-1]
        inner = inner - 0.5 * inner * np.eye(n, dtype=v.dtype)
        half = np.linalg.solve(np.swapaxes(out, -1, -2), inner)
        s = np.swapaxes(np.linalg.solve(np.swapaxes(out, -1, -2), np.swapaxes(half, -1, -2)), -1, -2)
        return 0.5 * (s + np.swapaxes(s, -1, -2))

    return record(out, (x, back))


def eigvalsh(x: Any) -> Any:
    v = value_of(x)
    values, vectors = np.linalg.eigh((v + np.swapaxes(v, -1, -2)) / 2)
    back = lambda g: (vectors * g[..., None, :]) @ np.swapaxes(vectors, -1, -2)  # noqa: E731
    return record(values, (x, back))


def solve_triangular(matrix: Any, right: Any, transposed: bool) -> Any:
    """``lower(matrix)⁻¹ right``, or of its transpose."""
    m, r = np.tril(value_of(matrix)), value_of(right)
    own = np.swapaxes(m, -1, -2) if transposed else m
    column = r.ndim < m.ndim
    out = np.linalg.solve(own, r[..., None])[..., 0] if column else np.linalg.solve(own, r)

    def by_right(g: Any) -> Any:
        back = np.swapaxes(own, -1, -2)
        return np.linalg.solve(back, g[..., None])[..., 0] if column else np.linalg.solve(back, g)

    def by_matrix(g: Any) -> Any:
        s, y = by_right(g), out
        s, y = (s[..., None], y[..., None]) if column else (s, y)
        d = -s @ np.swapaxes(y, -1, -2)
        return np.tril(np.swapaxes(d, -1, -2) if transposed else d)

    return record(out, (matrix, by_matrix), (right, by_right))


def svd_rows(x: Any) -> tuple[Any, Any]:
    _, size, rows = np.linalg.svd(value_of(x), full_matrices=False)
    return size, rows
