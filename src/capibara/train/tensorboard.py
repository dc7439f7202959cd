"""The figures of a run for TensorBoard, beside ``metrics.jsonl``.

``train.tensorboard=true`` writes event files into the run's folder, ``tensorboard/``; ``tensorboard --logdir runs``
shows the runs of several folders. The files are those of the package tensorboardX. What was written of steps that are
taken again, after a kill or a rollback, TensorBoard hides: each file begins with the step from which it counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capibara.train import extras
from capibara.train.errors import RunWriteError

__all__ = ["EventFiles"]

# Between two looks of TensorBoard at the files.
_SECONDS = 30


class EventFiles:
    """One more event file in a folder, written without a thread that could hide what goes wrong.

    Args:
      folder: is made if it is not there. resume_step: figures of later steps are written again.

    Raises:
      MissingExtraError: tensorboardX is not installed.
      RunWriteError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0) -> None:
        self.folder = folder
        self._events, self._summaries, files = extras.tensorboard()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The time alone has a resolution of a second, and a file of the same name would be emptied.
            self._file = files.EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
            # What earlier files have from this step on does not count any more.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(resume_step + 1, session_log=start)
            self.sync()
        except OSError as error:
            raise self._failure(error) from error

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write the numbers of one line of ``metrics.jsonl``, as ``train/loss`` …, ``validation/bits_per_byte``.

        Raises:
          RunWriteError: the disk is full …
        """
        summary = self._summaries.Summary
        values = [
            summary.Value(tag=f"{entry['kind']}/{name}", simple_value=value)
            for name, value in entry.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        try:
            self._add(entry["step"], summary=summary(value=values))
            if time.monotonic() - self._synced > _SECONDS:
                self.sync()
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Return once every line is on disk.

        Raises:
          RunWriteError: the disk is full …
        """
        self._synced = time.monotonic()
        try:
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file.

        Raises:
          RunWriteError: the disk is full …
        """
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def _add(self, step: int, **what: Any) -> None:
        self._file.write_event(self._events.Event(step=step, wall_time=time.time(), **what))

    def _failure(self, error: OSError) -> RunWriteError:
        return RunWriteError(
            f"could not write to {str(self.folder)!r}: {error.strerror}. Free some space, or pass "
            "train.tensorboard=false."
        )
