"""Tropical operations without JAX: on PyTorch where that is installed, on NumPy where it is not.

The same results as :mod:`capibara.ops.tropical`, in memory that does not grow with the number of terms: a product takes
runs of rows, so that their terms stay in a processor's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import is_torch
from capibara.errors import did_you_mean

__all__ = ["HostTropicalEngine"]

_TERMS = 1 << 20
_SEMIRINGS = ("max_plus", "min_plus")


class HostTropicalEngine:
    """The component ``tropical_engine`` where JAX is not.

    Args:
      name: ``"torch"`` or ``"numpy"``: what arrays of NumPy are computed with. PyTorch's tensors are computed with
        PyTorch, on their device, and come back as such.
    """

    def __init__(self, name: str) -> None:
        if name not in ("torch", "numpy"):
            raise CompressError(f"name: got {name!r}, expected 'torch' or 'numpy'")
        self.name = name

    def matmul(self, a: Any, b: Any, *, semiring: str = "max_plus") -> Any:
        """``out[i, j] = max over k of a[i, k] + b[k, j]``; the semiring's zero wins over the other infinity.

        Args:
          a: [rows, inner], floating point.
          b: [inner, columns].
          semiring: ``"max_plus"`` or ``"min_plus"``.

        Raises:
          CompressError: shapes that do not fit, numbers that are not floating point, another semiring.
        """
        sign = _sign(semiring)
        _check("a", a, 2)
        _check("b", b, 2)
        if a.shape[1] != b.shape[0]:
            raise CompressError(
                f"b: got shape {tuple(b.shape)}, expected [{a.shape[1]}, …] for a of {tuple(a.shape)}"
            )
        if is_torch(a) != is_torch(b):
            raise CompressError(
                "b: got another framework's array than a. Remedy: both from PyTorch, or both from NumPy."
            )
        if is_torch(a):
            return sign * _torch_product(sign * a, sign * b)
        if self.name == "torch":
            import torch

            dtype = np.promote_types(a.dtype, b.dtype)
            left, right = (torch.from_numpy(np.array(sign * x, dtype)) for x in (a, b))
            return sign * _torch_product(left, right).numpy()
        return sign * _numpy_product(sign * a, sign * b)

    def closure(self, weights: Any, *, semiring: str = "max_plus") -> Any:
        """The best weight of any walk between two nodes, [n, n] → [n, n]; as :func:`capibara.ops.tropical.closure`.

        Raises:
          CompressError: not a square of floating point numbers, or another semiring.
        """
        sign = _sign(semiring)
        _check("weights", weights, 2)
        n = weights.shape[0]
        if weights.shape[1] != n:
            raise CompressError(f"weights: got shape {tuple(weights.shape)}, expected a square")
        if is_torch(weights):
            import torch

            # Its numbers in float32 at least; every type of PyTorch's that is smaller fits into that.
            wide = weights.detach() if weights.dtype == torch.float64 else weights.detach().float()
            eps = torch.finfo(weights.dtype).eps
            out = torch.from_numpy(self._closure(wide.cpu().numpy(), sign, eps))
            return out.to(weights.dtype).to(weights.device)
        wide = weights if weights.dtype == np.float64 else weights.astype(np.float32)
        return self._closure(wide, sign, float(np.finfo(weights.dtype).eps)).astype(weights.dtype)

    def _closure(self, weights: np.ndarray, sign: int, eps: float) -> np.ndarray:
        n = len(weights)
        if n == 0:
            return weights
        best = sign * weights
        np.fill_diagonal(best, np.maximum(np.diagonal(best), 0))
        for _ in range(max(1, (n - 1).bit_length())):
            best = self.matmul(best, best)
        finite = np.abs(weights[np.isfinite(weights)]).max(initial=0)
        gains = np.diagonal(best) > 4 * n * eps * finite
        there = (best > -np.inf).astype(np.float32)
        endless = (there * gains.astype(np.float32)) @ there > 0
        return sign * np.where(endless & ~np.isnan(best), np.inf, best).astype(weights.dtype)

    def polyval(self, coefficients: Any, x: Any, *, semiring: str = "max_plus") -> Any:
        """``max over i of coefficients[i] + i * x``: [n], [...] → [...]; for finite numbers.

        Raises:
          CompressError: no coefficients, numbers that are not floating point, another semiring.
        """
        sign = _sign(semiring)
        _check("coefficients", coefficients, 1)
        _check("x", x, None)
        if len(coefficients) == 0:
            raise CompressError("coefficients: got none, expected at least one")
        # By Horner's rule: a product is a sum here, and a sum the maximum.
        out: Any = sign * coefficients[-1] + 0 * x
        for i in range(len(coefficients) - 2, -1, -1):
            out = (out + sign * x).clip(min=sign * coefficients[i])
        return sign * out

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {"engine": self.name}


def _sign(semiring: str) -> int:
    if semiring not in _SEMIRINGS:
        raise CompressError(
            f"semiring: got {semiring!r}, expected 'max_plus' or 'min_plus'.{did_you_mean(str(semiring), _SEMIRINGS)}"
        )
    return 1 if semiring == "max_plus" else -1


def _check(name: str, array: Any, axes: int | None) -> None:
    if is_torch(array):
        good = array.is_floating_point()
    else:
        good = isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)
    if not good or axes not in (None, array.ndim):
        shape = "" if axes is None else f" with {axes} axes"
        got = f"{getattr(array, 'dtype', type(array).__name__)} {tuple(getattr(array, 'shape', ()))}"
        raise CompressError(f"{name}: got {got}, expected floating point numbers of NumPy or PyTorch{shape}")


def _numpy_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dtype = np.promote_types(a.dtype, b.dtype)
    wide = np.promote_types(dtype, np.float32)
    out = np.full((len(a), b.shape[1]), -np.inf, wide)
    step = max(_TERMS // max(b.size, 1), 1)
    if b.size:
        right = b.astype(wide)
        zero = right == -np.inf
        for i in range(0, len(a), step):
            left = a[i : i + step, :, None].astype(wide)
            with np.errstate(invalid="ignore"):
                terms = left + right
            # -inf is the zero: it wins over +inf, and NaN stays NaN.
            lost = (left == -np.inf) & ~np.isnan(right) | zero & ~np.isnan(left)
            terms[lost] = -np.inf
            out[i : i + step] = terms.max(1)
    return out.astype(dtype)


def _torch_product(a: Any, b: Any) -> Any:
    import torch

    dtype = torch.promote_types(a.dtype, b.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    right = b.to(wide)
    step = max(_TERMS // max(b.numel(), 1), 1)
    if not b.numel() or not len(a):
        return torch.full((len(a), b.shape[1]), -torch.inf, dtype=dtype, device=a.device)
    zero, outs = right == -torch.inf, []
    for i in range(0, len(a), step):
        left = a[i : i + step, :, None].to(wide)
        lost = (left == -torch.inf) & ~right.isnan() | zero & ~left.isnan()
        outs.append((left + right).masked_fill(lost, -torch.inf).amax(1))
    return torch.cat(outs).to(dtype)
