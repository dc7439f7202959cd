"""Every public operation and what draws its families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz_ops import attention, collective, conv, fft, linalg, loss, rotary, scan, tropical, vq

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, Callable[..., Any]] = {
    **attention.OPERATIONS,
    **collective.OPERATIONS,
    **conv.OPERATIONS,
    **fft.OPERATIONS,
    **linalg.OPERATIONS,
    **loss.OPERATIONS,
    **rotary.OPERATIONS,
    **scan.OPERATIONS,
    **tropical.OPERATIONS,
    **vq.OPERATIONS,
}
