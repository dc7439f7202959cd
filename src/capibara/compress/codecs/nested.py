"""Payloads made of other codecs' payloads: a matrix as its factors, a sparse one as its bitmap and values.

Such a payload is::

    length of the head u32 · head: UTF-8 JSON · parts, one after another

The head contains what the outer codec needs and, under ``parts``, for each part its ``codec``, ``dtype``, ``shape``,
``settings`` and ``size`` in bytes. Parts are never nested, so that no file can make a reader recurse.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs.in_place import DecodesInPlace, InPlace
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, to_float

__all__ = [
    "Part",
    "check_codec",
    "check_size",
    "join",
    "join_into",
    "may_hold",
    "part_of",
    "room_for_head",
    "split",
]

NESTED = ("low_rank", "sparse", "zeros")  # codecs with parts, which no part may have
_MOST_HEAD = 1 << 16
_LENGTH = struct.Struct("<I")
_FREE, _MOST_EACH = 1 << 24, 1 << 14  # numbers that any payload may become, and for each byte above that


@dataclass(frozen=True)
class Part:
    """An encoded array inside a payload."""

    codec: str
    form: NumberFormat
    shape: tuple[int, ...]
    settings: dict[str, Any]
    payload: bytes | memoryview

    def bits(self) -> np.ndarray:
        """The elements as unsigned integers [count].

        Raises:
          DamagedError: the payload is not what its codec writes.
        """
        from capibara.compress.codecs.protocol import get_codec

        with _settings_of_files():
            return get_codec(self.codec).decode(
                memoryview(self.payload), self.form, self.shape, self.settings
            )

    def bits_into(self, out: np.ndarray) -> None:
        """As :meth:`bits`, into an existing array [count].

        Raises:
          DamagedError: the payload is not what its codec writes.
        """
        from capibara.compress.codecs.protocol import get_codec

        codec, payload = get_codec(self.codec), memoryview(self.payload)
        if not isinstance(codec, DecodesInPlace):
            out[:] = self.bits()
            return
        codec.check_count(len(payload), self.form, out.size)
        with _settings_of_files():
            codec.decode_into(out, payload, self.form, self.shape, self.settings)

    def values(self) -> np.ndarray:
        """The values as float64, in their shape."""
        return to_float(self.bits(), self.form).astype(np.float64).reshape(self.shape)


@contextlib.contextmanager
def _settings_of_files() -> Iterator[None]:
    """Settings of a part come from the file, too: what they make a codec raise is damage."""
    try:
        yield
    except ArchiveError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DamagedError(f"a part cannot be decoded ({error}): the file is damaged") from None


def part_of(
    values: np.ndarray, form: NumberFormat, codec: str, settings: Mapping[str, Any], *, bits: bool = False
) -> Part:
    """Encode an array.

    Args:
      values: rounded to ``form``; with ``bits`` unsigned integers that are used unchanged.
      form: the number format.
      codec: its name.
      settings: of the codec.
    """
    from capibara.compress.codecs.protocol import get_codec, stored_settings

    check_codec(codec)
    coded = values if bits else from_float(values, form)
    payload = get_codec(codec).encode(coded.reshape(-1), form, values.shape, settings)
    return Part(codec, form, tuple(values.shape), stored_settings(settings), payload)


def check_codec(codec: Any) -> None:
    """Check that a part may use the codec.

    Raises:
      CompressError: it may not be used in a part.
    """
    from capibara.compress.codecs.protocol import CODECS

    if not isinstance(codec, str) or codec not in CODECS or codec in NESTED:
        known = ", ".join(c for c in CODECS if c not in NESTED)
        raise CompressError(f"codec of a part: got {codec!r}, expected one of {known}")


def join(head: Mapping[str, Any], parts: Sequence[Part]) -> bytes:
    """The payload."""
    text = _head(head, parts, [len(p.payload) for p in parts])
    return b"".join([_LENGTH.pack(len(text)), text, *(p.payload for p in parts)])


def _head(head: Mapping[str, Any], parts: Sequence[Part], sizes: Sequence[int]) -> bytes:
    described = [
        {
            "codec": p.codec,
            "dtype": p.form.name,
            "shape": p.shape,
            "settings": p.settings,
            "size": size,
        }
        for p, size in zip(parts, sizes, strict=True)
    ]
    for one in described:
        if not one["settings"]:
            del one["settings"]
    text = json.dumps({**head, "parts": described}, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > _MOST_HEAD:
        raise CompressError(f"settings: they take {len(text)} bytes as text, expected at most {_MOST_HEAD}")
    return text


def room_for_head() -> int:
    """The maximum number of bytes before the parts."""
    return _LENGTH.size + _MOST_HEAD


def join_into(
    out: np.ndarray,
    head: Mapping[str, Any],
    arrays: Sequence[tuple[np.ndarray, NumberFormat, str, Mapping[str, Any]]],
) -> int:
    """As :func:`join` of :func:`part_of` each, into an existing buffer, without copying encoded data.

    Args:
      out: uint8, of at least :func:`room_for_head` and the codecs' bounds together.
      head: what the outer codec needs.
      arrays: for each part the elements as unsigned integers, their format, the codec and its settings.

    Returns:
      The number of bytes used.
    """
    from capibara.compress.codecs.protocol import get_codec, stored_settings

    parts, bounds = [], []
    for bits, form, codec, settings in arrays:
        check_codec(codec)
        parts.append(Part(codec, form, tuple(bits.shape), stored_settings(settings), b""))
        bounds.append(get_codec(codec).size_bound(form, bits.size, settings))
    # Parts begin after the longest head that there may be, and move down when their sizes are known.
    first = at = _LENGTH.size + len(_head(head, parts, bounds))
    sizes = []
    for (bits, form, codec, settings), bound in zip(arrays, bounds, strict=True):
        how, flat, room = get_codec(codec), bits.reshape(-1), out[at : at + bound]
        if isinstance(how, InPlace):
            sizes.append(how.encode_into(room, flat, form, bits.shape, settings))
        else:
            payload = how.encode(flat, form, bits.shape, settings)
            room[: len(payload)] = np.frombuffer(payload, np.uint8)
            sizes.append(len(payload))
        at += sizes[-1]
    text = _head(head, parts, sizes)
    begin = _LENGTH.size + len(text)
    end = begin + at - first
    view = out.data  # which moves bytes onto themselves without a copy
    view[begin:end] = view[first:at]
    view[:begin] = _LENGTH.pack(len(text)) + text
    return end


def may_hold(size: int, count: int) -> bool:
    """Whether a payload of ``size`` bytes may hold ``count`` elements: two short factors may represent any number,
    which is limited here."""
    return count <= max(_FREE, size * _MOST_EACH)


def check_size(size: int, count: int, error: type[CompressError] | type[DamagedError] = DamagedError) -> None:
    """Refuse payloads that would expand to too many elements: two short factors may represent any number of them.

    Args:
      size: bytes of the payload.
      count: elements of the tensor.
      error: the exception to raise; writers apply the same limit as readers.
    """
    if not may_hold(size, count):
        raise error(
            f"{size} bytes would stand for {count} numbers, more than is read back. Remedy: codec='lossless'."
            if error is CompressError
            else f"{size} bytes cannot hold {count} numbers: the file is damaged"
        )


def split(payload: memoryview, count: int, most: int) -> tuple[dict[str, Any], list[Part]]:
    """The head, without ``parts``, and the parts.

    Args:
      payload: as :func:`join` wrote it.
      count: the expected number of parts.
      most: maximum number of elements of all parts together.

    Raises:
      DamagedError: the payload is invalid.
    """
    if len(payload) < _LENGTH.size:
        raise DamagedError("a tensor's payload ends too early: the file is damaged")
    (length,) = _LENGTH.unpack(payload[: _LENGTH.size])
    if length > min(_MOST_HEAD, len(payload) - _LENGTH.size):
        raise DamagedError(f"a payload's head has {length} bytes: the file is damaged")
    try:
        head = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
        described = head.pop("parts")
        parts, at = [], _LENGTH.size + length
        for one in described:
            codec, form, settings = one["codec"], get_format(one["dtype"]), one.get("settings", {})
            shape, size = one["shape"], one["size"]
            if not all(type(n) is int and n >= 0 for n in (*shape, size)) or not isinstance(settings, dict):
                raise DamagedError("a part's sizes are invalid: the file is damaged")
            if not isinstance(codec, str) or codec in NESTED or len(shape) > 32:
                raise DamagedError("a part is nested: the file is damaged")
            if size > len(payload) - at:
                raise DamagedError("a part ends after its payload: the file is damaged")
            parts.append(Part(codec, form, tuple(shape), settings, payload[at : at + size]))
            at += size
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"a payload's head cannot be read ({error}): the file is damaged") from None
    if len(parts) != count or at != len(payload) or sum(math.prod(p.shape) for p in parts) > most:
        raise DamagedError("a payload's parts do not fit: the file is damaged")
    return head, parts
