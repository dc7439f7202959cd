"""Load a model's parameters from a compressed ``.capi`` file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.loading import load_sharded
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.running import check_decode, refuse
from capibara.serve.load import LoadedModel, build_model, take_tokenizer

if TYPE_CHECKING:
    from capibara.train import Checkpoint

__all__ = ["load_compressed", "settings_beside"]


def load_compressed(
    path: str | os.PathLike[str],
    config: Any = None,
    *,
    checkpoint: Checkpoint | None = None,
    decode: bool | str = True,
) -> LoadedModel:
    """Load a model with the parameters of a compressed file.

    A losslessly compressed model generates the same text as the original.

    Args:
      path: the file, written by :class:`capibara.compress.ModelCompressionAPI`.
      config: the model's settings, a :class:`~capibara.config.ModularModelConfig`; by default those of the
        checkpoint, otherwise the ``config.toml`` in the file's folder.
      checkpoint: source of the model's non-trained state (codebooks).
      decode: ``True``: decode all parameters. ``False``: those stored with ``int8``, ``int4`` or ``nf4`` stay
        quantized and take about as much memory as the file; :class:`~capibara.serve.Generator` multiplies by them
        without decoding (:func:`capibara.compress.quantized`). ``"auto"``: the same, without an error if none can.

    Raises:
      ConfigError: the settings cannot be read, or there are none.
      CompressError: the file's tensors are not those of the model, or the model has non-trained state; or
        ``decode=False``, and no parameter is quantized.
      ArchiveError: not an archive, or a damaged one.
      OSError: it cannot be read.
    """
    import jax

    from capibara.config import ModularModelConfig
    from capibara.train import restore_model

    check_decode(decode)
    path = Path(path)
    if config is None:
        beside = settings_beside(path) if checkpoint is None else checkpoint.config_path
        config = ModularModelConfig.from_toml(beside)
    model = build_model(config)
    take_tokenizer(model, path.parent / "tokenizer" if checkpoint is None else checkpoint.tokenizer_path)
    expected, state = jax.eval_shape(lambda: model.init(0))
    if checkpoint is not None:
        _, state = restore_model(checkpoint, model)
    elif jax.tree_util.tree_leaves(state):
        raise CompressError(
            f"checkpoint: the model has more than parameters, which {path} does not hold. "
            "Remedy: --checkpoint, the folder of its run."
        )
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with Archive(path) as archive:
        likes = {
            entry.name: jax.ShapeDtypeStruct(entry.shape, numpy_dtype(entry.format), sharding=place)
            for entry in archive
        }
        _fitted(path, expected, likes)  # before anything is decoded
        found = load_sharded(archive, place) if decode is True else _quantized(archive, likes, decode)
    return LoadedModel(model, _fitted(path, expected, found), state, checkpoint)


def _quantized(archive: Archive, likes: dict[str, Any], decode: bool | str) -> dict[str, Any]:
    """Tensors by name, quantized where the file has codes."""
    from capibara.compress.jax_codes import load_weights

    found, why = load_weights(archive, likes)
    if decode is False and len(why) == len(found):
        refuse(archive.path, why)
    return found


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

    from capibara.compress.jax_codes import is_coded

    def named(tree: Any) -> dict[str, Any]:
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_coded)
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
                f"{path}: {name} is {one.dtype} {one.shape}, and {like.dtype} {like.shape} in the model. "
                "Remedy: the settings of the model that was compressed."
            )
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(expected), [have[n] for n in wanted])
