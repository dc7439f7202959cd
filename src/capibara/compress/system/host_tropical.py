"""Tropical operations without JAX: on PyTorch if it is installed, otherwise on NumPy.

The same results as :mod:`capibara.ops.tropical`, in memory that does not grow with the number of terms: a product
processes runs of rows, so that their terms stay in a processor's cache. Supports PyTorch's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import is_torch
from capibara.compress.system.tropical_arguments import (
    as_points,
    check_array,
    check_polynomial,
    check_product,
    check_square,
    get_sign,
)

__all__ = ["HostTropicalEngine"]

_TERMS = 1 << 20


class HostTropicalEngine:
    """The component ``tropical_engine`` without JAX.

    Args:
      name: ``"torch"`` or ``"numpy"``: the library that computes NumPy arrays. PyTorch tensors are computed by
        PyTorch, on their device.
    """

    def __init__(self, name: str) -> None:
        if name not in ("torch", "numpy"):
            raise CompressError(f"name: got {name!r}, expected 'torch' or 'numpy'")
        self.name = name

    def matmul(self, a: Any, b: Any, *, semiring: str = "max_plus") -> Any:
        """``out[i, j] = max over k of a[i, k] + b[k, j]``; the semiring's zero wins over the other infinity.

        Args:
          a: [*batch, rows, inner], floating point. Leading axes broadcast with those of ``b``.
          b: [*batch, inner, columns].
          semiring: ``"max_plus"`` or ``"min_plus"``.

        Returns:
          [*batch, rows, columns] in the operands' common type.

        Raises:
          CompressError: shapes that do not match, a dtype that is not floating point, an unknown semiring.
        """
        sign = get_sign(semiring)
        check_product(a, b, check_array)
        if is_torch(a):
            return _torch_product(a, b, sign)
        if self.name == "torch":
            import torch

            dtype = np.promote_types(a.dtype, b.dtype)
            left, right = (torch.from_numpy(np.array(x, dtype)) for x in (a, b))
            return _torch_product(left, right, sign).numpy()
        return _numpy_product(a, b, sign)

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> Any:
        """The best weight of any walk between two nodes, as :func:`capibara.ops.tropical.closure`.

        Args:
          weights: [*batch, n, n].
          semiring: ``"max_plus"`` or ``"min_plus"``.

        Raises:
          CompressError: not square floating-point matrices, or an unknown semiring.
        """
        sign = get_sign(semiring)
        check_square(weights, check_array)
        if weights.shape[-1] == 0:
            return weights
        return _torch_closure(weights, sign) if is_torch(weights) else self._numpy_closure(weights, sign)

    def _numpy_closure(self, weights: np.ndarray, sign: int) -> np.ndarray:
        n = weights.shape[-1]
        wide = weights.astype(np.promote_types(weights.dtype, np.float32))
        best = sign * wide
        best = np.where(np.eye(n, dtype=bool), np.maximum(best, 0), best)
        for _ in range(max(1, (n - 1).bit_length())):
            best = self.matmul(best, best)
        finite = np.abs(np.where(np.isfinite(wide), wide, 0)).max((-2, -1))
        slack = 4 * n * np.finfo(weights.dtype).eps * finite
        gains = np.diagonal(best, axis1=-2, axis2=-1) > slack[..., None]
        there = (best > -np.inf).astype(np.float32)
        endless = (there * gains[..., None, :].astype(np.float32)) @ there > 0
        with np.errstate(over="ignore"):
            return (sign * np.where(endless & ~np.isnan(best), np.inf, best)).astype(weights.dtype)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> Any:
        """``max over i of coefficients[i] + i * x``: [n], [...] → [...]; for finite values.

        Args:
          coefficients: floating point, the constant term first.
          x: the points; a Python scalar has the coefficients' dtype.
          semiring: ``"max_plus"`` or ``"min_plus"``.

        Returns:
          The shape of ``x``, in the common type.

        Raises:
          CompressError: no coefficients, a dtype that is not floating point, an unknown semiring.
        """
        sign = get_sign(semiring)
        check_array("coefficients", coefficients, 1)
        x = as_points(x, coefficients)
        check_polynomial(coefficients, x, check_array)
        if is_torch(coefficients):
            # Both of one type: PyTorch gives way to the type of x where a coefficient is a scalar.
            dtype, wide = _torch_types(coefficients, x)
            return (sign * _horner(sign * coefficients.to(wide), sign * x.to(wide))).to(dtype)
        dtype = np.promote_types(coefficients.dtype, x.dtype)
        wide = np.promote_types(dtype, np.float32)
        with np.errstate(over="ignore"):
            return np.asarray(sign * _horner(sign * coefficients.astype(wide), sign * x.astype(wide)), dtype)

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"engine": self.name}


def _horner(coefficients: Any, x: Any) -> Any:
    """By Horner's rule: a product is a sum here, and a sum the maximum."""
    out = coefficients[-1] + 0 * x
    for i in range(len(coefficients) - 2, -1, -1):
        out = (out + x).clip(min=coefficients[i])
    return out


def _runs(batch: int, rows: int, terms: int) -> Iterator[tuple[slice, slice]]:
    """Runs of products, and of their rows, of which each row has so many terms; a run of several takes all rows."""
    step = max(_TERMS // max(terms, 1), 1)
    many = max(step // max(rows, 1), 1)
    for i in range(0, batch, many):
        for j in range(0, rows, step):
            yield slice(i, i + many), slice(j, j + step)


def _numpy_product(a: np.ndarray, b: np.ndarray, sign: int) -> np.ndarray:
    dtype = np.promote_types(a.dtype, b.dtype)
    wide = np.promote_types(dtype, np.float32)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (rows, inner), columns, count = a.shape[-2:], b.shape[-1], math.prod(batch)
    out = np.full((count, rows, columns), -np.inf, wide)
    if inner and columns:
        lefts = (sign * np.broadcast_to(a, (*batch, rows, inner)).astype(wide)).reshape(count, rows, inner)
        rights = sign * np.broadcast_to(b, (*batch, inner, columns)).astype(wide)
        rights = rights.reshape(count, inner, columns)
        for several, some in _runs(count, rows, inner * columns):
            left, right = lefts[several, some, :, None], rights[several, None]
            with np.errstate(invalid="ignore", over="ignore"):
                terms = left + right
            # -inf is the zero: it wins over +inf, and NaN stays NaN.
            lost = (left == -np.inf) & ~np.isnan(right) | (right == -np.inf) & ~np.isnan(left)
            terms[lost] = -np.inf
            out[several, some] = terms.max(2)
    with np.errstate(over="ignore"):
        return (sign * out.reshape(*batch, rows, columns)).astype(dtype)


def _torch_types(a: Any, b: Any) -> tuple[Any, Any]:
    """The common type, and the one to compute in; PyTorch itself promotes no floats of eight bits."""
    import torch

    dtype = a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)
    return dtype, torch.float64 if dtype == torch.float64 else torch.float32


def _torch_product(a: Any, b: Any, sign: int) -> Any:
    import torch

    dtype, wide = _torch_types(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (rows, inner), columns, count = a.shape[-2:], b.shape[-1], math.prod(batch)
    shape = (*batch, rows, columns)
    if not (count and rows and inner and columns):
        return torch.full(shape, -sign * torch.inf, dtype=dtype, device=a.device)
    lefts = (sign * a.to(wide)).expand(*batch, rows, inner).reshape(count, rows, inner)
    rights = (sign * b.to(wide)).expand(*batch, inner, columns).reshape(count, inner, columns)
    outs = []
    for several, some in _runs(count, rows, inner * columns):
        left, right = lefts[several, some, :, None], rights[several, None]
        lost = (left == -torch.inf) & ~right.isnan() | (right == -torch.inf) & ~left.isnan()
        outs.append((left + right).masked_fill(lost, -torch.inf).amax(2).reshape(-1, columns))
    return (sign * torch.cat(outs).reshape(shape)).to(dtype)


def _torch_closure(weights: Any, sign: int) -> Any:
    import torch

    n = weights.shape[-1]
    # Its numbers in float32 at least; every type of PyTorch's that is smaller fits into that.
    wide = weights.to(_torch_types(weights, weights)[1])
    best = sign * wide
    best = torch.where(torch.eye(n, dtype=torch.bool, device=weights.device), best.clamp(min=0), best)
    for _ in range(max(1, (n - 1).bit_length())):
        best = _torch_product(best, best, 1)
    with torch.no_grad():
        finite = torch.where(wide.isfinite(), wide, 0).abs().amax((-2, -1))
        slack = 4 * n * torch.finfo(weights.dtype).eps * finite
        gains = best.diagonal(dim1=-2, dim2=-1) > slack[..., None]
        there = (best > -torch.inf).float()
        endless = (there * gains[..., None, :].float()) @ there > 0
        endless &= ~best.isnan()
    return (sign * torch.where(endless, torch.inf, best)).to(weights.dtype)
