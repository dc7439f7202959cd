"""Whether a run goes on after an error, and with which batches.

A run goes back to its newest checkpoint. The first time the same steps are computed again, because the fault may have
been the machine's: if the step is sound then, that is said, and nothing is left out. If the loss diverges on the same
batch again, the batch is left out from then on (as by hand in PaLM's training, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

from capibara.train.errors import CorruptionError, DivergedError
from capibara.train.progress import Reporter
from capibara.train.recovery.skips import Skips

__all__ = ["Rollback"]


class Rollback:
    """Decides after each error of one run.

    Args:
      skips: the batches left out, to which it adds.
      max_skips: how many may be added before the next checkpoint, and how often steps are computed again without
        leaving one out; 0: every error ends the run.
    """

    def __init__(self, skips: Skips, *, max_skips: int, reporter: Reporter) -> None:
        self.skips, self.max_skips, self.reporter = skips, max_skips, reporter
        self._base = -1
        self._added = self._again = 0
        self._suspected: int | None = None
        self._faulty: set[str] = set()

    def after(self, error: DivergedError | CorruptionError, base: int) -> None:
        """Prepare to go on from the checkpoint of the step ``base``.

        Raises:
          DivergedError, CorruptionError: ``error`` itself, if the run cannot go on by itself.
        """
        if not self.max_skips:
            raise error
        if isinstance(error, CorruptionError):
            if self._faulty & set(error.devices):
                raise error
            self._faulty |= set(error.devices)
            self.reporter.warn(f"{error} Going back to step {base:,}.")
            return
        if error.step is None or error.step <= base:
            raise error
        if base != self._base:
            self._base, self._added, self._again, self._suspected = base, 0, 0, None
        if self._suspected != error.step and not self._added:
            self._again += 1
            if self._again > self.max_skips:  # now this step diverges, now that one
                raise error
            self._suspected = error.step
            self.reporter.warn(
                f"{str(error).partition('. ')[0]}. Going back to step {base:,}, to compute the same steps again."
            )
            return
        if self._added == self.max_skips:
            raise error
        self._suspected = None
        self._added += 1
        number = self.skips.skip(error.step - 1)
        self.reporter.warn(
            f"{str(error).partition('. ')[0]}. Going back to step {base:,}, to go on without batch {number:,} "
            f"({self._added} of at most recovery.max_skips={self.max_skips} left out since the checkpoint)."
        )

    def sound(self, step: int) -> None:
        """Told of each step whose loss is sound."""
        if step == self._suspected:
            self._suspected = None
            self.reporter.warn(
                f"step {step:,} is sound when it is computed again from the same state with the same batch: a device "
                "or its memory may be faulty. With recovery.replay_every=N each N-th step is computed twice, and the "
                "device is named."
            )
