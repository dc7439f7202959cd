"""Errors of a training run, one class per case that a caller might want to catch."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = [
    "CheckpointDamagedError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "CorruptionError",
    "DataError",
    "DivergedError",
    "ProcessesError",
    "ResumeMismatchError",
    "RunLockedError",
    "RunWriteError",
    "ScalingError",
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
    """The loss or the gradients are no longer finite numbers, or the loss rose far above the recent ones.

    Attributes:
      step: the step that showed it, counted from 1; None if it was not a step of training.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CorruptionError(TrainError, RuntimeError):
    """A device computed something else from the same numbers.

    Attributes:
      devices: those whose results differ, as JAX names them.
    """

    def __init__(self, message: str, *, devices: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.devices = devices


class ProcessesError(TrainError, RuntimeError):
    """The processes of a run cannot work together: one cannot be reached, failed, or does not see the run's folder."""


class ScalingError(TrainError, RuntimeError):
    """A run cannot go on with the devices that there are, or could not move to them."""
