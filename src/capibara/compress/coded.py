"""How quantized weights are recognised, without importing what they need."""

from __future__ import annotations

__all__ = ["CodedWeight", "is_coded"]


class CodedWeight:
    """A quantized weight: :class:`capibara.compress.direct.QuantisedMatrix` or ``QuantisedStack``."""


def is_coded(value: object) -> bool:
    """Whether ``value`` is a quantized weight."""
    return isinstance(value, CodedWeight)
