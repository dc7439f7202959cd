"""What all weights in codes are; without importing them, for those who have none."""

from __future__ import annotations

__all__ = ["CodedWeight", "is_coded"]


class CodedWeight:
    """A weight in codes: :class:`capibara.compress.direct.QuantisedMatrix` or ``QuantisedStack``."""


def is_coded(value: object) -> bool:
    """Whether ``value`` is a quantized weight."""
    return isinstance(value, CodedWeight)
