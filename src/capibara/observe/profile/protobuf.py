"""The fields of serialized protobuf messages, for the little that is read of them without their schema."""

from __future__ import annotations

from collections.abc import Iterator

from capibara.observe.errors import ProfileError

__all__ = ["protobuf_fields"]


def protobuf_fields(data: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: an integer, or the bytes of what has another type.

    Raises:
      ProfileError: the bytes are no message.
    """
    data = memoryview(data)
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ProfileError(f"a message has a field of kind {kind}, which protobuf does not have")
        if length > len(data) - at:
            raise ProfileError("a message ends within a field")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ProfileError("a message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
