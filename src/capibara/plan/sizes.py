"""Sizes in words: a few hundred bytes and a few hundred gigabytes stand in the same tables."""

from __future__ import annotations

from capibara.measure.sizes import size_text, unit_of
from capibara.plan.targets import Target

__all__ = ["count_text", "limit_text", "size_text", "unit_of"]


def limit_text(target: Target, limit: int) -> str:
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
