"""Batches as a pure function of (seed, step).

A training run that can be killed at any moment and continue exactly must not depend on a position in its data: the
batch of step *t* has to follow from the seed and *t* alone. A shuffled list of windows would work, but needs memory
in proportion to the text. Instead the shuffle is *computed*: a small Feistel network is a bijection on ``[0, 2^k)``
whatever its round function is, and walking along its cycles until the value is below ``n`` makes it a bijection on
``[0, n)`` (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

So an epoch visits every window once, without a stored order, and each epoch shifts the windows by a different offset,
so that the boundaries between windows change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capibara.train.errors import DataError

__all__ = ["BatchSampler", "permute", "validation_batches"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix 64 bits well: the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _stream_key(seed: int, epoch: np.ndarray | int) -> np.ndarray:
    """One 64-bit key per epoch, shape of ``epoch``."""
    seeds = np.asarray([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    return _mix(_mix(seeds + _GOLDEN) + np.atleast_1d(np.asarray(epoch, np.uint64)) * _GOLDEN)


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """The position of each ``index`` in the pseudo-random permutation of ``[0, size)`` given by ``key``.

    Args:
      index: uint64 ``[n]``, every value below ``size``.
      size: number of elements, at least 1 and below 2^62.
      key: uint64 ``[n]``; equal keys give the same permutation.

    Returns:
      uint64 ``[n]``; for a fixed key a bijection of ``[0, size)``. Memory does not depend on ``size``.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    limit = np.uint64(size)

    def encrypt(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for number in range(1, _ROUNDS + 1):
            scrambled = _mix(right + keys + np.uint64(number) * _GOLDEN) & mask
            left, right = right, left ^ scrambled
        return (left << half) | right

    with np.errstate(over="ignore"):
        result = encrypt(index.astype(np.uint64), key)
        # The network permutes at most 4 * size values, so few rounds of this loop are ever needed.
        while (outside := result >= limit).any():
            result[outside] = encrypt(result[outside], key[outside])
    return result


@dataclass(frozen=True)
class BatchSampler:
    """Draws training batches from one long array of tokens.

    Attributes:
      tokens: uint8 ``[n]``, the training text.
      batch_size: sequences per optimizer step.
      sequence_length: positions per sequence; a sequence has one more token, for the last target.
      seed: determines the order.
    """

    tokens: np.ndarray
    batch_size: int
    sequence_length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens.size < self.sequence_length + 1:
            raise DataError(
                f"the training text has {self.tokens.size} tokens, which is too short for one sequence of "
                f"train.sequence_length={self.sequence_length} (it needs {self.sequence_length + 1}). Give "
                "more text, or a smaller train.sequence_length."
            )

    @property
    def windows_per_epoch(self) -> int:
        """Number of sequences in one pass over the text."""
        return max(1, (self.tokens.size - self.sequence_length) // self.sequence_length)

    def passes(self, step: int) -> float:
        """How often the text was read before a step."""
        return step * self.batch_size / self.windows_per_epoch

    def starts(self, step: int) -> np.ndarray:
        """Return where each sequence of the batch at ``step`` begins: int64 ``[batch_size]``."""
        windows = self.windows_per_epoch
        # Python integers first: step * batch_size must not wrap, however long a run is.
        numbers = [divmod(step * self.batch_size + row, windows) for row in range(self.batch_size)]
        epoch = np.asarray([number[0] for number in numbers], np.uint64)
        inside = np.asarray([number[1] for number in numbers], np.uint64)
        with np.errstate(over="ignore"):
            key = _stream_key(self.seed, epoch)
            window = permute(inside, windows, key)
            slack = self.tokens.size - windows * self.sequence_length
            offset = _mix(key + _GOLDEN) % np.uint64(min(self.sequence_length, slack))
        return (window * np.uint64(self.sequence_length) + offset).astype(np.int64)

    def batch(self, step: int) -> np.ndarray:
        """Return the batch at ``step`` (0-based): int32 ``[batch_size, sequence_length + 1]``."""
        rows = self.starts(step)[:, None] + np.arange(self.sequence_length + 1)
        return self.tokens[rows].astype(np.int32)


def validation_batches(
    tokens: np.ndarray, *, batch_size: int, sequence_length: int, max_batches: int
) -> list[np.ndarray]:
    """Cut the held-out text into fixed batches, the same ones at every evaluation.

    The windows do not overlap. If the text has more than ``max_batches`` batches, evenly spaced windows are used, so
    that the whole text is represented. Each window starts without context, so the loss is slightly higher than on
    long text.

    Returns:
      int32 arrays ``[min(batch_size, windows), sequence_length + 1]``.

    Raises:
      DataError: not even one window fits.
    """
    windows = (tokens.size - 1) // sequence_length
    if windows < 1:
        raise DataError(
            f"the held-out text has {tokens.size} tokens, which is too short for one sequence of "
            f"train.sequence_length={sequence_length} (it needs {sequence_length + 1}). Give more text, "
            "raise data.validation_fraction, or lower train.sequence_length."
        )
    rows = min(batch_size, windows)
    count = max(1, min(max_batches, windows // rows))
    chosen = (np.arange(rows * count) * windows) // (rows * count)
    positions = chosen[:, None] * sequence_length + np.arange(sequence_length + 1)
    return list(tokens[positions].astype(np.int32).reshape(count, rows, sequence_length + 1))
