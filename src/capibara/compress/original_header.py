"""The header of a safetensors file in the archive's metadata, if it cannot be reconstructed from the archive.

Other writers order, space and escape the JSON differently, and support dtypes that this version does not. Such a
header is stored as text, compressed by zlib, in base64. It is untrusted: it is used only if it describes exactly the
tensors of the archive.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping

from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat
from capibara.compress.safetensors_file import HEADER_KEY, MOST_HEADER, parse_header

__all__ = ["check_header", "with_header", "without_header"]


def with_header(metadata: Mapping[str, str], text: bytes | None) -> dict[str, str]:
    """The metadata of an archive of a file with this header; ``None``: it can be reconstructed."""
    kept = dict(metadata)
    if text is not None:
        kept[HEADER_KEY] = base64.b64encode(zlib.compress(text, 9)).decode()
    return kept


def without_header(metadata: Mapping[str, str], path: object) -> tuple[dict[str, str], bytes | None]:
    """The metadata of an archive's original file, and its header if that was stored.

    Raises:
      DamagedError: the stored text is not a header.
    """
    rest = {k: v for k, v in metadata.items() if k != HEADER_KEY}
    if (kept := metadata.get(HEADER_KEY)) is None:
        return rest, None
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(base64.b64decode(kept, validate=True), MOST_HEADER + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise DamagedError(f"{path}: the original header cannot be read ({error})") from None
    if len(text) > MOST_HEADER or not stream.eof:
        raise DamagedError(f"{path}: the original header is truncated, or larger than {MOST_HEADER:,} bytes")
    return rest, text


def check_header(
    text: bytes, tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]], path: object
) -> None:
    """Check that a header describes exactly these tensors.

    Raises:
      ArchiveError, DamagedError: it does not.
    """
    size = sum(math.prod(shape) * form.bits // 8 for form, shape in tensors.values())
    found = parse_header(text, size, path)[1]
    if {n: (one.form, one.shape) for n, one in found.items()} != dict(tensors):
        raise DamagedError(f"{path}: the original header describes other tensors than the archive has")
