"""Sizes in words: a few hundred bytes and a few hundred gigabytes stand in the same tables."""

from __future__ import annotations

__all__ = ["size_text", "unit_of"]

# From so many bytes on; GiB, in which memories are sold, already from a tenth.
_UNITS = (
    (1000 * 2**30, 2**40, "TiB"),
    (2**30 // 10, 2**30, "GiB"),
    (2**20 // 10, 2**20, "MiB"),
    (2**10, 2**10, "KiB"),
)


def unit_of(size: float) -> tuple[int, str]:
    """Bytes and name of the unit for a size: ``(1048576, "MiB")`` for 5,000,000."""
    for least, scale, name in _UNITS:
        if abs(size) >= least:
            return scale, name
    return 1, "bytes"


def size_text(size: float) -> str:
    """``"15.75 GiB"``, ``"3.20 MiB"``, ``"512 bytes"``."""
    scale, unit = unit_of(size)
    return f"{size:,.0f} bytes" if scale == 1 else f"{size / scale:,.2f} {unit}"
