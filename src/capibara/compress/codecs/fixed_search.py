"""Find the scale of each group with the least squared error, using integers only.

A scale could fit a group's largest value; a slightly smaller one is often better, since clipping a few values costs
less than the finer steps of all others gain. All scales of a short list are tried. Floating-point sums depend on
their order, and a machine may fuse products and sums; so that every executor finds the same codes, a group's values
are converted to integers of fifteen bits (by a power of two, which rounds once), scales are integers of the same
unit, and errors, squares and their sums stay below 2³¹.

A scale is ``top · 2^(-k / resolution)`` for an integer k of seven bits, and has a sign: for asymmetric levels it puts
the longer side where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from capibara.compress.codecs.engine import on_accelerator, wanted_engine
from capibara.compress.codecs.executors import has_native
from capibara.compress.errors import CompressError
from capibara.errors import MissingExtraError, did_you_mean
from capibara.native import levels
from capibara.native.loading import open_library

__all__ = [
    "EXECUTORS",
    "KINDS",
    "NF4",
    "RESOLUTIONS",
    "SCALES",
    "Executor",
    "Kind",
    "default_executor",
    "error_limits",
    "get_executor",
    "multipliers",
    "nearest_levels",
    "search",
]

SCALES = 127  # the largest k
RESOLUTIONS = (32, 16, 8, 4, 2, 1)
_UNIT = 15  # bits of a group's largest number
_RATIO = 18  # bits of a reciprocal

# In 1/1024.
NF4 = np.rint(np.array(levels.NF4) * 1024).astype(np.int32)


@dataclass(frozen=True)
class Kind:
    """The meaning of a codec's codes.

    Attributes:
      name: of the codec.
      bits: of a code.
      largest: the level of a group's largest value without clipping.
      fraction: fraction bits of integer scales below the values' unit.
      span: log2 of the smallest and the largest scale to try, relative to the one without clipping.
      signed: scales of both signs are tried.
    """

    name: str
    bits: int
    largest: float
    fraction: int
    span: tuple[float, float]
    signed: bool

    def steps(self, resolution: int) -> tuple[int, int]:
        """The first and the last step to try, relative to the k without clipping."""
        low, high = (round(x * resolution) for x in self.span)
        return -high, -low


KINDS = {
    "int8": Kind("int8", 8, 127.5, 11, (-0.16, 0.0), False),
    "int4": Kind("int4", 4, 8.0, 7, (-0.45, 0.26), True),
    "nf4": Kind("nf4", 4, 1024.0, 14, (-0.4, 0.13), True),
}


def multipliers(resolution: int, count: int = SCALES + 1) -> np.ndarray:
    """``2^(-k / resolution)`` for k from 0 to ``count - 1``, as float32, the same everywhere."""
    k = np.arange(count)
    whole, part = -(k // resolution), k % resolution
    # Square roots are exactly rounded everywhere, powers are not: 2^(-1/32) is five of them.
    root = np.float64(0.5)
    for _ in range(resolution.bit_length() - 1):
        root = np.sqrt(root)
    steps = np.cumprod(np.concatenate([[1.0], np.full(resolution - 1, root)]))
    return np.ldexp(steps[part], whole).astype(np.float32)


def nearest_levels(book: np.ndarray) -> np.ndarray:
    """The code of the level nearest to each of 4096 positions, half a level unit apart, from -1024 on: uint8."""
    position = np.arange(-2048, 2048) * 2 + 1  # middles, in quarters of a unit
    edges = 2 * (book[1:].astype(np.int64) + book[:-1])
    return np.searchsorted(edges, position).astype(np.uint8)


class Executor(Protocol):
    """The engine that tries the scales.

    An executor with ``whole_search`` performs all of :func:`search`.
    """

    @property
    def name(self) -> str: ...

    def search(
        self, kind: Kind, book: np.ndarray | None, units: np.ndarray, scales: np.ndarray, ratios: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best candidate of each group, int32 [groups], and its codes, int8 [groups, size].

        Args:
          kind: the meaning of the codes.
          book: levels of the codes in 1/1024, ascending, int32 [16]; ``None`` for integer levels.
          units: the values, int32 [groups, size] within ±2¹⁵.
          scales: candidates, int32 [groups, count], in ``2 ** -kind.fraction`` of the values' unit.
          ratios: their reciprocals as computed by :func:`search`, int32 [groups, count].
        """
        ...


def error_limits(kind: Kind, size: int) -> tuple[int, int]:
    """Bits of the largest error, and the number of bits to drop, so that sums of squares fit into 31 bits."""
    cap = (31 - (size - 1).bit_length()) // 2  # (2^cap - 1)^2 · size < 2^31
    return cap, max(kind.fraction + (12 if kind.bits == 8 else 13) - cap, 0)


class _Trial:
    """One candidate against the best so far; every value fits 32 bits with a sign.

    The same for NumPy, JAX and PyTorch. ``take(table, index)`` looks up; beyond a table are its ends.
    """

    def __init__(self, xp: Any, take: Callable[[Any, Any], Any], kind: Kind, book: Any, units: Any) -> None:
        self._xp, self._take, self._kind, self._units = xp, take, kind, units
        self._codes, self._levels = book or (None, None)
        self._cap, self._shift = error_limits(kind, units.shape[1])
        self._wide = units << kind.fraction

    def start(self) -> tuple[Any, Any]:
        """Worse than any candidate: its number, its error."""
        none = self._xp.zeros_like(self._units[:, 0])
        return none, none + (2**31 - 1)

    def _nearest(self, table: Any, ratio: Any) -> Any:
        """For a kind with a book what ``table`` has for each number, else whole levels."""
        product = self._units * ratio[:, None]
        if table is not None:
            return self._take(table, (product >> _RATIO) + 2048)
        shift, bits = (22 if self._kind.bits == 8 else 26), self._kind.bits
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        return self._xp.clip((product + (1 << (shift - 1))) >> shift, low, high)

    def step(self, best: tuple[Any, Any], index: Any, scale: Any, ratio: Any) -> tuple[Any, Any]:
        xp = self._xp
        error = xp.abs(self._wide - self._nearest(self._levels, ratio) * scale[:, None])
        if self._shift:
            error = error >> self._shift
        error = xp.clip(error, 0, (1 << self._cap) - 1)
        total = xp.einsum("gn,gn->g", error, error)
        better = total < best[1]
        return xp.where(better, index, best[0]), xp.where(better, total, best[1])

    def codes(self, ratio: Any) -> Any:
        """The codes for each group's chosen candidate."""
        return self._nearest(self._codes, ratio)


def _tables(book: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """For each of 4096 positions the nearest level's code, and the level; int32."""
    if book is None:
        return None
    codes = nearest_levels(book).astype(np.int32)
    return codes, book.astype(np.int32)[codes]


class NumpyExecutor:
    """With NumPy alone."""

    name = "numpy"

    def search(
        self, kind: Kind, book: np.ndarray | None, units: np.ndarray, scales: np.ndarray, ratios: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        trial = _Trial(np, partial(np.take, mode="clip"), kind, _tables(book), units)
        best = trial.start()
        for index in range(scales.shape[1]):
            best = trial.step(best, np.int32(index), scales[:, index], ratios[:, index])
        chosen = np.take_along_axis(ratios, best[0][:, None], 1)[:, 0]
        return best[0], trial.codes(chosen).astype(np.int8)


class TorchExecutor:
    """With PyTorch.

    Raises:
      MissingExtraError: it is not installed.
    """

    name = "torch"

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch", "torch", "The executor 'torch'") from None
        self._torch = torch

    def search(
        self, kind: Kind, book: np.ndarray | None, units: np.ndarray, scales: np.ndarray, ratios: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        torch, tables = self._torch, _tables(book)
        there, scale, ratio = (torch.from_numpy(np.ascontiguousarray(a)) for a in (units, scales, ratios))
        on_it = None if tables is None else tuple(torch.from_numpy(t) for t in tables)

        def take(table: Any, index: Any) -> Any:
            return table[index.clip(0, 4095)]

        trial = _Trial(torch, take, kind, on_it, there)
        best = trial.start()
        for index in range(scales.shape[1]):
            best = trial.step(best, index, scale[:, index], ratio[:, index])
        chosen = ratio.gather(1, best[0][:, None].long())[:, 0]
        return best[0].to(torch.int32).numpy(), trial.codes(chosen).to(torch.int8).numpy()


class JaxExecutor:
    """With JAX, compiled once for each shape.

    Raises:
      MissingExtraError: it is not installed.
    """

    name = "jax"

    def __init__(self) -> None:
        try:
            import jax
        except ImportError:
            raise MissingExtraError("jax", "train", "The executor 'jax'") from None
        self._jax = jax
        self._run = jax.jit(self._compute, static_argnums=0)

    def _compute(self, kind: Kind, tables: Any, units: Any, scales: Any, ratios: Any) -> Any:
        jnp, lax = self._jax.numpy, self._jax.lax
        trial = _Trial(jnp, partial(jnp.take, mode="clip"), kind, tables, units)

        def step(best: Any, candidate: Any) -> Any:
            return trial.step(best, *candidate), None

        each = jnp.arange(scales.shape[1], dtype="int32"), scales.T, ratios.T
        (best, _), _ = lax.scan(step, trial.start(), each)
        chosen = jnp.take_along_axis(ratios, best[:, None], 1)[:, 0]
        return best, trial.codes(chosen).astype("int8")

    def search(
        self, kind: Kind, book: np.ndarray | None, units: np.ndarray, scales: np.ndarray, ratios: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        best, codes = self._run(kind, _tables(book), units, scales, ratios)
        return np.asarray(best), np.asarray(codes)


def _native() -> Executor:
    from capibara.compress.codecs.fixed_native import NativeExecutor

    library, reason = open_library()
    if library is None:
        raise CompressError(f"executor: 'native' cannot run here: {reason}")
    return NativeExecutor(library)


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "native": _native,
    "numpy": NumpyExecutor,
    "torch": TorchExecutor,
    "jax": JaxExecutor,
}


@cache
def get_executor(name: str) -> Executor:
    """The executor of that name (cached).

    Raises:
      CompressError: the name is unknown, or compiled code is not available. MissingExtraError: it needs a package
        that is not installed.
    """
    if name not in EXECUTORS:
        raise CompressError(
            f"executor: got {name!r}, expected one of {', '.join(EXECUTORS)}.{did_you_mean(name, EXECUTORS)}"
        )
    return EXECUTORS[name]()


def default_executor() -> str:
    """The engine set by :func:`capibara.compress.codecs.engine.use_engine`; on the CPU compiled code, or NumPy.

    PyTorch and JAX on the CPU are replaced as well, since the bytes are the same.
    """
    wanted = wanted_engine()
    if wanted in ("torch", "jax") and on_accelerator(wanted):
        return wanted
    return "native" if wanted != "numpy" and has_native() else "numpy"


def search(
    executor: Executor, kind: Kind, book: np.ndarray | None, values: np.ndarray, top: float, resolution: int,
    last: int = SCALES,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The scale's code and the codes of every group.

    Args:
      executor: the engine to use.
      kind: the meaning of the codes.
      book: levels of the codes; ``None`` for integer levels.
      values: float32 or float64 [groups, size], finite.
      top: the scale of k = 0.
      resolution: number of k per factor of 2.
      last: the largest k, that is, the smallest scale.

    Returns:
      uint8 [groups], k with the sign in the topmost bit; int8 [groups, size].
    """
    table = np.float64(np.float32(top)) * multipliers(resolution)
    if (whole := getattr(executor, "whole_search", None)) is not None:
        return whole(kind, book, values, table, resolution, last)
    values = values.astype(np.float64)
    largest = np.abs(values).max(1, initial=0)
    # The k that just cuts nothing off, by comparing: a logarithm is not the same everywhere.
    ascending = (table * kind.largest)[::-1]
    fits = SCALES - np.searchsorted(ascending, largest)
    first_step, last_step = kind.steps(resolution)
    steps = np.arange(first_step, last_step + 1)
    k = np.clip(fits[:, None] + steps, 0, last)
    _, exponent = np.frexp(np.maximum(largest, table[last] * kind.largest))
    units = np.rint(np.ldexp(values, _UNIT - exponent[:, None])).astype(np.int32)
    scaled = np.ldexp(table[k], (_UNIT - exponent)[:, None])
    scales = np.rint(np.ldexp(scaled, kind.fraction)).astype(np.int32)
    shift = 2.0 ** (_RATIO + 11) / 1024 if book is not None else 2.0 ** (22 if kind.bits == 8 else 26)
    ratios = np.rint(shift / scaled).astype(np.int32)
    if kind.signed:
        scales, ratios = np.concatenate([scales, -scales], 1), np.concatenate([ratios, -ratios], 1)
    best, codes = executor.search(kind, book, units, scales, ratios)
    count = len(steps)
    chosen = np.take_along_axis(k, (best % count)[:, None], 1)[:, 0].astype(np.uint8)
    return chosen | ((best >= count).astype(np.uint8) << np.uint8(7)), codes
