"""What a tropical operation takes, checked in the same words by the engine on JAX and by the one on the host."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import is_torch
from capibara.errors import did_you_mean

__all__ = [
    "Check",
    "as_points",
    "check_array",
    "check_polynomial",
    "check_product",
    "check_square",
    "get_sign",
    "refuse_unless",
]

_SEMIRINGS = ("max_plus", "min_plus")


class Check(Protocol):
    """Raises unless ``array`` is one that the engine takes, with that many axes, or more of them in front."""

    def __call__(self, name: str, array: Any, axes: int, *, more: bool = False) -> None: ...


def get_sign(semiring: str) -> int:
    """1 for ``"max_plus"``, -1 for ``"min_plus"``, which is that of the negatives.

    Raises:
      CompressError: another one.
    """
    if semiring not in _SEMIRINGS:
        raise CompressError(
            f"semiring: got {semiring!r:.200}, expected 'max_plus' or 'min_plus'."
            f"{did_you_mean(str(semiring), _SEMIRINGS)}"
        )
    return 1 if semiring == "max_plus" else -1


def check_array(name: str, array: Any, axes: int, *, more: bool = False) -> None:
    """Whether PyTorch's or NumPy's engine takes it.

    Raises:
      CompressError: no array of theirs, not floating point, or with other axes.
    """
    if is_torch(array):
        good = array.is_floating_point()
    else:  # a long double has no place in PyTorch or JAX
        good = isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.dtype.itemsize <= 8
    refuse_unless(good, name, array, axes, more, "NumPy or PyTorch")


def refuse_unless(good: bool, name: str, array: Any, axes: int, more: bool, whose: str) -> None:
    """Raise for an array that is not of the right kind, or has other axes.

    Args:
      good: whether its kind and its numbers are right.
      name: what the error calls it.
      array: it.
      axes: that it has to have.
      more: whether there may be others before them.
      whose: whose arrays are expected.

    Raises:
      CompressError: as said.
    """
    if good and (array.ndim >= axes if more else array.ndim == axes):
        return
    got, remedy = type(array).__name__, f" Remedy: numpy.asarray({name}, 'float32')."
    if hasattr(array, "dtype"):
        got = f"{array.dtype} {tuple(getattr(array, 'shape', ()))}"
        remedy = f" Remedy: {name}.float()." if is_torch(array) else f" Remedy: {name}.astype('float32')."
    number = f"{'at least ' if more else ''}{axes} {'axis' if axes == 1 else 'axes'}"
    raise CompressError(
        f"{name}: got {got}, expected floating point numbers of {whose} with {number}.{'' if good else remedy}"
    )


def check_product(a: Any, b: Any, check: Check) -> None:
    """Whether ``b`` can be multiplied by ``a`` from the left.

    Raises:
      CompressError: one of them is not an array, or they do not fit.
    """
    check("a", a, 2, more=True)
    check("b", b, 2, more=True)
    _check_alike("a", a, "b", b)
    if a.shape[-1] != b.shape[-2]:
        raise CompressError(
            f"b: got shape {tuple(b.shape)}, expected [{a.shape[-1]}, …] in its last two axes for a of {tuple(a.shape)}"
        )
    try:
        np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    except ValueError:
        raise CompressError(
            f"b: got shape {tuple(b.shape)}, whose leading axes do not broadcast with those of a, {tuple(a.shape)}"
        ) from None


def check_square(weights: Any, check: Check) -> None:
    """Whether it holds squares.

    Raises:
      CompressError: it does not.
    """
    check("weights", weights, 2, more=True)
    if weights.shape[-1] != weights.shape[-2]:
        raise CompressError(f"weights: got shape {tuple(weights.shape)}, expected a square, [..., n, n]")


def check_polynomial(coefficients: Any, x: Any, check: Check) -> None:
    """Whether the polynomial of these coefficients has values at ``x``.

    Raises:
      CompressError: one of them is not an array, or there is no coefficient.
    """
    check("coefficients", coefficients, 1)
    check("x", x, 0, more=True)
    _check_alike("coefficients", coefficients, "x", x)
    if len(coefficients) == 0:
        raise CompressError("coefficients: got none, expected at least one")


def as_points(x: Any, like: Any) -> Any:
    """A single number as an array; one of Python's has the type of ``like``, which has numbers of floating point."""
    if isinstance(x, float | int) and not isinstance(x, bool | np.generic):
        if is_torch(like):
            return like.new_tensor(x)
        return np.asarray(x, like.dtype)
    return np.asarray(x) if isinstance(x, np.generic) else x


def _check_alike(first: str, a: Any, second: str, b: Any) -> None:
    if is_torch(a) != is_torch(b):
        raise CompressError(
            f"{second}: got another framework's array than {first}. Remedy: both from PyTorch, or both from NumPy."
        )
    if is_torch(a) and a.dtype != b.dtype and 1 in (a.element_size(), b.element_size()):
        raise CompressError(
            f"{second}: got {b.dtype} with {first} of {a.dtype}, but floats of eight bits have no type in common with "
            "others. Remedy: float() of both."
        )
