"""What is fuzzed: a family of calls that share shapes and options, and so their compiled programs, and an oracle of it.

An oracle is NumPy in float64 and knows neither JAX nor the package under test. Where it is differentiable, gradients
are held against differences of it; where a gradient is defined otherwise (straight-through, ties, steps) the family
brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "EPS",
    "Ambiguous",
    "Arg",
    "Family",
    "Over",
    "compare",
    "draw",
    "dtype_of",
    "floats",
    "is_float",
    "pick",
    "slack",
    "widen",
]

Generator = np.random.Generator
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Ambiguous(Exception):
    """An oracle's answer hangs on rounding (a tie, a threshold): the values are drawn again."""


@dataclass(frozen=True)
class Arg:
    """How an argument's values are drawn.

    ``kind``: ``"normal"``, ``"positive"`` (0.1 to 0.9), ``"negative"``, ``"fixed"`` (normal in every mood), a
    ``range`` of integers, or ``"key"``, the numbers of a key of ``jax.random``.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str | range = "normal"


@dataclass(frozen=True)
class Over:
    """What communicates: ``local(*arrays)`` on each device of a mesh of these sizes.

    ``same``: each device gets the same, and the type says so. ``mapped``: also under ``vmap(axis_name=…)``.
    """

    local: Callable[..., Any]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    same: bool = False
    mapped: bool = False


@dataclass(frozen=True)
class Family:
    """Calls that differ in the values alone.

    Attributes:
      label: The call as one would write it.
      call: The operation, as a function of arrays alone; the leaves of its result are what is compared.
      oracle: NumPy, float64: these leaves; integers where the operation gives integers.
      args: What the arrays are.
      fix: Makes drawn arrays fit each other (a triangular factor, a table of pages).
      moods: How values may be: ``normal``, ``zeros``, ``ties`` (small integers), ``large``, ``small``, ``special``
        (infinities and NaN).
      x64: The call is made with 64 bits enabled.
      tolerance: Of values, relative to their magnitude.
      gradient_tolerance: Of gradients; None: ten times that of values. Of second derivatives ten times this.
      magnitude: The oracle of absolute values that bounds the rounding of each element, for linear operations; None:
        the largest element, at least 1.
      differentiable: Places of the arguments with a gradient.
      weights: For each floating-point leaf of the result 0 where no gradient is defined to pass; None: 1.
      gradient: ``(arrays, cotangents) -> gradients`` of the differentiable arguments where differences do not tell;
        ``twice`` is then not for it.
      twice: Whether the gradient of the gradient is held against differences.
      check: Says what is wrong with a result, where several are right; instead of comparing with the oracle.
      dtypes: Of the leaves of the result.
      together: Arguments that fit only those of the same draw: mapped and split together.
      refused: Ways that are documented not to work.
      lay: For each argument the dimensions that a mesh with explicit axes may split; None: all.
      specs: For each argument how it lies over a mesh with explicit axes; None: any way.
      over: The call of each device, for what communicates: the arrays are then all devices' ones, stacked.
    """

    label: str
    call: Callable[..., Any]
    oracle: Callable[..., Sequence[Any]]
    args: tuple[Arg, ...]
    fix: Callable[[list[np.ndarray], Generator], Sequence[np.ndarray]] | None = None
    moods: tuple[str, ...] = ("normal", "normal", "normal", "zeros", "ties")
    x64: bool = False
    tolerance: float = 1e-5
    gradient_tolerance: float | None = None
    magnitude: Callable[..., Sequence[Any]] | None = None
    differentiable: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    gradient: Callable[..., Sequence[Any]] | None = None
    twice: bool = False
    check: Callable[[Sequence[np.ndarray], list[np.ndarray]], str | None] | None = None
    dtypes: tuple[str, ...] | None = None
    together: bool = False
    refused: frozenset[str] = field(default_factory=frozenset)
    lay: tuple[tuple[int, ...], ...] | None = None
    specs: tuple[Any, ...] | None = None
    over: Over | None = None


def pick(rng: Generator, *options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def floats(rng: Generator, *, narrow: bool = True) -> str:
    """A dtype, float32 the most often."""
    options = ["float32"] * 5 + ["float64"] * 2 + (["bfloat16", "float16"] if narrow else [])
    return pick(rng, *options)


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


def slack(family: Family) -> float:
    return 10 * family.tolerance if family.gradient_tolerance is None else family.gradient_tolerance


def is_float(x: Any) -> bool:
    return np.dtype(x.dtype).kind in "fV"


def widen(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if is_float(x) else x


def _values(arg: Arg, mood: str, rng: Generator) -> np.ndarray:
    if isinstance(arg.kind, range):
        return rng.integers(arg.kind.start, arg.kind.stop, size=arg.shape).astype(arg.dtype)
    if arg.kind == "key":
        return rng.integers(2**32, size=arg.shape).astype(np.uint32)
    x = rng.normal(size=arg.shape)
    if arg.kind in ("positive", "negative"):
        x = rng.uniform(0.1, 0.9, size=arg.shape) * (1 if arg.kind == "positive" else -1)
    elif arg.kind != "fixed":
        if mood == "zeros":
            x = np.zeros(arg.shape)
        elif mood == "ties":
            x = rng.integers(-2, 3, size=arg.shape).astype(np.float64)
        elif mood in ("large", "small"):
            x = x * ((20 if arg.dtype == "float16" else 1e3) if mood == "large" else 1e-3)
        elif mood == "special":
            where = rng.random(arg.shape)
            x = np.where(
                where < 0.08, np.inf, np.where(where < 0.16, -np.inf, np.where(where < 0.2, np.nan, x))
            )
    return np.asarray(x).astype(dtype_of(arg.dtype))


def draw(family: Family, rng: Generator) -> tuple[str, list[np.ndarray]]:
    """A mood and the arrays of a call, in the dtypes of the call."""
    mood = pick(rng, *family.moods)
    arrays = [_values(arg, mood, rng) for arg in family.args]
    if family.fix is not None:
        fixed = family.fix(arrays, rng)
        arrays = [np.asarray(x).astype(y.dtype) for x, y in zip(fixed, arrays, strict=True)]
    return mood, arrays


def compare(got: Any, want: Any, tolerance: float, magnitude: Any = None) -> str | None:
    """What is wrong with ``got``; None if nothing is."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if want.dtype.kind in "iub":
        different = got != want
        return (
            f"{int(different.sum())} integers differ: {_first(different, got, want)}"
            if different.any()
            else None
        )
    narrow = got.dtype == np.float16
    got, want = widen(got), widen(want)
    finite = np.isfinite(want)
    odd = ~finite & ~((got == want) | (np.isnan(got) & np.isnan(want))) | (finite & ~np.isfinite(got))
    if odd.any():
        return f"not finite where the other is, or otherwise: {_first(odd, got, want)}"
    if magnitude is None:
        magnitude = max(1.0, float(np.max(np.abs(want), where=finite, initial=0.0)))
    least = 2.0**-23 if narrow else 1e-300  # float16 has few numbers below this
    gap = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    bound = tolerance * np.broadcast_to(np.where(np.isfinite(magnitude), magnitude, 0), want.shape)
    wrong = gap > bound + least
    if wrong.any():
        return (
            f"off by {float(gap.max()):.3g}, tolerance {float(np.max(bound)):.3g}: {_first(wrong, got, want)}"
        )
    return None


def _first(where: np.ndarray, got: np.ndarray, want: np.ndarray) -> str:
    place = tuple(int(i) for i in np.argwhere(where)[0])
    return f"at {list(place)} got {got[place]}, expected {want[place]}"
