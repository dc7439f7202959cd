"""What a run has to agree with before it continues from a checkpoint, and reading that checkpoint."""

from __future__ import annotations

from typing import Any

import jax

from capibara.errors import CapibaraError
from capibara.plan.layout import Layout
from capibara.train.checkpoint import Checkpoint
from capibara.train.data import Corpus
from capibara.train.errors import CheckpointDamagedError, ResumeMismatchError
from capibara.train.placement import axes_shardings
from capibara.train.progress import Reporter
from capibara.train.state import TrainState

__all__ = ["check_resumable", "restore_model", "restore_state", "seconds_trained"]

# Settings that change how a step is computed but neither which parameters there are nor what they mean.
_MAY_DIFFER = frozenset({"model.remat", "model.dropout_rate", "model.scan_layers"})


def restore_model(
    checkpoint: Checkpoint, model: Any, *, sharding: jax.sharding.Sharding | None = None
) -> tuple[Any, Any]:
    """Read a model's parameters and its non-trained state from a checkpoint.

    Args:
      checkpoint: an opened one.
      model: anything with ``init(seed)``; only the shapes that it would give are used.
      sharding: where the arrays go; by default over the model's own mesh as its rules say, if it has one, else to the
        first local device. A checkpoint does not depend on the devices that wrote it.

    Raises:
      ResumeMismatchError: the checkpoint has other arrays than the model.
    """
    params, state = jax.eval_shape(lambda: model.init(0))
    items = {"params": params, "state": state}
    mesh = getattr(model, "mesh", None)
    if sharding is None and mesh is not None:
        axes = {"params": model.param_axes, "state": model.state_axes}
        where = {name: axes_shardings(items[name], axes[name], mesh, model.backend.rules) for name in items}
    else:
        one = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        where = jax.tree.map(lambda leaf: one, items)
    items = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), items, where
    )
    restored = checkpoint.restore("model", items)
    return restored["params"], restored["state"]


def restore_state(checkpoint: Checkpoint, state: TrainState) -> TrainState:
    """Read all that training needs, onto other devices than it was written from if need be.

    Args:
      state: as :meth:`capibara.train.placement.Placement.describe_state` gives it.

    Raises:
      ResumeMismatchError: the checkpoint has other arrays than ``state``.
    """
    key = jax.eval_shape(jax.random.key_data, state.key)
    training = {
        "opt_state": state.opt_state,
        "step": state.step,
        "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=state.key.sharding),
    }
    model = checkpoint.restore("model", {"params": state.params, "state": state.model_state})
    training = checkpoint.restore("training", training)
    restored = TrainState(
        training["step"],
        model["params"],
        training["opt_state"],
        model["state"],
        jax.random.wrap_key_data(training["key"]),
    )
    return jax.device_put(restored, jax.tree.map(lambda leaf: leaf.sharding, state))


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
    where = _layout_words(old), _layout_words(config)
    if where[0] != where[1]:
        reporter.note(f"layout changed since step {checkpoint.step:,}: was {where[0]}; now {where[1]}")
    if rest:
        reporter.note(f"settings changed since step {checkpoint.step:,}: {'; '.join(rest)}")


def _layout_words(config: Any) -> str:
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
