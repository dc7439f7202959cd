"""The errors of the compress room."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["ArchiveError", "CompressError", "DamagedError"]


class CompressError(CapibaraError, ValueError):
    """An argument that cannot be compressed, or cannot be compressed that way."""


class ArchiveError(CapibaraError, ValueError):
    """A file that is no archive of Capibara's, or one that is written by rules which this version does not know."""


class DamagedError(ArchiveError):
    """An archive whose content is not what its header, its sizes or its checksums say."""
