"""Tensors of the codec ``lossless``: many payloads in one call of compiled code, so that no thread waits for Python."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from capibara.compress.codecs.lossless import LOSSLESS, row_length
from capibara.compress.codecs.native import PAYLOAD
from capibara.compress.container.index import Entry
from capibara.compress.container.pool import ROOM, WORKERS
from capibara.compress.container.room import Room

__all__ = ["TOGETHER", "decode_exact"]

TOGETHER = 2 * ROOM  # bytes of tensors in a call: at its end threads wait for one another


def decode_exact(
    file: mmap.mmap, entries: Sequence[Entry], room: Room, many: Callable[[np.ndarray, int], bool]
) -> list[np.ndarray | None] | None:
    """The numbers of tensors that have some, or ``None`` for each that could not be decoded.

    Args:
      file: where the payloads lie.
      entries: none is the same as another one (``same_as``).
      room: where the numbers go.
      many: :meth:`capibara.compress.codecs.native.NativeExecutor.decode_many`.

    Returns:
      Nothing at all, if there is no such call on this machine.
    """
    found: list[np.ndarray | None] = []
    payloads: list[tuple[object, ...]] = []
    owners: list[int] = []
    whole = np.frombuffer(file, np.uint8)  # while this is held, nobody can close the file
    base = whole.ctypes.data
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
                (fields, base + chunk.offset, chunk.length, size // length, length, at, chunk.crc32, 0)
            )
            owners.append(index)
            at += size * width
        found.append(out.reshape(entry.shape))
    table = np.array(payloads, PAYLOAD)
    done = many(table, WORKERS)
    del whole
    if not done:
        return None
    for i in np.flatnonzero(table["outcome"]):
        found[owners[i]] = None
    return found
