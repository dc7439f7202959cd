"""The errors of the compress room."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["ArchiveError", "CompressError", "DamagedError", "FolderError", "TargetError"]


class CompressError(CapibaraError, ValueError):
    """An argument that cannot be compressed, or cannot be compressed that way."""


class FolderError(CompressError, IsADirectoryError):
    """A folder where a file is expected."""


class ArchiveError(CapibaraError, ValueError):
    """A file that is not an archive of Capibara's, or one that is written by rules which this version does not know."""


class DamagedError(ArchiveError):
    """An archive whose content is not what its header, its sizes or its checksums say."""


class TargetError(CompressError):
    """A ratio and an accuracy that cannot both be had.

    Attributes:
      frontier: pairs of (ratio, fidelity) that can, from the least to the most compressed; fidelity is 1 for what is
        exact.
    """

    def __init__(self, message: str, frontier: list[tuple[float, float]]) -> None:
        shown = ", ".join(f"{ratio:.2f}: {fidelity:.4f}" for ratio, fidelity in frontier)
        super().__init__(f"{message} What can be had (ratio: fidelity): {shown}.")
        self.frontier = frontier
