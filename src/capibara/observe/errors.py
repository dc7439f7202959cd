"""Errors of profiles and diagnosis."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["ProfileError"]


class ProfileError(CapibaraError, ValueError):
    """A profile cannot be taken or read as asked."""
