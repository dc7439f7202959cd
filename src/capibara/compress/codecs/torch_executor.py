"""The lossless codec's steps in PyTorch, on a GPU if available.

PyTorch has no shifts of unsigned integers of 16 and more bits: elements are stored as int64, and for 64 bits a mask
makes right shifts logical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from capibara.compress.codecs.cut import Cut
from capibara.compress.codecs.executors import check_escapes
from capibara.compress.codecs.steps import StepExecutor
from capibara.compress.entropy import LANES, SCALE, SCALE_BITS, Stream, packed_size, planes
from capibara.compress.entropy.rans import LOWEST, check_even, check_present, lay_out
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["TorchExecutor"]


def _right(x: torch.Tensor, places: int) -> torch.Tensor:
    """A logical shift of 64 bits."""
    return x if places == 0 else (x >> places) & ((1 << (64 - places)) - 1)


def _low(x: torch.Tensor, bits: int) -> torch.Tensor:
    return x if bits >= 64 else x & ((1 << bits) - 1)


class TorchExecutor(StepExecutor):
    """With PyTorch.

    Args:
      device: by default PyTorch's GPU, otherwise the CPU.
    """

    name = "torch"

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        x = np.ascontiguousarray(x)
        return torch.from_numpy(x.view(np.int64) if x.itemsize == 8 else x.astype(np.int64)).to(self.device)

    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        x = self._tensor(rows)
        sums = (_low(_right(x, cut.shift), cut.symbol) >> coarse).sum(1)
        # PyTorch has no reduction by "or": halves are or-ed until one is left.
        while x.shape[1] > 1:
            half = (x.shape[1] + 1) // 2
            x = torch.cat([x[:, : x.shape[1] - half] | x[:, half:], x[:, x.shape[1] - half : half]], 1)
        return sums.cpu().numpy(), x[:, 0].cpu().numpy().view(np.uint64)

    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        symbols = _low(_right(self._tensor(rows), cut.shift), cut.symbol)
        where = symbols + (self._tensor(kinds) << cut.symbol)[:, None]
        return torch.bincount(where.ravel(), minlength=count << cut.symbol).cpu().numpy().reshape(count, -1)

    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        x = self._tensor(rows[chosen]).ravel()
        symbols = _low(_right(x, cut.shift), cut.symbol)
        coded = self._tensor(entry)[symbols]
        rest = _right(_low(x, cut.shift), drop)
        if cut.sign:
            rest |= _right(x, rows.itemsize * 8 - 1) << (cut.shift - drop)
        escaped = symbols[coded == escape].cpu().numpy().astype(np.uint16)
        return coded.cpu().numpy().astype(np.uint8), self._pack(rest, cut.width(drop)), escaped

    def _pack(self, values: torch.Tensor, width: int) -> bytes:
        parts = []
        for size, shift in planes(width):
            plane = _low(_right(values, shift), size)
            if size >= 8:
                parts.append(plane.cpu().numpy().astype(f"<u{size // 8}").tobytes())
                continue
            each = 8 // size
            plane = torch.nn.functional.pad(plane, (0, -len(plane) % each)).reshape(-1, each)
            shifts = torch.arange(0, 8, size, device=self.device)
            parts.append((plane << shifts).sum(1).cpu().numpy().astype(np.uint8).tobytes())
        return b"".join(parts)

    def _unpack(self, data: np.ndarray, count: int, width: int) -> torch.Tensor:
        if len(data) != packed_size(count, width):
            raise DamagedError("packed bits of another length than expected: the file is damaged")
        out, at = torch.zeros(count, dtype=torch.int64, device=self.device), 0
        for size, shift in planes(width):
            length = (count * size + 7) // 8
            part = np.ascontiguousarray(data[at : at + length])
            at += length
            if size >= 8:
                plane = self._tensor(part.view(f"<u{size // 8}"))
            else:
                shifts = torch.arange(0, 8, size, device=self.device)
                plane = _low(self._tensor(part)[:, None] >> shifts, size).reshape(-1)[:count]
            out |= plane << shift
        return out

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
        code = self._tensor(symbols)
        odd = code == len(values)
        check_escapes(int(odd.sum()), escaped)
        found = self._tensor(np.append(values, 0))[code]
        found[odd] = self._tensor(escaped)
        low, left = self._unpack(rest, len(symbols), cut.width(drop)), cut.shift - drop
        out = (_low(low, left) << drop) | (found << cut.shift)
        if cut.sign:
            out |= _right(low, left) << (form.bits - 1)
        # What is past the width of a number is cut off with the next line, as in arithmetic of that width.
        numbers = out.cpu().numpy().view(np.uint64).astype(form.unsigned)
        return cut.restore(numbers).reshape(shape)

    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        indices, sizes = lay_out(symbols, tables, frequencies.shape[1])
        grid, counts = self._tensor(indices), self._tensor(sizes)
        flat = np.asarray(frequencies, np.int64)
        frequency, start = self._tensor(flat.ravel()), self._tensor((np.cumsum(flat, axis=1) - flat).ravel())
        x = torch.full((len(symbols), LANES), LOWEST, dtype=torch.int64, device=self.device)
        full = torch.zeros(grid.shape, dtype=torch.bool, device=self.device)
        low = torch.zeros(grid.shape, dtype=torch.int64, device=self.device)
        lane, good = torch.arange(LANES, device=self.device), torch.tensor(True, device=self.device)
        for step in range(len(grid) - 1, -1, -1):
            live = step * LANES + lane < counts[:, None]
            f = frequency[grid[step]]
            good &= ~(live & (f == 0)).any()
            f = f.clamp(min=1)
            full[step] = live & (x >= f << (32 - SCALE_BITS))
            low[step] = x & 0xFFFF
            y = torch.where(full[step], x >> 16, x)
            whole = y // f
            x = torch.where(live, (whole << SCALE_BITS) + (y - whole * f) + start[grid[step]], x)
        check_present(bool(good))
        states, emitted, words = x.cpu().numpy(), full.cpu().numpy(), low.cpu().numpy().astype(np.uint16)
        return [Stream(states[b].astype(np.uint32), words[:, b][emitted[:, b]]) for b in range(len(symbols))]

    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        lengths = np.array([len(s.words) for s in streams])
        padded = np.zeros((len(streams), int(lengths.max(initial=0)) + 1), np.uint16)
        for row, stream in zip(padded, streams, strict=True):
            row[: len(stream.words)] = stream.words
        flat = np.asarray(frequencies, np.int64)
        entry = np.repeat(np.tile(np.arange(flat.shape[1]), len(flat)), flat.ravel())
        of = np.arange(len(flat)).repeat(SCALE)
        inside = np.tile(np.arange(SCALE), len(flat)) - (np.cumsum(flat, axis=1) - flat)[of, entry]
        symbol, frequency, within = (self._tensor(t) for t in (entry, flat[of, entry], inside))
        words, sizes = self._tensor(padded), self._tensor(np.array(counts))
        base = self._tensor(np.array(tables) << SCALE_BITS)[:, None]
        x = self._tensor(np.stack([s.states for s in streams]))
        at = torch.zeros(len(streams), dtype=torch.int64, device=self.device)
        lane, steps = torch.arange(LANES, device=self.device), -(-max(counts) // LANES)
        grid = torch.empty((steps, len(streams), LANES), dtype=torch.uint8, device=self.device)
        for step in range(steps):
            live = step * LANES + lane < sizes[:, None]
            place = base + (x & (SCALE - 1))
            grid[step] = symbol[place]
            y = frequency[place] * (x >> SCALE_BITS) + within[place]
            empty = live & (y < LOWEST)
            order = empty.cumsum(1)
            index = (at[:, None] + order - 1).clamp(0, padded.shape[1] - 1)
            y = torch.where(empty, (y << 16) | words.gather(1, index), y)
            x = torch.where(live, y, x)
            at += order[:, -1]
        check_even(x.cpu().numpy(), at.cpu().numpy(), lengths)
        symbols = grid.cpu().numpy()
        return [symbols[:, b].reshape(-1)[:count].copy() for b, count in enumerate(counts)]
