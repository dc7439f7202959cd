"""Asymmetric numeral systems: encode symbols in nearly the minimum number of bits for their frequencies.

The state of a coder is one integer x. Encoding a symbol of frequency f (of 4096) changes x to about x · 4096 / f, so
x grows by log₂(4096 / f) bits; decoding reverses this, last symbol first (J. Duda, arXiv 1311.2540). x is kept in
[2¹⁶, 2³²) by moving 16 bits to or from the stream, at most once per symbol (the "range" variant of F. Giesen, arXiv
1402.3392).

A block of symbols is distributed over 32 lanes, symbol i to lane i mod 32, each with its own state, all sharing one
stream of 16-bit words: in a step each lane processes one symbol, and the lanes that need a word take theirs in lane
order. So a step is the same arithmetic on 32 integers, which suits vector units, XLA, PyTorch and NumPy; many blocks
are processed in parallel. All engines write the same bytes.

A block's final state must be the encoder's initial one, and its stream must be used up; otherwise it is damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.compress.entropy.frequencies import SCALE, SCALE_BITS
from capibara.compress.errors import DamagedError

__all__ = ["BLOCK", "LANES", "Stream", "check_even", "check_present", "decode", "encode", "lay_out"]

LANES = 32
BLOCK = 1 << 18  # symbols; 128 bytes of states for each
LOWEST = 1 << 16  # a state is never below; encoding begins with it


class Stream(NamedTuple):
    """One encoded block.

    Attributes:
      states: uint32 [32], of the lanes when decoding begins.
      words: uint16 [words], in the order in which decoding takes them.
    """

    states: np.ndarray
    words: np.ndarray


def _starts(frequencies: np.ndarray) -> np.ndarray:
    """Where each symbol's part of the 4096 begins, a row a table."""
    return np.cumsum(frequencies, axis=1) - frequencies


def _tables(frequencies: np.ndarray) -> np.ndarray:
    tables = np.asarray(frequencies, np.int64)
    if tables.ndim != 2 or tables.shape[1] > 256 or (tables < 0).any() or (tables.sum(1) != SCALE).any():
        raise ValueError(f"frequencies: expected rows of at most 256 integers that add up to {SCALE}")
    return tables


def encode(symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]) -> list[Stream]:
    """Encode blocks of symbols.

    Args:
      symbols: uint8 [at most 2¹⁸], one array per block; every symbol has a frequency above 0.
      frequencies: [tables, symbols], each row adds up to 4096.
      tables: the row of ``frequencies`` for each block.
    """
    table = _tables(frequencies)
    width = table.shape[1]
    flat, start = table.ravel().astype(np.uint32), _starts(table).ravel().astype(np.uint32)
    out: list[Stream | None] = [None] * len(symbols)
    for chosen in _alike([len(s) for s in symbols]):
        count = len(symbols[chosen[0]])
        steps = -(-count // LANES)
        grid = np.zeros((len(chosen), steps * LANES), np.uint32)
        for row, i in enumerate(chosen):
            grid[row, :count] = symbols[i]
        grid += np.array([tables[i] * width for i in chosen], np.uint32)[:, None]
        grid = grid.reshape(len(chosen), steps, LANES)
        state = np.full((len(chosen), LANES), LOWEST, np.uint32)
        emitted = np.zeros(grid.shape, bool)
        low = np.zeros(grid.shape, np.uint16)
        for step in range(steps - 1, -1, -1):
            live = min(LANES, count - step * LANES)
            x, entry = state[:, :live], grid[:, step, :live]
            f = flat[entry]
            check_present(bool(f.all()))
            # In 64 bits: for a symbol that is certain, f << 20 is 2³².
            full = x >= f.astype(np.uint64) << np.uint64(32 - SCALE_BITS)
            emitted[:, step, :live] = full
            low[:, step, :live] = x
            x = np.where(full, x >> np.uint32(16), x)
            whole, part = np.divmod(x, f)
            state[:, :live] = (whole << np.uint32(SCALE_BITS)) + part + start[entry]
        for row, i in enumerate(chosen):
            out[i] = Stream(state[row].copy(), low[row][emitted[row]])
    return [stream for stream in out if stream is not None]


def decode(
    streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
) -> list[np.ndarray]:
    """Decode blocks to symbols, uint8 [count] each.

    Raises:
      DamagedError: the streams do not match ``counts`` symbols with these frequencies.
    """
    table = _tables(frequencies)
    start = _starts(table)
    # For each of the 4096 places of a table: the symbol, its frequency, and the place within its part.
    symbol = np.repeat(np.tile(np.arange(table.shape[1]), len(table)), table.ravel()).astype(np.uint8)
    rows = np.arange(len(table)).repeat(SCALE)
    frequency = table[rows, symbol].astype(np.uint32)
    within = (np.tile(np.arange(SCALE), len(table)) - start[rows, symbol]).astype(np.uint32)
    out: list[np.ndarray | None] = [None] * len(streams)
    for chosen in _alike(counts):
        count = counts[chosen[0]]
        steps = -(-count // LANES)
        lengths = np.array([len(streams[i].words) for i in chosen])
        words = np.concatenate([*(streams[i].words for i in chosen), np.zeros(LANES, np.uint16)])
        begin = np.cumsum(lengths) - lengths
        at, end = begin.copy(), begin + lengths
        state = np.stack([streams[i].states for i in chosen]).astype(np.uint32)
        base = np.array([tables[i] * SCALE for i in chosen], np.uint32)[:, None]
        grid = np.empty((steps, len(chosen), LANES), np.uint8)
        for step in range(steps):
            live = min(LANES, count - step * LANES)
            x = state[:, :live]
            place = base + (x & np.uint32(SCALE - 1))
            grid[step, :, :live] = symbol[place]
            x = frequency[place] * (x >> np.uint32(SCALE_BITS)) + within[place]
            empty = x < LOWEST
            order = np.cumsum(empty, axis=1)
            # A damaged stream may ask for more words than there are: the ends below tell.
            index = np.minimum(at[:, None] + order - 1, len(words) - 1)
            state[:, :live] = np.where(empty, (x << np.uint32(16)) | words[index], x)
            at += order[:, -1]
        check_even(state, at, end)
        for row, i in enumerate(chosen):
            out[i] = grid[:, row].reshape(-1)[:count].copy()
    return [block for block in out if block is not None]


def _alike(counts: Sequence[int]) -> list[list[int]]:
    """Blocks of one length together (nearly all are full), in groups that bound the memory."""
    groups: dict[int, list[int]] = {}
    for i, count in enumerate(counts):
        groups.setdefault(int(count), []).append(i)
    most = 64
    return [found[j : j + most] for found in groups.values() for j in range(0, len(found), most)]


def check_present(good: bool) -> None:
    """Check that all symbols that occur have a frequency."""
    if not good:
        raise ValueError("symbols: one occurs whose frequency is 0")


def check_even(states: np.ndarray, used: np.ndarray, lengths: np.ndarray) -> None:
    """Check that, after decoding, all words are used up and the lanes are in the encoder's initial state."""
    if (used != lengths).any() or (states != LOWEST).any():
        raise DamagedError("a block of coded symbols does not end where it should: the file is damaged")


def lay_out(
    symbols: Sequence[np.ndarray], tables: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Arrange blocks in parallel, for executors that process one step of all blocks at a time.

    Returns:
      int32 [steps, blocks, 32] of indices into the flattened tables, each of ``width``, and the blocks' lengths.
    """
    counts = np.array([len(s) for s in symbols])
    steps = -(-int(counts.max(initial=0)) // LANES)
    grid = np.zeros((len(symbols), steps * LANES), np.int32)
    for row, block, table in zip(grid, symbols, tables, strict=True):
        row[: len(block)] = block
        row += table * width
    return np.ascontiguousarray(grid.reshape(len(symbols), steps, LANES).swapaxes(0, 1)), counts
