"""The compiler's own limit of memory: how much of a device's a program may use.

A program that would take more is made smaller (its schedule has fewer buffers at once, and takes longer) or refused, in
seconds. The limit is that of ``tpu.flags``, so that a training step is compiled with it, too.
"""

from __future__ import annotations

__all__ = ["LIMIT", "limit_option"]

LIMIT = "xla_tpu_max_hbm_size_mib"
"""The compiler's option, in MiB; what the runtime reserves is not part of it (libtpu 0.0.42)."""


def limit_option(limit_bytes: int) -> tuple[str, str]:
    """The option by which a program may use so many bytes of a device's memory, rounded down to MiB."""
    return LIMIT, str(max(1, limit_bytes >> 20))
