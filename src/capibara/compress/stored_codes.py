"""The codes and scales of an archive's tensors, for products with them: NumPy only."""

from __future__ import annotations

import math

import numpy as np

from capibara.compress.codecs.fixed import HEAD_BYTES, Fixed, Layout, Parts
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.reader import Archive
from capibara.compress.formats import NumberFormat, to_float

__all__ = ["exact_changes", "stored_layouts", "stored_parts"]


def stored_layouts(archive: Archive, name: str) -> list[Layout] | str:
    """The form of a tensor's codes, for each run of indices of its first axis; or the reason why there are none.

    Only what payloads begin with is read: their checksums are not verified.

    Raises:
      KeyError: there is no tensor of that name.
      DamagedError: a payload does not begin as its codec writes it.
    """
    entry = archive[archive[name].same_as or name]
    codec = get_codec(entry.codec)
    if not isinstance(codec, Fixed) or len(entry.shape) < 2 or 0 in entry.shape or entry.coded_as is not None:
        return f"stored as {entry.codec} with the shape {entry.shape}"
    found = [
        codec.layout(memoryview(head), entry.format, shape)
        for shape, head in archive.beginnings(entry.name, HEAD_BYTES)
    ]
    if len({p.turned for p in found}) != 1 or len({p.length for p in found if not p.turned}) > 1:
        return f"stored in chunks of different rows, with the shape {entry.shape}"
    turned, length = found[0].turned, found[0].length
    if len(entry.shape) == 2 and not turned and length != entry.shape[1]:
        return f"rows of the shape {entry.shape} are too short to have groups of their own"
    if len(entry.shape) > 2:
        if turned or math.prod(entry.shape[1:]) % length:
            return f"groups of numbers lie across the first axis of {entry.shape}"
        if any(p.exact for p in found):
            return "some numbers are kept exactly, in a tensor of more than two axes"
    return found


def stored_parts(archive: Archive, name: str) -> list[Parts] | str:
    """The codes of a tensor, one entry per run of indices of its first axis; or the reason why there are none.

    Raises:
      KeyError: there is no tensor of that name.
      DamagedError: a payload has the wrong checksum, or is not what its codec writes.
    """
    layouts = stored_layouts(archive, name)
    if isinstance(layouts, str):
        return layouts
    entry = archive[archive[name].same_as or name]
    codec = get_codec(entry.codec)
    assert isinstance(codec, Fixed)
    return [
        codec.parts(payload, entry.format, shape, entry.settings)
        for shape, payload in archive.payloads(entry.name)
    ]


def exact_changes(parts: Parts, form: NumberFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of the values that are kept exactly, and their differences from the decoded ones."""
    row, column = np.divmod(parts.positions, max(parts.length, 1))
    if parts.levels is None:
        level = parts.codes[row, column].astype(np.float32)
    else:
        level = parts.levels[(parts.codes[row, column // 2] >> (4 * (column % 2)).astype(np.uint8)) & 15]
    stands = level * parts.scales[row, column // parts.group]
    return row, column, to_float(parts.exact, form).astype(np.float32) - stands.astype(np.float32)
