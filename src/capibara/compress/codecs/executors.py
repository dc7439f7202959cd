"""Engines for the arithmetic of the lossless codec. All of them write the same bytes.

``native`` is compiled code that processes a tensor in one call (:mod:`capibara.compress.codecs.native`); ``numpy``,
``jax`` and ``torch`` run the codec's steps (:mod:`capibara.compress.codecs.steps`), the latter two on any device of
their package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from capibara.compress.codecs.cut import Cut
from capibara.compress.codecs.engine import wanted_engine
from capibara.compress.codecs.steps import StepExecutor
from capibara.compress.entropy import Stream, pack_bits, rans, unpack_bits
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat
from capibara.errors import MissingExtraError, did_you_mean
from capibara.native.loading import open_library

__all__ = ["Executor", "NumpyExecutor", "best_executor", "get_executor", "has_native"]


class Executor(Protocol):
    """Encodes the elements of a tensor, given as ``rows`` [count, length] of unsigned integers in C order."""

    name: str

    def encode_tensor(
        self, rows: np.ndarray, form: NumberFormat, limit: int, threads: int = 1
    ) -> bytes | None:
        """The encoded part of a payload; ``None`` if it takes ``limit`` bytes or more."""
        ...

    def encode_into(
        self, out: np.ndarray, rows: np.ndarray, form: NumberFormat, threads: int = 1
    ) -> int | None:
        """The same into ``out``, uint8 with ``limit`` bytes; returns the number of bytes used, or ``None``."""
        ...

    def decode_tensor(self, data: np.ndarray, form: NumberFormat, out: np.ndarray, threads: int = 1) -> None:
        """The reverse, into ``out`` [rows, length].

        Raises:
          DamagedError: ``data`` is not what :meth:`encode_tensor` gives.
        """
        ...


class NumpyExecutor(StepExecutor):
    """NumPy only: if nothing was compiled, and as the reference for the others."""

    name = "numpy"

    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        sums = (cut.symbols(rows) >> rows.dtype.type(coarse)).sum(1, dtype=np.int64)
        return sums, np.bitwise_or.reduce(rows, axis=1).astype(np.uint64)

    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        size = 1 << cut.symbol
        where = cut.symbols(rows).astype(np.int64) + (kinds.astype(np.int64) * size)[:, None]
        return np.bincount(where.ravel(), minlength=count * size).reshape(count, size)

    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        numbers = rows[chosen].ravel()
        symbols = cut.symbols(numbers)
        coded = entry[symbols]
        return (
            coded,
            pack_bits(cut.rest(numbers, drop), cut.width(drop)),
            symbols[coded == escape].astype(np.uint16),
        )

    def join(
        self,
        shape: tuple[int, int],
        cut: Cut,
        drop: int,
        values: np.ndarray,
        symbols: np.ndarray,
        rest: np.ndarray,
        escaped: np.ndarray,
        form: NumberFormat,
    ) -> np.ndarray:
        found = np.append(values, 0).astype(form.unsigned)[symbols]
        odd = np.flatnonzero(symbols == len(values))
        check_escapes(len(odd), escaped)
        found[odd] = escaped
        low = unpack_bits(rest, len(symbols), cut.width(drop), form.unsigned)
        return cut.restore(cut.join(found, low, drop)).reshape(shape)

    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        return rans.encode(symbols, frequencies, tables)

    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        return rans.decode(streams, counts, frequencies, tables)


def check_escapes(found: int, escaped: np.ndarray) -> None:
    """Check that the number of escape symbols matches the escaped values."""
    if found != len(escaped):
        raise DamagedError(
            "a block has a different number of escapes than its header states: the file is damaged"
        )


def _native() -> Executor:
    from capibara.compress.codecs.native import NativeExecutor

    library, reason = open_library()
    if library is None:
        raise CompressError(f"executor: 'native' cannot run here: {reason}")
    return NativeExecutor(library)


def _jax() -> Executor:
    if find_spec("jax") is None:
        raise MissingExtraError("jax", "train", "executor='jax'")
    from capibara.compress.codecs.jax_executor import JaxExecutor

    return JaxExecutor()


def _torch() -> Executor:
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "torch", "executor='torch'")
    from capibara.compress.codecs.torch_executor import TorchExecutor

    return TorchExecutor()


_EXECUTORS: dict[str, Callable[[], Executor]] = {
    "native": _native,
    "numpy": NumpyExecutor,
    "jax": _jax,
    "torch": _torch,
}


@cache
def get_executor(name: str) -> Executor:
    """The executor of that name: ``"native"``, ``"numpy"``, ``"jax"`` or ``"torch"``.

    Raises:
      CompressError: the name is unknown, or compiled code is not available.
      MissingExtraError: its package is not installed.
    """
    if (make := _EXECUTORS.get(name)) is None:
        raise CompressError(
            f"executor: got {name!r}, expected one of {', '.join(_EXECUTORS)}.{did_you_mean(str(name), _EXECUTORS)}"
        )
    return make()


def best_executor() -> Executor:
    """The one set by :func:`capibara.compress.codecs.engine.use_engine`; else compiled code, else NumPy."""
    wanted = wanted_engine()
    if wanted == "auto" or (wanted == "native" and not has_native()):
        wanted = "native" if has_native() else "numpy"
    return get_executor(wanted)


@cache
def has_native() -> bool:
    """Whether compiled code is available."""
    return open_library()[0] is not None
