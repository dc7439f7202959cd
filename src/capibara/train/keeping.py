"""The checkpoints of a :class:`~capibara.train.TpuDistributedTrainer`, which may save into any folder at any time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from capibara.train.checkpoint import Checkpoint, CheckpointStore
from capibara.train.errors import CheckpointNotFoundError
from capibara.train.finite import check_finite, not_finite
from capibara.train.fitting import make_way
from capibara.train.saved import Facts
from capibara.train.saves import Saves

__all__ = ["Keeper"]

_LOG = logging.getLogger("capibara.train.checkpoints")


class Keeper:
    """Saves into the folder ``checkpoints`` of a folder, the newest two; reads the newest."""

    def __init__(self) -> None:
        self._saves: Saves | None = None
        self._skipped: tuple[Path, tuple[int, ...]] = (Path(), ())
        self._last: tuple[Path, int] | None = None
        self._infinite_from_the_start: frozenset[str] | None = None

    def store(self, directory: str | os.PathLike[str], step: int) -> CheckpointStore:
        """The checkpoints of a folder, if one of ``step`` can be added to them.

        Raises:
          ConfigError: there are later ones.
        """
        store = CheckpointStore(Path(directory) / "checkpoints")
        folder, skipped = self._skipped
        make_way(store, step, skipped if folder == store.folder.absolute() else ())
        return store

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        items: Mapping[str, Any],
        *,
        initial: Callable[[], Mapping[str, Any]],
        config_toml: str,
        wait: bool,
    ) -> Path:
        """Write a checkpoint, or begin to; see :meth:`Saves.save`.

        Raises:
          ConfigError, CheckpointWriteError; DivergedError: what ``initial`` gives is finite, and ``items`` are not.
        """
        self.settle()
        store = self.store(directory, step)

        def allowed() -> frozenset[str]:
            if self._infinite_from_the_start is None:
                self._infinite_from_the_start = frozenset(not_finite(initial()))
            return self._infinite_from_the_start

        check_finite(step, items, allowed)
        if self._saves is None or self._saves.store.folder != store.folder:
            self._saves = Saves(store, warn=_LOG.warning)
        self._saves.asynchronous = not wait
        self._saves.save(step, items, meta=Facts(seconds=0.0).to_meta(), config_toml=config_toml)
        self._last = store.folder.absolute(), step
        return store.folder / str(step)

    def has(self, directory: str | os.PathLike[str], step: int) -> bool:
        """Whether that was the last save; it may not be complete."""
        return self._last == ((Path(directory) / "checkpoints").absolute(), step)

    def newest(self, directory: str | os.PathLike[str]) -> Checkpoint:
        """The newest checkpoint of a folder that is whole.

        Raises:
          CheckpointNotFoundError: there is none. CheckpointDamagedError: every one is damaged.
        """
        self.settle()
        store = CheckpointStore(Path(directory) / "checkpoints")
        checkpoint = store.newest()
        if checkpoint is None:
            raise CheckpointNotFoundError(f"there is no checkpoint in {str(directory)!r}.")
        later = tuple(step for step in store.steps() if step > checkpoint.step)
        self._skipped, self._last = (store.folder.absolute(), later), None
        return checkpoint

    def settle(self) -> None:
        """Wait for what is being written.

        Raises:
          CheckpointWriteError: it failed.
        """
        if self._saves is not None:
            self._saves.settle()

    def look(self) -> None:
        """Raise the error of a save that has failed meanwhile, without waiting; of several processes, later."""
        if self._saves is not None and self._saves.failed() and self._saves.alone:
            self._saves.settle()

    def leave(self, error: BaseException) -> None:
        """Wait for a save before an error ends a run."""
        if self._saves is not None:
            self._saves.leave(error)
