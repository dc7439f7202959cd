"""Decode many ``lossless`` payloads in one call of compiled code, so that no thread waits for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from capibara.compress.codecs.lossless import LOSSLESS, row_length
from capibara.compress.codecs.native import PAYLOAD
from capibara.compress.container.file_bytes import FileBytes
from capibara.compress.container.index import Entry
from capibara.compress.container.pool import ROOM, WORKERS, Buffers
from capibara.compress.container.room import Room

__all__ = ["TOGETHER", "decode_exact"]

TOGETHER = 2 * ROOM  # bytes of tensors in a call: at its end threads wait for one another
_BUFFERS = Buffers(TOGETHER)


def decode_exact(
    file: FileBytes, entries: Sequence[Entry], room: Room, many: Callable[[np.ndarray, int], bool]
) -> list[np.ndarray | None] | None:
    """The elements of nonempty tensors, or ``None`` for each that could not be decoded.

    Args:
      file: where the payloads are.
      entries: without second names (``same_as``).
      room: memory for the results.
      many: :meth:`capibara.compress.codecs.native.NativeExecutor.decode_many`.

    Returns:
      Nothing, if this machine does not support the call.
    """
    found: list[np.ndarray | None] = []
    payloads: list[tuple[object, ...]] = []
    owners: list[int] = []
    memory, where = _load(file, entries)
    base = memory.ctypes.data
    for index, entry in enumerate(entries):
        form, kind, width = entry.format, entry.format.unsigned, entry.format.bits // 8
        fields = (form.bits, form.exponent, form.mantissa, form.signed)
        count, each = entry.count, math.prod(entry.coded_shape[1:])
        if not all(LOSSLESS.may_hold(c.length, form, c.rows * each) for c in entry.chunks):
            found.append(None)
            continue
        out = room.take(count, kind)
        at = out.__array_interface__["data"][0]
        for chunk in entry.chunks:
            length = row_length(entry.chunk_shape(chunk))
            size = chunk.rows * each
            payloads.append(
                (fields, base + where[chunk.offset], chunk.length, size // length, length, at, chunk.crc32, 0)
            )
            owners.append(index)
            at += size * width
        found.append(out.reshape(entry.shape))
    table = np.array(payloads, PAYLOAD)
    done = many(table, WORKERS)
    _BUFFERS.give(memory)
    if not done:
        return None
    for i in np.flatnonzero(table["outcome"]):
        found[owners[i]] = None
    return found


def _load(file: FileBytes, entries: Sequence[Entry]) -> tuple[np.ndarray, dict[int, int]]:
    """The payloads of tensors in memory, and for the place of each in the file the one in there."""
    places = sorted({(chunk.offset, chunk.length) for entry in entries for chunk in entry.chunks})
    memory = _BUFFERS.take(max(sum(length for _, length in places), 1))
    where: dict[int, int] = {}
    begin = at = 0  # of a run in the file that is read at once: where it begins there, and here
    here = end = 0
    for offset, length in places:
        if offset != end:
            file.read_into(memory[at:here], begin)
            begin, at = offset, here
        where[offset] = here
        here, end = here + length, offset + length
    file.read_into(memory[at:here], begin)
    return memory, where
