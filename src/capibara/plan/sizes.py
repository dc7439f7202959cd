"""Sizes in words: a few hundred bytes and a few hundred gigabytes stand in the same tables."""

from __future__ import annotations

from capibara.plan.slices import Slice

__all__ = ["count_text", "limit_text", "size_text", "unit_of"]

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


def limit_text(target: Slice, limit: int) -> str:
    """``"a device has 15.75 GiB"``, or what it may use of that."""
    usable = target.usable_hbm_bytes
    if limit >= usable:
        return f"a device has {size_text(usable)}"
    return f"a device may use {size_text(limit)} of its {size_text(usable)}"


def count_text(number: int) -> str:
    """``"1.37 B"``, ``"9.4 M"``, ``"512"``."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
