"""Errors of profiles, diagnosis and advice."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["ProfileError", "ReshardingError"]


class ProfileError(CapibaraError, ValueError):
    """A profile cannot be taken or read as asked."""


class ReshardingError(CapibaraError, ValueError):
    """Advice on re-sharding is asked for with an invalid load, slice or tensor."""
