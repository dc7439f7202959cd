"""Errors of compression."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["ArchiveError", "CompressError", "DamagedError", "FolderError", "TargetError"]


class CompressError(CapibaraError, ValueError):
    """An argument cannot be compressed, or not in the requested way."""


class FolderError(CompressError, IsADirectoryError):
    """A folder was given where a file is expected."""


class ArchiveError(CapibaraError, ValueError):
    """A file is not a Capibara archive, or has a version that this release does not support."""


class DamagedError(ArchiveError):
    """The content of an archive does not match its header, sizes or checksums."""


class TargetError(CompressError):
    """A ratio and an accuracy cannot both be met.

    Attributes:
      frontier: pairs of (ratio, fidelity) that can be met, from the least to the most compressed; fidelity is 1 for
        exact models.
    """

    def __init__(self, message: str, frontier: list[tuple[float, float]]) -> None:
        shown = ", ".join(f"{ratio:.2f}: {fidelity:.4f}" for ratio, fidelity in frontier)
        super().__init__(f"{message} What can be had (ratio: fidelity): {shown}.")
        self.frontier = frontier
