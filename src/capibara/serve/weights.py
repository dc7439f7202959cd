"""Load a model's parameters from a compressed ``.capi`` file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.loading import load_sharded
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.running import check_decode, refuse
from capibara.families import read_config
from capibara.serve.carried import carried_config, carried_source, carried_tokenizer
from capibara.serve.engine.arrays import describe_arrays
from capibara.serve.loaded import LoadedModel, build_model, take_tokenizer

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.train import Checkpoint

__all__ = ["describe_compressed", "load_compressed", "weights_config"]


def load_compressed(
    path: str | os.PathLike[str],
    config: Any = None,
    *,
    checkpoint: Checkpoint | None = None,
    published: str | os.PathLike[str] | None = None,
    decode: bool | str = True,
) -> LoadedModel:
    """Load a model with the parameters of a compressed file.

    A losslessly compressed model generates the same text as the original.

    Args:
      path: the file, written by :class:`capibara.compress.ModelCompressionAPI`.
      config: the model's settings, a :class:`~capibara.config.ModularModelConfig`; by default those of the
        checkpoint or of ``published``, otherwise those that the file carries, otherwise the ``config.toml`` in its
        folder.
      checkpoint: source of the model's non-trained state (codebooks).
      published: the folder or GGUF file of the published model that was compressed: its settings and tokenizer.
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

    check_decode(decode)
    path = Path(path)
    with Archive(path) as archive:
        metadata = archive.metadata
    source = carried_source(metadata, path)
    if published is not None:
        own, source = read_config(published)
        config = own if config is None else config
    elif config is None:
        config = weights_config(path, checkpoint)
    model = build_model(config)
    model.pretrained = source
    _take_tokenizer(model, path, metadata, checkpoint, published)
    expected, state = describe_arrays(model)
    if checkpoint is not None:
        from capibara.train import restore_model  # a large import

        _, state = restore_model(checkpoint, model)
    else:
        _refuse_state(path, state)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with Archive(path) as archive:
        likes = _likes(archive, place)
        _fitted(path, expected, likes)  # before anything is decoded
        found = load_sharded(archive, place) if decode is True else _quantized(archive, likes, decode)
    return LoadedModel(model, _fitted(path, expected, found), state, checkpoint)


def describe_compressed(
    path: str | os.PathLike[str], *, decode: bool | str = True
) -> tuple[ModularModelConfig, Mapping[str, bytes] | Path, Callable[[Any], tuple[Any, Any]]]:
    """What :func:`load_compressed` will load of a file alone; of its tensors only what they begin with is read.

    Args:
      path, decode: as for :func:`load_compressed`.

    Returns:
      The settings of its model; the files of its tokenizer by name, or the folder where they are; and a function of
      the model, which returns descriptions of its parameters and state, as
      :func:`capibara.serve.engine.arrays.describe_arrays` does, and raises what :func:`load_compressed` would.

    Raises:
      ConfigError, CompressError, ArchiveError, OSError: as :func:`load_compressed`.
    """
    check_decode(decode)
    path = Path(path)
    with Archive(path) as archive:
        tokenizer = carried_tokenizer(archive.metadata, path)

    def describe(model: Any) -> tuple[Any, Any]:
        expected, state = describe_arrays(model)
        _refuse_state(path, state)
        if decode is True:
            return expected, state
        from capibara.compress.jax_codes import describe_weights

        with Archive(path) as archive:
            return _fitted(path, expected, describe_weights(archive, _likes(archive))), state

    return weights_config(path), tokenizer or path.parent / "tokenizer", describe


def _refuse_state(path: Path, state: Any) -> None:
    import jax

    if jax.tree_util.tree_leaves(state):
        raise CompressError(
            f"checkpoint: the model has more than parameters, which {path} does not hold. "
            "Remedy: --checkpoint, the folder of its run."
        )


def _likes(archive: Archive, sharding: Any = None) -> dict[str, Any]:
    import jax

    return {
        entry.name: jax.ShapeDtypeStruct(entry.shape, numpy_dtype(entry.format), sharding=sharding)
        for entry in archive
    }


def _quantized(archive: Archive, likes: dict[str, Any], decode: bool | str) -> dict[str, Any]:
    """Tensors by name, quantized where the file has codes."""
    from capibara.compress.jax_codes import load_weights

    found, why = load_weights(archive, likes)
    if decode is False and len(why) == len(found):
        refuse(archive.path, why)
    return found


def _take_tokenizer(
    model: Any,
    path: Path,
    metadata: Mapping[str, str],
    checkpoint: Checkpoint | None,
    published: str | os.PathLike[str] | None,
) -> None:
    """Give a model the tokenizer of its checkpoint or folder, or that which its compressed file carries."""
    if published is not None:
        take_tokenizer(model, published)
    elif checkpoint is not None:
        take_tokenizer(model, checkpoint.tokenizer_path)
    elif files := carried_tokenizer(metadata, path):
        model.tokenizer_files = files
    else:
        take_tokenizer(model, path.parent / "tokenizer")


def weights_config(path: str | os.PathLike[str], checkpoint: Checkpoint | None = None) -> ModularModelConfig:
    """The settings of a compressed file's model: of its checkpoint, carried by the file, or beside it.

    Raises:
      ConfigError: they cannot be read.
      CompressError: there are none.
      ArchiveError: not an archive, or a damaged one.
    """
    from capibara.config import ModularModelConfig

    if checkpoint is not None:
        return ModularModelConfig.from_toml(checkpoint.config_path)
    with Archive(path) as archive:
        config = carried_config(archive.metadata, path)
    if config is not None:
        return config
    beside = Path(path).parent / "config.toml"
    if not beside.is_file():
        raise CompressError(
            f"config: there is no {beside}, and {path} does not say what model it belongs to. Remedy: --config, "
            "--checkpoint, --model, or that file."
        )
    return ModularModelConfig.from_toml(beside)


def _fitted(path: Path, expected: Any, found: Any) -> Any:
    """The arrays, nested as the model has them."""
    import jax

    from capibara.compress.coded import is_coded

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
