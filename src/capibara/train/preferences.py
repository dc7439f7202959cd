"""Preferences to train on, and what the model said of them before training."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from capibara.data import PairedBatches, Tokenizer, pair_rows
from capibara.data.pairs import Pair
from capibara.errors import ConfigError
from capibara.train.errors import ResumeMismatchError
from capibara.train.processes import Processes
from capibara.train.progress import Reporter
from capibara.train.rundir import atomic_write
from capibara.train.state import TrainState

if TYPE_CHECKING:
    from capibara.train.run import Run

__all__ = ["REFERENCE", "PairCorpus", "reference_digest", "set_reference"]

REFERENCE = "reference.npy"
"""The file of a run with the log-probabilities of all pairs before training."""


@dataclass(frozen=True, eq=False)
class PairCorpus:
    """Pairs of answers in tokens, the last of them held out for validation.

    Attributes:
      name: a readable name of the sources.
      pairs: all. held_out: how many, at the end, are for validation.
      tokenizer: what made tokens of the text.
      fingerprint: SHA-256 over all of it and the tokenizer, in hexadecimal.
    """

    name: str
    pairs: Sequence[Pair]
    held_out: int
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def documents(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    @property
    def unit(self) -> str:
        """What a token is: ``"byte"`` or ``"token"``."""
        return "token" if self.tokenizer.files else "byte"

    @property
    def bytes_per_token(self) -> float:
        """Of all text."""
        return sum(one.size for one in self._all()) / sum(one.tokens.size for one in self._all())

    @property
    def highest(self) -> int:
        """The largest token id."""
        return max(int(one.tokens.max()) for one in self._all())

    def _all(self) -> Iterator[Any]:
        for pair in self.pairs:
            yield from pair

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> PairedBatches:
        """What a run trains on."""
        chosen = self.pairs[: len(self.pairs) - self.held_out]
        return PairedBatches(
            chosen, batch_size=batch_size, sequence_length=sequence_length, seed=seed % 2**32
        )

    def validation_batches(
        self, *, batch_size: int, sequence_length: int, max_batches: int
    ) -> list[dict[str, np.ndarray]]:
        """The held-out pairs in fixed batches, the same ones at every evaluation."""
        pairs = self.pairs[len(self.pairs) - self.held_out :]
        size = min(batch_size, len(pairs))
        count = min(max_batches, len(pairs) // size) if size else 0
        return [pair_rows(pairs[at * size : (at + 1) * size], sequence_length) for at in range(count)]

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.pairs):,} pairs of answers; {len(self.pairs) - self.held_out:,} to train on, "
            f"{self.held_out:,} held out"
        )


def set_reference(
    run: Run, state: TrainState, folder: Path, *, new: bool, digest: str | None, reporter: Reporter
) -> None:
    """Give all pairs the log-probabilities of the model before training: computed, or as a run has them in a file.

    Args:
      run: its batches and those of its validation are changed; without pairs nothing is done.
      state: before training, of a ``new`` run.
      folder: of the run. digest: of the file, as its checkpoint has it.

    Raises:
      ResumeMismatchError: the file is missing, damaged, or of other pairs.
      ConfigError: the model is of another kind than :class:`capibara.core.ModularCapibaraModel`.
    """
    from capibara.core import ModularCapibaraModel
    from capibara.core.preferences import pair_log_probs

    batches, model = run.batches, run.model
    if not isinstance(batches, PairedBatches):
        return
    if not isinstance(model, ModularCapibaraModel):
        raise ConfigError(
            f"pairs of answers are trained on with a ModularCapibaraModel; got {type(model).__name__}"
        )
    validation = [one for one in run.validation if isinstance(one, dict)]
    path, counts = folder / REFERENCE, [len(batches.pairs), *(len(one["tokens"]) for one in validation)]
    if new:
        compute = jax.jit(
            lambda params, own, batch: pair_log_probs(model, params, batch, state=own),
            out_shardings=run.placement.replicated,
        )
        rows = [
            {name: batch[name] for name in ("tokens", "segments", "positions", "weights")}
            for batch in (*_batches_of(batches), *validation)
        ]
        placed = (run.placement.put_batch(one) for one in rows)
        found = [np.asarray(compute(state.params, state.model_state, one), np.float32) for one in placed]
        whole = len(found) - len(validation)
        first = np.concatenate(found[:whole])[: len(batches.pairs)]
        values = np.concatenate([first, *found[whole:]])
        stream = io.BytesIO()
        np.save(stream, values, allow_pickle=False)
        Processes.here().first_does(lambda: atomic_write(path, stream.getvalue()))
        reporter.note(f"computed the reference log-probabilities of {len(values):,} pairs: {path}")
    else:
        values = _read(path, digest, sum(counts))
    parts = np.split(values, np.cumsum(counts)[:-1])
    batches.reference = parts[0]
    for batch, part in zip(validation, parts[1:], strict=True):
        batch["reference"] = part


def reference_digest(folder: Path) -> str:
    """SHA-256 of a run's file, for its checkpoints."""
    return hashlib.sha256((folder / REFERENCE).read_bytes()).hexdigest()


def _read(path: Path, digest: str | None, count: int) -> np.ndarray:
    try:
        content = path.read_bytes()
    except OSError as error:
        content, problem = b"", error.strerror
    else:
        changed = "it has changed" if hashlib.sha256(content).hexdigest() != digest else None
        problem = "the checkpoint records no digest of it" if digest is None else changed
    if problem is None:
        values = np.load(io.BytesIO(content), allow_pickle=False)
        if values.shape == (count, 2):
            return values
        problem = f"it is for {len(values):,} pairs, not {count:,}"
    raise ResumeMismatchError(
        f"{str(path)!r}, the reference log-probabilities of the pairs: {problem}. Start over with --fresh, or "
        "give the same pairs and settings."
    )


def _batches_of(batches: PairedBatches) -> Iterator[dict[str, np.ndarray]]:
    """All pairs in order; the last batch is filled up with first ones."""
    pairs, size = batches.pairs, batches.batch_size
    for at in range(0, len(pairs), size):
        own = [pairs[number % len(pairs)] for number in range(at, at + size)]
        yield pair_rows(own, batches.sequence_length)
