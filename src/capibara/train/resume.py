"""What a run has to agree with before it continues from a checkpoint."""

from __future__ import annotations

from typing import Any

from capibara.config import ModularModelConfig
from capibara.data import DocumentError, PackedBatches
from capibara.errors import CapibaraError
from capibara.sharding import Layout
from capibara.train.checkpoint import Checkpoint
from capibara.train.errors import CheckpointDamagedError, ResumeMismatchError
from capibara.train.progress import Reporter
from capibara.train.protocols import Batches, DataSource
from capibara.train.saved import Facts

__all__ = ["check_resumable", "seek_data"]

# Settings that change how a step is computed but neither which parameters there are nor what they mean.
_MAY_DIFFER = frozenset({"model.remat", "model.dropout_rate", "model.scan_layers"})


def seek_data(
    batches: Batches,
    data: DataSource,
    config: ModularModelConfig,
    checkpoint: Checkpoint,
    facts: Facts,
    number: int,
) -> None:
    """Go on in the order of packed documents where a checkpoint left it.

    ``number`` is that of the next batch. Where the order is another one (other documents, rows of another length,
    another seed) it is read from its beginning, passing over as many batches as steps were taken.

    Raises:
      CheckpointDamagedError: the checkpoint records no place in these documents.
    """
    if not isinstance(batches, PackedBatches):
        return
    old = type(config).from_toml(checkpoint.config_path)
    keys = ("batch_size", "sequence_length", "seed")
    same = all(getattr(old.train, key) == getattr(config.train, key) for key in keys)
    if not same or facts.fingerprint != data.fingerprint:
        return
    try:
        batches.seek(number, facts.position or {})
    except DocumentError:
        path = checkpoint.path / "meta.json"
        raise CheckpointDamagedError(
            f"{str(path)!r} has position={facts.position!r:.80}; expected the place of step {checkpoint.step} in the "
            "documents."
        ) from None


def check_resumable(
    config: ModularModelConfig,
    data: DataSource,
    checkpoint: Checkpoint,
    facts: Facts,
    reporter: Reporter,
    *,
    allow_new_text: bool,
) -> None:
    """Refuse to continue a run of another model or on other text; say which other settings changed.

    Raises:
      ResumeMismatchError: the text names every setting that differs, and the remedies.
    """
    try:
        old = type(config).from_toml(checkpoint.config_path)
    except CapibaraError as error:
        raise ResumeMismatchError(
            f"the settings of the checkpoint {str(checkpoint.path)!r} can not be read by this version: "
            f"{error} Start over with --fresh, or choose another checkpoint.directory (--directory)."
        ) from error
    before, now = _flatten(old.to_dict()), _flatten(config.to_dict())
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    shown = {
        key: f"{key} was {before.get(key, 'left out')!r}, now {now.get(key, 'left out')!r}" for key in changed
    }
    fixed = [
        key
        for key in changed
        if (key.startswith("model.") or key == "precision.param_dtype") and key not in _MAY_DIFFER
    ]
    if fixed:
        raise ResumeMismatchError(
            f"{str(checkpoint.path.parent.parent)!r} holds a run of another model: "
            f"{'; '.join(shown[key] for key in fixed)}. Restore those settings, start over with --fresh, or "
            "choose another checkpoint.directory (--directory)."
        )
    if "optimizer.name" in changed:
        raise ResumeMismatchError(
            f"{shown['optimizer.name']}, and what one optimizer keeps is of no use to another. Restore "
            f"optimizer.name={old.optimizer.name}, start over with --fresh, or train the model further in another "
            f"folder: --model {checkpoint.path.parent.parent} --directory FOLDER."
        )
    if facts.fingerprint != data.fingerprint:
        before_text = facts.text
        if not allow_new_text:
            raise ResumeMismatchError(
                f"{str(checkpoint.path.parent.parent)!r} holds a run on other text ({before_text!r}, now "
                f"{data.name!r}; its bytes or the held-out fraction differ). Give the same text, continue "
                "on the new text with --allow-new-text, start over with --fresh, or choose another "
                "checkpoint.directory (--directory)."
            )
        reporter.note(f"continuing on other text than before ({before_text!r}, now {data.name!r})")
    sections = ("train", "optimizer", "precision")
    rest = [
        shown[key]
        for key in changed
        if key not in fixed and (key.split(".")[0] in sections or key in _MAY_DIFFER)
    ]
    where = _layout_words(old), _layout_words(config)
    if where[0] != where[1]:
        reporter.note(f"layout changed since step {checkpoint.step:,}: was {where[0]}; now {where[1]}")
    if rest:
        reporter.note(f"settings changed since step {checkpoint.step:,}: {'; '.join(rest)}")


def _layout_words(config: ModularModelConfig) -> str:
    if not config.tpu.enabled:
        return "replicated on every device"
    layout = Layout.from_config(config)
    flags = "".join(f", {name}={value}" for name, value in layout.flags)
    return f"{layout}{flags}"


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
