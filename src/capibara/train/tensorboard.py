"""The figures of a run for TensorBoard, beside ``metrics.jsonl``.

``train.tensorboard=true`` writes event files into the run's folder, ``tensorboard/``; ``tensorboard --logdir runs``
shows the runs of several folders. The files are those of the package tensorboardX. What was written of steps that are
taken again, after a kill or a rollback, TensorBoard hides: each file begins with the step from which it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capibara.train import extras
from capibara.train.errors import RunWriteError

__all__ = ["EventFiles"]


class EventFiles:
    """Event files in a folder.

    Args:
      folder: is made if it is not there. resume_step: figures of later steps are written again.

    Raises:
      MissingExtraError: tensorboardX is not installed.
      RunWriteError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0) -> None:
        self.folder = folder
        try:
            self._writer = extras.tensorboard().SummaryWriter(
                str(folder), purge_step=resume_step + 1, flush_secs=30, write_to_disk=True
            )
        except OSError as error:
            raise self._failure(error) from error

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write the numbers of one line of ``metrics.jsonl``, as ``train/loss`` …, ``validation/bits_per_byte``.

        Raises:
          RunWriteError: the disk is full …
        """
        step, kind = entry["step"], entry["kind"]
        try:
            for name, value in entry.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _failure(self, error: OSError) -> RunWriteError:
        return RunWriteError(
            f"could not write to {str(self.folder)!r}: {error.strerror}. Free some space, or pass "
            "train.tensorboard=false."
        )
