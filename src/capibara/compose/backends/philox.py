"""Random numbers from keys, for NumPy and PyTorch: a counter-based generator (Philox; Salmon et al., 2011).

A key is two 64-bit words in a NumPy array. Equal keys give equal numbers on both backends and every machine, and
keys made from one key by :func:`split` or :func:`fold` give independent ones. The numbers are not those of JAX.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from capibara.compose.errors import InputError

__all__ = ["as_key", "check_key", "fold", "integers", "normal", "split", "uniform"]


def check_key(key: Any, name: str = "key") -> np.ndarray:
    """``key`` itself, if it is one.

    Raises:
        InputError: it is something else.
    """
    if isinstance(key, np.ndarray) and key.dtype == np.uint64 and key.shape == (2,):
        return key
    raise InputError(
        f"{name} is {type(key).__name__}, expected a key of this backend: {name}=backend.get_random_key()"
    )


def as_key(seed: Any, name: str = "seed") -> np.ndarray:
    """The key of a seed from 0 to 2³² − 1; a key is returned as it is.

    Raises:
        InputError: it is neither.
    """
    if isinstance(seed, np.ndarray) and seed.dtype == np.uint64:
        return check_key(seed, name)
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = None
    if number is None or not 0 <= number < 2**32:
        raise InputError(
            f"{name}={seed!r} must be an integer from 0 to {2**32 - 1} (2**32 - 1), or a key of this backend "
            "such as backend.get_random_key()"
        )
    return np.array([number, 0], np.uint64)


def _generator(key: np.ndarray, stream: int = 0) -> np.random.Generator:
    # The counter's highest word tells draws (0), folds (1) and splits (2) of one key apart.
    return np.random.Generator(np.random.Philox(counter=[0, 0, 0, stream], key=check_key(key)))


def fold(key: np.ndarray | None, index: int) -> np.ndarray | None:
    """A key from a key and a number; None of None."""
    if key is None:
        return None
    words = np.random.Philox(counter=[index, 0, 0, 1], key=check_key(key)).random_raw(2)
    return np.asarray(words, np.uint64)


def split(key: np.ndarray, count: int) -> list[np.ndarray]:
    """``count`` keys from one."""
    words = np.random.Philox(counter=[0, 0, 0, 2], key=check_key(key)).random_raw(2 * count)
    return list(np.asarray(words, np.uint64).reshape(count, 2))


def normal(key: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(_generator(key).standard_normal(shape)).astype(dtype)


def uniform(key: np.ndarray, shape: tuple[int, ...], low: float, high: float, dtype: str) -> np.ndarray:
    # In float32 at most 24 bits, so that rounding cannot reach 1.
    kind = np.float32 if dtype in ("float32", "float16") else np.float64
    drawn = np.asarray(_generator(key).random(shape, kind))
    if dtype == "float16":
        drawn = np.floor(drawn * 2048) / 2048
    return (low + (high - low) * drawn).astype(dtype)


def integers(
    key: np.ndarray, shape: tuple[int, ...], low: int, high: int, dtype: str = "int32"
) -> np.ndarray:
    return np.asarray(_generator(key).integers(low, high, shape, np.int64)).astype(dtype)
