"""What a run has to agree with before it continues from a checkpoint, and reading that checkpoint."""

from __future__ import annotations

from typing import Any

import jax

from capibara.errors import CapibaraError
from capibara.train.checkpoint import Checkpoint
from capibara.train.data import Corpus
from capibara.train.errors import CheckpointDamagedError, ResumeMismatchError
from capibara.train.progress import Reporter

__all__ = ["check_resumable", "restore_model", "seconds_trained", "target"]

# Settings that change how a step is computed but neither which parameters there are nor what they mean.
_MAY_DIFFER = frozenset({"model.remat", "model.dropout_rate", "model.scan_layers"})


def target(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Describe the arrays of ``tree``, placed by ``sharding``, for reading them from a checkpoint."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def restore_model(
    checkpoint: Checkpoint, model: Any, *, sharding: jax.sharding.Sharding | None = None
) -> tuple[Any, Any]:
    """Read a model's parameters and its non-trained state from a checkpoint.

    Args:
      checkpoint: an opened one.
      model: anything with ``init(seed)``; only the shapes that it would give are used.
      sharding: where the arrays go; by default the first local device.

    Raises:
      ResumeMismatchError: the checkpoint has other arrays than the model.
    """
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params, state = jax.eval_shape(lambda: model.init(0))
    restored = checkpoint.restore("model", target({"params": params, "state": state}, sharding))
    return restored["params"], restored["state"]


def seconds_trained(checkpoint: Checkpoint) -> float:
    """The training time that a checkpoint records.

    Raises:
      CheckpointDamagedError: it records none.
    """
    value = checkpoint.meta.get("seconds")
    if not isinstance(value, (int, float)) or not value >= 0:
        path = checkpoint.path / "meta.json"
        raise CheckpointDamagedError(f"{str(path)!r} has seconds={value!r}; expected a time.")
    return float(value)


def check_resumable(
    config: Any, corpus: Corpus, checkpoint: Checkpoint, reporter: Reporter, *, allow_new_text: bool
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
    if checkpoint.meta.get("fingerprint") != corpus.fingerprint:
        before_text = checkpoint.meta.get("text")
        if not allow_new_text:
            raise ResumeMismatchError(
                f"{str(checkpoint.path.parent.parent)!r} holds a run on other text ({before_text!r}, now "
                f"{corpus.name!r}; its bytes or the held-out fraction differ). Give the same text, continue "
                "on the new text with --allow-new-text, start over with --fresh, or choose another "
                "checkpoint.directory (--directory)."
            )
        reporter.note(f"continuing on other text than before ({before_text!r}, now {corpus.name!r})")
    sections = ("train", "optimizer", "precision")
    rest = [
        shown[key]
        for key in changed
        if key not in fixed and (key.split(".")[0] in sections or key in _MAY_DIFFER)
    ]
    if rest:
        reporter.note(f"settings changed since step {checkpoint.step:,}: {'; '.join(rest)}")


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
