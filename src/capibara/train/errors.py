"""Errors of a training run, one class per case that a caller might want to catch."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = [
    "CheckpointDamagedError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "DataError",
    "DivergedError",
    "ResumeMismatchError",
    "RunLockedError",
    "RunWriteError",
    "TextNotFoundError",
    "TrainError",
]


class TrainError(CapibaraError):
    """Base of every error that the training room raises."""


class DataError(TrainError, ValueError):
    """The text cannot be used for training: empty, binary, too short, too large."""


class TextNotFoundError(DataError, FileNotFoundError):
    """A file or folder of text does not exist, or a folder contains no text."""


class RunWriteError(TrainError, OSError):
    """A file of the run directory could not be written (disk full, no permission …)."""


class CheckpointWriteError(RunWriteError):
    """A checkpoint could not be written; the checkpoints written before it are untouched."""


class CheckpointNotFoundError(TrainError, FileNotFoundError):
    """There is no checkpoint in the given place."""


class CheckpointDamagedError(TrainError, ValueError):
    """A checkpoint's files differ from the checksums recorded when it was written."""


class ResumeMismatchError(TrainError, ValueError):
    """The run directory contains a run of another model, or on another text."""


class RunLockedError(TrainError, OSError):
    """Another process is training in the same run directory."""


class DivergedError(TrainError, ArithmeticError):
    """The loss is no longer a finite number."""
