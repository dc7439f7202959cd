"""Load a model from a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capibara.families import Pretrained
from capibara.serve.loaded import LoadedModel, build_model, take_tokenizer
from capibara.train import (
    Checkpoint,
    CheckpointNotFoundError,
    CheckpointStore,
    checkpoint_store,
    open_checkpoint,
    restore_model,
)
from capibara.train.rundir import lock_run
from capibara.train.saved import Facts, model_items

__all__ = [
    "find_checkpoint",
    "load_model",
    "save_pretrained_run",
]


def find_checkpoint(
    folder: str | os.PathLike[str], *, warn: Callable[[str], None] | None = None
) -> Checkpoint:
    """Open the newest intact checkpoint in a folder.

    Args:
      folder: of a run, of its checkpoints, or of one checkpoint.
      warn: callback for damaged checkpoints that are skipped.

    Raises:
      CheckpointNotFoundError: there is none.
      CheckpointDamagedError: every checkpoint is damaged.
    """
    if not os.fspath(folder):
        raise CheckpointNotFoundError(
            "the folder of the checkpoint is empty: name the folder of a run with --checkpoint ('.' is the current "
            "one)."
        )
    path = Path(folder)
    try:
        is_checkpoint = (path / "manifest.json").is_file() or (
            re.fullmatch("[0-9]+", path.name) and (path / "model").is_dir()
        )
    except OSError as error:  # such as a name that is too long, or a folder that may not be looked into
        raise CheckpointNotFoundError(
            f"can not look for a checkpoint in {str(path)[:200]!r}: {error.strerror or error}. Name the folder of a "
            "run with --checkpoint."
        ) from None
    if is_checkpoint:
        return open_checkpoint(path)
    for store in (checkpoint_store(path), CheckpointStore(path)):
        checkpoint = store.newest(warn=warn)
        if checkpoint is not None:
            return checkpoint
    raise CheckpointNotFoundError(
        f"there is no checkpoint in {str(path)!r}{'' if path.exists() else ', which does not exist'}. Train "
        "first (capibara train), or name the folder of a run with --checkpoint."
    )


def load_model(checkpoint: Checkpoint, *, ema: bool = False, mesh: Any | None = None) -> LoadedModel:
    """Build the model that a checkpoint's own settings describe, with its parameters.

    Args:
      ema: with the averaged ones (``train.ema``).
      mesh: that they are divided over; by default what the settings say.

    Raises:
      CheckpointNotFoundError: there are no averaged parameters.
      ConfigError: the settings cannot be read by this version, or need float64 without JAX's 64-bit mode.
      ResumeMismatchError: the arrays are not those of the model.
    """
    from capibara.config import ModularModelConfig

    model = build_model(ModularModelConfig.from_toml(checkpoint.config_path))
    model = model if mesh is None else model.on_mesh(mesh)
    if (record := Facts.of(checkpoint).pretrained) is not None:
        model.pretrained = Pretrained.from_json(record, checkpoint.path / "meta.json")
    take_tokenizer(model, checkpoint.tokenizer_path)
    params, state = restore_model(checkpoint, model, ema=ema)
    return LoadedModel(model, params, state, checkpoint)


def save_pretrained_run(model: Any, folder: str | os.PathLike[str]) -> Checkpoint:
    """Write a model that was read from a published folder as a run: a checkpoint of step 0.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel` with ``pretrained``.
      folder: of the run.

    Raises:
      RunLockedError: another process writes it; CheckpointWriteError: the disk is full …
    """
    with lock_run(Path(folder)):
        return checkpoint_store(Path(folder)).save(
            0,
            model_items(model.params, model.state),
            meta=Facts(pretrained=model.pretrained.to_json()).to_meta(),
            config_toml=model.config.to_toml(),
            tokenizer=model.tokenizer_files,
        )
