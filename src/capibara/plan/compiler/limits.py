"""The compiler's own limit of memory: how much of a device's a program may use.

A program that would take more is made smaller (its schedule has fewer buffers at once, and takes longer) or refused, in
seconds. The limit is that of ``tpu.flags``, so that a training step is compiled with it, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from capibara.sharding import Layout

if TYPE_CHECKING:
    from capibara.plan.slices import Slice

__all__ = ["LIMIT", "limit_option", "within"]

LIMIT = "xla_tpu_max_hbm_size_mib"
"""The compiler's option, in MiB; what the runtime reserves is not part of it (libtpu 0.0.42)."""


def limit_option(limit_bytes: int) -> tuple[str, str]:
    """The option by which a program may use so many bytes of a device's memory, rounded down to MiB."""
    return LIMIT, str(max(1, limit_bytes >> 20))


def within(layout: Layout, limit_bytes: int, target: Slice) -> Layout:
    """A layout with the flag of a limit that is less than what a device has, and than a limit that it has already."""
    own = layout.compiler_options.get(LIMIT, "")
    most = min(limit_bytes, target.usable_hbm_bytes)
    lower = own.isdecimal() and int(own) << 20 <= most
    if lower or (limit_bytes >= target.usable_hbm_bytes and not own):
        return layout
    others = [pair for pair in layout.flags if pair[0] != LIMIT]
    return replace(layout, flags=(*others, limit_option(most)))
