"""A model's parameters from a compressed file, a ``.capi``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.compress.errors import CompressError
from capibara.compress.loading import load_sharded
from capibara.serve.load import LoadedModel, build_model

if TYPE_CHECKING:
    from capibara.train import Checkpoint

__all__ = ["load_compressed", "settings_beside"]


def load_compressed(
    path: str | os.PathLike[str], config: Any = None, *, checkpoint: Checkpoint | None = None
) -> LoadedModel:
    """A model with the parameters of a compressed file.

    What was compressed without loss writes the same text as the model itself.

    Args:
      path: the file, of :class:`capibara.compress.ModelCompressionAPI`.
      config: the model's settings, a :class:`~capibara.config.ModularModelConfig`; those of the checkpoint, or else the
        ``config.toml`` beside the file, by default.
      checkpoint: what the model has besides parameters (codebooks) comes from there.

    Raises:
      ConfigError: the settings cannot be read, or there are none.
      CompressError: the file holds other tensors than the model has, or the model has more than parameters.
      ArchiveError: no archive, or a damaged one.
      OSError: it cannot be read.
    """
    import jax

    from capibara.config import ModularModelConfig
    from capibara.train import restore_model

    path = Path(path)
    if config is None:
        beside = settings_beside(path) if checkpoint is None else checkpoint.config_path
        config = ModularModelConfig.from_toml(beside)
    model = build_model(config)
    expected, state = jax.eval_shape(lambda: model.init(0))
    if checkpoint is not None:
        _, state = restore_model(checkpoint, model)
    elif jax.tree_util.tree_leaves(state):
        raise CompressError(
            f"checkpoint: the model has more than parameters, which {path} does not hold. "
            "Remedy: --checkpoint, the folder of its run."
        )
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return LoadedModel(model, _fitted(path, expected, load_sharded(path, place)), state, checkpoint)


def settings_beside(path: str | os.PathLike[str]) -> Path:
    """The ``config.toml`` in the folder of a compressed file.

    Raises:
      CompressError: there is none.
    """
    beside = Path(path).parent / "config.toml"
    if not beside.is_file():
        raise CompressError(
            f"config: there is no {beside}, and a .capi file does not say what model it belongs to. Remedy: "
            "--config, --checkpoint, or that file."
        )
    return beside


def _fitted(path: Path, expected: Any, found: Any) -> Any:
    """The arrays, nested as the model has them."""
    import jax

    def named(tree: Any) -> dict[str, Any]:
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in flat}

    wanted, have = named(expected), named(found)
    missing, unknown = [n for n in wanted if n not in have], [n for n in have if n not in wanted]
    if missing or unknown:
        raise CompressError(
            f"{path}: does not hold the model's parameters: missing {missing[:5]}, unknown {unknown[:5]}. "
            "Remedy: the file that was made of this model's params."
        )
    for name, like in wanted.items():
        one = have[name]
        if (one.shape, one.dtype) != (like.shape, like.dtype):
            raise CompressError(
                f"{path}: {name} is {one.dtype} {one.shape}, and {like.dtype} {like.shape} in the model"
            )
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(expected), [have[n] for n in wanted])
