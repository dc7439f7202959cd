"""What a checkpoint of a run holds: its arrays and facts, written and read here and nowhere else.

::

    model/      params, state
    ema/        params: the moving average of those that are trained, if it is kept
    training/   opt_state, step, key: what only training needs; an imported model has none
    meta.json   :class:`Facts`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose import param_shardings
from capibara.train.checkpoint import Checkpoint
from capibara.train.errors import CheckpointDamagedError, CheckpointNotFoundError
from capibara.train.state import TrainState
from capibara.train.trainable import trained_part

__all__ = [
    "Facts",
    "described_items",
    "items_of",
    "model_items",
    "restore_model",
    "restore_state",
    "state_of",
]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a checkpoint says of its run, besides its step and its arrays.

    Attributes:
      seconds: of training so far; None for an imported model.
      text: a readable name of the data. fingerprint: SHA-256 over it.
      validation: bits per byte of held-out text at this step, if they were measured.
      position: the place in the order of packed documents (:meth:`capibara.data.PackedBatches.position`).
      reference: SHA-256 of the file with the log-probabilities of pairs before training.
      skipped: numbers of batches that were left out (:class:`capibara.train.recovery.skips.Skips`).
      pretrained: where the model came from, if it was published (:class:`capibara.families.Pretrained`), in JSON.
    """

    seconds: float | None = None
    text: str | None = None
    fingerprint: str | None = None
    validation: float | None = None
    position: Mapping[str, Any] | None = None
    reference: str | None = None
    skipped: Sequence[int] | None = None
    pretrained: Mapping[str, Any] | None = None

    def to_meta(self) -> dict[str, Any]:
        """As JSON values, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Facts:
        """Read a checkpoint's.

        Raises:
          CheckpointDamagedError: one is of another type.
        """
        found = {name: checkpoint.meta.get(name) for name in cls.__dataclass_fields__}
        for name, value in found.items():
            if value is None:
                continue
            if name in ("seconds", "validation"):
                good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
            elif name == "skipped":
                good = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
            else:
                good = isinstance(value, Mapping if name in ("position", "pretrained") else str)
            if not good:
                path = checkpoint.path / "meta.json"
                raise CheckpointDamagedError(
                    f"{str(path)!r} has {name}={value!r:.80}; expected {_EXPECTED[name]}."
                )
        return cls(**found)

    def trained(self, checkpoint: Checkpoint) -> float:
        """The training time so far.

        Raises:
          CheckpointDamagedError: the checkpoint, whose facts these are, records none.
        """
        if self.seconds is None:
            path = checkpoint.path / "meta.json"
            raise CheckpointDamagedError(f"{str(path)!r} has seconds=None; expected {_EXPECTED['seconds']}.")
        return self.seconds


_EXPECTED = {
    "seconds": "a time",
    "validation": "bits per byte",
    "text": "a name",
    "fingerprint": "a digest",
    "position": "a place in the documents",
    "reference": "a digest",
    "skipped": "a list of numbers of batches",
    "pretrained": "what is known of a published model",
}


def model_items(params: Any, state: Any) -> dict[str, Any]:
    """The arrays of a model, for ``CheckpointStore.save``."""
    return {"model": {"params": params, "state": state}}


def items_of(state: TrainState) -> dict[str, Any]:
    """The arrays of a run, for ``CheckpointStore.save``."""
    return _items(state, jax.random.key_data(state.key))


def described_items(state: TrainState) -> dict[str, Any]:
    """The same of a state of ``jax.ShapeDtypeStruct``, as ``Placement.describe_state`` gives it."""
    key = jax.eval_shape(jax.random.key_data, state.key)
    return _items(state, jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=state.key.sharding))


def state_of(items: Mapping[str, Any], like: TrainState) -> TrainState:
    """The state whose arrays these are, placed as ``like`` says."""
    training, model = items["training"], items["model"]
    state = TrainState(
        training["step"],
        model["params"],
        training["opt_state"],
        model["state"],
        jax.random.wrap_key_data(training["key"]),
        items["ema"]["params"] if "ema" in items else None,
    )
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, like))


def _items(state: TrainState, key: Any) -> dict[str, Any]:
    return {
        **model_items(state.params, state.model_state),
        **({} if state.ema is None else {"ema": {"params": state.ema}}),
        "training": {"opt_state": state.opt_state, "step": state.step, "key": key},
    }


def restore_model(
    checkpoint: Checkpoint,
    model: Any,
    *,
    sharding: jax.sharding.Sharding | None = None,
    ema: bool = False,
) -> tuple[Any, Any]:
    """Read a model's parameters and its non-trained state from a checkpoint.

    Args:
      checkpoint: an opened one.
      model: anything with ``init(seed)``; only the shapes that it would give are used.
      sharding: where the arrays go; by default over the model's own mesh as its rules say, if it has one, else to the
        first local device. A checkpoint does not depend on the devices that wrote it.
      ema: the averaged parameters (``train.ema``), in the dtype of the others.

    Raises:
      CheckpointNotFoundError: there are no averaged parameters.
      ResumeMismatchError: the checkpoint has other arrays than the model.
    """
    params, state = jax.eval_shape(lambda: model.init(0))
    items = {"params": params, "state": state}
    mesh = getattr(model, "mesh", None)
    if sharding is None and mesh is not None:
        axes = {"params": model.param_axes, "state": model.state_axes}
        where = {name: param_shardings(items[name], axes[name], mesh, model.backend.rules) for name in items}
    else:
        one = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        where = jax.tree.map(lambda leaf: one, items)
    items = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), items, where
    )
    restored = checkpoint.restore("model", items)
    params = restored["params"]
    if ema:
        if not (checkpoint.path / "ema").is_dir():
            raise CheckpointNotFoundError(
                f"{str(checkpoint.path)!r} has no averaged parameters: it was trained with train.ema=0. Leave --ema "
                "out."
            )
        wide = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32), sharding=leaf.sharding
            ),
            trained_part(model, items["params"]),
        )
        average = checkpoint.restore("ema", {"params": wide})["params"]
        params = jax.tree.map(
            lambda new, old: old if new is None else new.astype(old.dtype),
            average,
            params,
            is_leaf=lambda leaf: leaf is None,
        )
    return params, restored["state"]


def restore_state(checkpoint: Checkpoint, state: TrainState) -> TrainState:
    """Read all that training needs, onto other devices than it was written from if need be.

    Args:
      state: as :meth:`capibara.train.placement.Placement.describe_state` gives it.

    Raises:
      ResumeMismatchError: the checkpoint has other arrays than ``state``.
    """
    items = described_items(state)
    training = checkpoint.restore("training", items["training"])
    model = checkpoint.restore("model", items["model"])
    average = None
    if state.ema is not None and (checkpoint.path / "ema").is_dir():
        average = checkpoint.restore("ema", {"params": state.ema})["params"]
    elif state.ema is not None:  # it begins now, with the parameters
        average = jax.tree.map(
            lambda like, leaf: None if like is None else jnp.array(leaf, like.dtype, copy=True),
            state.ema,
            model["params"],
            is_leaf=lambda leaf: leaf is None,
        )
    ema = {} if average is None else {"ema": {"params": average}}
    return state_of({"training": training, "model": model, **ema}, state)
