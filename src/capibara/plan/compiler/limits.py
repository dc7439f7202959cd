"""The compiler's own limit of memory: how much of a device's a program may use.

A program that would take more is made smaller (its schedule has fewer buffers at once, and takes longer) or refused, in
seconds. The limit is that of ``tpu.flags``, so that a training step is compiled with it, too. The GPU compiler has no
such option: its programs are as large as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from capibara.plan.slices import LIMIT, limit_option
from capibara.sharding import Layout

if TYPE_CHECKING:
    from capibara.plan.targets import Target

__all__ = ["LIMIT", "limit_option", "within"]


def within(layout: Layout, limit_bytes: int, target: Target) -> Layout:
    """A layout with the flag of a limit that is less than what a device has, and than a limit that it has already."""
    own = layout.compiler_options.get(LIMIT, "")
    limit = target.limit_flag(min(limit_bytes, target.usable_hbm_bytes))
    lower = own.isdecimal() and int(own) << 20 <= min(limit_bytes, target.usable_hbm_bytes)
    if limit is None or lower or (limit_bytes >= target.usable_hbm_bytes and not own):
        return layout
    others = [pair for pair in layout.flags if pair[0] != LIMIT]
    return replace(layout, flags=(*others, limit))
