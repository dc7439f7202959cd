"""Training: text in, checkpoints out, and a run that can be killed at any moment.

The state of a run is one value (:class:`TrainState`), a batch is a pure function of seed and step, and a
checkpoint is whole or not there; so ``capibara train`` run again continues exactly where the newest
checkpoint stands.

    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.train import load_corpus, train

    config = ModularModelConfig.from_toml("demo", ["train.steps=100"])
    report = train(config, ModularCapibaraModel(config), load_corpus())
"""

from __future__ import annotations

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.train.batches import BatchSampler, validation_batches
from capibara.train.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from capibara.train.data import Corpus, load_corpus, split_corpus
from capibara.train.distributed import TpuDistributedTrainer
from capibara.train.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptionError,
    DataError,
    DivergedError,
    ProcessesError,
    ResumeMismatchError,
    RunLockedError,
    RunWriteError,
    TextNotFoundError,
    TrainError,
)
from capibara.train.fitting import FitReport
from capibara.train.metrics import MetricsLog, read_losses, read_metrics
from capibara.train.optimizer import build_optimizer, decay_mask, learning_rate_schedule
from capibara.train.placement import Placement
from capibara.train.plot import plot_losses
from capibara.train.processes import Processes, join_processes
from capibara.train.run import Run
from capibara.train.saved import restore_model
from capibara.train.state import TrainState
from capibara.train.step import make_eval_step, make_train_step
from capibara.train.trainer import Origin, TrainReport, checkpoint_store, train

__all__ = [
    "BatchSampler",
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CheckpointWriteError",
    "Corpus",
    "CorruptionError",
    "DataError",
    "DivergedError",
    "FitReport",
    "MetricsLog",
    "Origin",
    "Placement",
    "Processes",
    "ProcessesError",
    "ResumeMismatchError",
    "Run",
    "RunLockedError",
    "RunWriteError",
    "TextNotFoundError",
    "TpuDistributedTrainer",
    "TrainError",
    "TrainReport",
    "TrainState",
    "build_optimizer",
    "checkpoint_store",
    "decay_mask",
    "join_processes",
    "learning_rate_schedule",
    "load_corpus",
    "make_eval_step",
    "make_train_step",
    "open_checkpoint",
    "plot_losses",
    "read_losses",
    "read_metrics",
    "restore_model",
    "split_corpus",
    "train",
    "validation_batches",
]
