"""The codes and scales of an archive's tensors, for products with them: NumPy only."""

from __future__ import annotations

import math

import numpy as np

from capibara.compress.codecs.fixed import HEAD_BYTES, Fixed, Layout, Parts
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.index import Entry
from capibara.compress.container.reader import Archive
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat, to_float

__all__ = ["exact_changes", "stored_layouts", "stored_parts"]


def stored_layouts(archive: Archive, name: str) -> list[Layout] | str:
    """The form of a tensor's codes, for each run of indices of its first axis; or the reason why there are none.

    Only what payloads begin with is read: their checksums are not verified.

    Raises:
      KeyError: there is no tensor of that name.
      DamagedError: a payload does not begin as its codec writes it.
    """
    entry, codec = _coded(archive, name)
    if codec is None:
        return _stored_otherwise(entry)
    heads = archive.beginnings(entry.name, HEAD_BYTES)
    try:
        found = [codec.layout(memoryview(head), entry.format, shape) for shape, head in heads]
    except DamagedError as error:
        raise DamagedError(f"{archive.path}: {entry.name}: {error}") from None
    return _why_not(entry, found) or found


def stored_parts(archive: Archive, name: str) -> list[Parts] | str:
    """The codes of a tensor, one entry per run of indices of its first axis; or the reason why there are none.

    Raises:
      KeyError: there is no tensor of that name.
      DamagedError: a payload has the wrong checksum, or is not what its codec writes.
    """
    entry, codec = _coded(archive, name)
    if codec is None:
        return _stored_otherwise(entry)
    payloads = list(archive.payloads(entry.name))  # checksums come before all that is in them
    layouts = [codec.layout(payload, entry.format, shape) for shape, payload in payloads]
    return _why_not(entry, layouts) or [
        codec.parts(payload, entry.format, shape, entry.settings) for shape, payload in payloads
    ]


def _coded(archive: Archive, name: str) -> tuple[Entry, Fixed | None]:
    entry = archive[archive[name].same_as or name]
    codec = get_codec(entry.codec)
    whole = len(entry.shape) >= 2 and 0 not in entry.shape and entry.coded_as is None
    return entry, codec if isinstance(codec, Fixed) and whole else None


def _stored_otherwise(entry: Entry) -> str:
    return f"stored as {entry.codec} with the shape {entry.shape}"


def _why_not(entry: Entry, found: list[Layout]) -> str | None:
    """Why codes of these forms cannot be multiplied by; ``None``: they can."""
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
    return None


def exact_changes(parts: Parts, form: NumberFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of the values that are kept exactly, and their differences from the decoded ones."""
    row, column = np.divmod(parts.positions, max(parts.length, 1))
    if parts.levels is None:
        level = parts.codes[row, column].astype(np.float32)
    else:
        level = parts.levels[(parts.codes[row, column // 2] >> (4 * (column % 2)).astype(np.uint8)) & 15]
    stands = level * parts.scales[row, column // parts.group]
    return row, column, to_float(parts.exact, form).astype(np.float32) - stands.astype(np.float32)
