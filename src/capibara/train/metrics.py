"""``metrics.jsonl``: a run's metrics, one JSON object per line.

Two kinds of line. ``"train"`` covers the steps after the previous such line up to its ``step``, and its
``losses`` has the exact loss of every one of them (a float32 printed so that reading it gives the same
bits)::

    {"kind": "train", "step": 20, "losses": [2.51, …], "loss": 2.43, "tokens_per_second": 5012.2, …}
    {"kind": "validation", "step": 200, "bits_per_byte": 2.31, …}

The file and the checkpoints are consistent: lines up to a step are on disk before its checkpoint, a line ends at
every checkpoint, and a resumed run first drops all lines after its checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from capibara.train.errors import RunWriteError
from capibara.train.rundir import atomic_write
from capibara.train.tensorboard import EventFiles

__all__ = ["MetricsLog", "SilentLog", "read_losses", "read_metrics"]

_MAX_LINE = 16 << 20


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file as dicts, up to the first that is cut off or is not JSON."""
    try:
        stream = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 - the with below
    except FileNotFoundError:
        return
    with stream:
        while line := stream.readline(_MAX_LINE):
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if (
                not line.endswith("\n")
                or not isinstance(entry, dict)
                or not isinstance(entry.get("step"), int)
            ):
                return
            yield entry


def read_losses(path: Path) -> dict[int, float]:
    """Return the exact training loss of every step that a metrics file has: step (1-based) → loss in nats."""
    losses: dict[int, float] = {}
    for entry in read_metrics(path):
        if entry.get("kind") == "train":
            first = entry["step"] - len(entry["losses"]) + 1
            losses.update(enumerate(entry["losses"], start=first))
    return losses


class SilentLog:
    """A metrics log that writes nothing, for all processes but the first."""

    def write(self, entry: dict[str, Any]) -> None:
        """Ignored."""

    def sync(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MetricsLog:
    """Appends to a metrics file that continues at ``resume_step``; a context manager.

    ``events`` is given every line too, and closed with the file.
    """

    _events: EventFiles | None = None

    def __init__(self, path: Path, *, resume_step: int = 0, events: EventFiles | None = None) -> None:
        self.path, self._events = path, events
        kept = [entry for entry in read_metrics(path) if entry["step"] <= resume_step]
        atomic_write(path, "".join(map(_line, kept)).encode())
        self._stream: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line.

        Raises:
          RunWriteError: the disk is full …
        """
        self._guarded(lambda: self._stream.write(_line(entry)))
        self._guarded(self._stream.flush)
        if self._events is not None:
            self._events.write(entry)

    def sync(self) -> None:
        """Return once every line is on disk."""
        self._guarded(lambda: os.fsync(self._stream.fileno()))
        if self._events is not None:
            self._events.sync()

    def close(self) -> None:
        """Close the file."""
        try:
            if self._events is not None:
                self._events.close()
        finally:
            try:
                self._stream.close()
            except OSError as error:  # what a full disk kept in the buffer
                raise self._failure(error) from error

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunWriteError:
        return RunWriteError(
            f"could not write {str(self.path)!r}: {error.strerror}. The checkpoints written so far are "
            "intact; free some space and run the same command again to continue from the newest."
        )

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except RunWriteError:
            if kind is None:
                raise


def _line(entry: dict[str, Any]) -> str:
    # allow_nan=False: a file with NaN in it is not JSON; a diverged run stops before it gets here.
    return json.dumps(entry, allow_nan=False) + "\n"
