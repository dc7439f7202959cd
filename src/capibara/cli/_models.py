"""The models that a verb's arguments name: settings, published folders, runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from capibara.config import ModularModelConfig
    from capibara.data import Tokenizer
    from capibara.families.on_host import Packed
    from capibara.serve.loaded import LoadedModel
    from capibara.train import Origin

__all__ = [
    "check_archive",
    "find_config",
    "further_config",
    "is_archive",
    "is_published",
    "is_run",
    "load_source",
    "model_bytes",
    "named_config",
    "start_from",
    "warn_on_stderr",
]


def warn_on_stderr(text: str) -> None:
    """Print a warning."""
    print(f"warning: {text}", file=sys.stderr)


# What fits training further, where the defaults are for training anew.
_FINETUNING = {
    "optimizer.learning_rate": 2e-5,
    "optimizer.weight_decay": 0.0,
    "train.batch_size": 8,
    "precision.param_dtype": "float32",  # a step of this size is less than bfloat16 can add to a weight
}
_LONGEST = 1024


def start_from(
    path: str, settings: Sequence[str], planned: Mapping[str, Any] | None = None
) -> tuple[ModularModelConfig, Tokenizer, Origin]:
    """What a run needs that goes on from a model.

    Args:
      path: the folder of a published model, a GGUF file, or the folder of a run.
      settings: ``key=value``, over those of the model and those for training further.
      planned: settings of a plan, which come in between.

    Returns:
      Its settings, the tokenizer, and its first parameters.

    Raises:
      ConfigError: there is no model, or one without a tokenizer.
    """
    import jax

    from capibara import families
    from capibara.core import ModularCapibaraModel
    from capibara.families import Pretrained, load_params, open_tensors, read_config
    from capibara.serve.load import find_checkpoint, load_model
    from capibara.serve.loaded import take_tokenizer
    from capibara.train import Origin
    from capibara.train.saved import Facts

    folder = Path(path)

    def settled(config: ModularModelConfig) -> ModularModelConfig:
        return _trained_further(config, folder, settings, planned)

    record: list[Any] = [None]
    if not is_published(folder):
        checkpoint = find_checkpoint(folder, warn=warn_on_stderr)
        loaded = load_model(checkpoint)
        config = settled(
            loaded.model.config.with_overrides({"finetune.method": "full", "finetune.base": "none"})
        )

        def cast(model: Any) -> Any:
            kind = model.config.precision.param_dtype
            merged = loaded.model.merged(loaded.params).params
            return model.with_adapters(jax.tree.map(lambda leaf: leaf.astype(kind), merged))

        return config, loaded.model.tokenizer, Origin(cast, lambda: Facts.of(checkpoint).pretrained)

    read, source = read_config(folder)
    embedding = families.read_embedding_files(folder)

    def load(model: Any) -> Any:
        with open_tensors(folder, source) as files:
            left_out = families.further_layers(source)
            params, dtypes = load_params(files, source.family, model, left_out=left_out)
            _, found = families.settled(files, read, source)
        record[0] = Pretrained(found.family, found.values, dtypes, embedding=embedding).to_json()
        return model.with_adapters(params)

    published = ModularCapibaraModel(read)
    published.pretrained = source
    take_tokenizer(published, folder)
    return settled(read), published.tokenizer, Origin(load, lambda: record[0])


def is_published(path: str | Path) -> bool:
    """Whether this is the folder of a published model, or a GGUF file."""
    from capibara.families import is_gguf
    from capibara.families.folder import CONFIG

    return is_gguf(path) or (Path(path) / CONFIG).is_file()


def is_archive(path: str | Path) -> bool:
    """Whether this is a compressed file, by its name."""
    from capibara.compress.container.index import SUFFIX

    return Path(path).name.endswith(SUFFIX) and not Path(path).is_dir()


def check_archive(path: str) -> None:
    """Refuse a compressed file that cannot be opened.

    Raises:
      ConfigError: it is not there, or not for this user.
    """
    from capibara.errors import ConfigError

    if is_archive(path):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{path!r}: {error.strerror}. Remedy: a .capi file that can be read") from None


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_run(path: str | Path) -> bool:
    """Whether this is the folder of a run, or of a checkpoint."""
    # Names first: of a folder that can hold no checkpoint this is said without JAX, which may be absent.
    names = {name for folder in (Path(path), Path(path) / "checkpoints") for name in _names_in(folder)}
    if not names & {"manifest.json", "model"} and not any(name.isdecimal() for name in names):
        return False

    from capibara.serve.load import find_checkpoint
    from capibara.train import CheckpointDamagedError, CheckpointNotFoundError

    try:
        find_checkpoint(path)
    except CheckpointNotFoundError:
        return False
    except CheckpointDamagedError:  # loading it says why
        return True
    return True


def model_bytes(path: str | Path) -> int:
    """Bytes of the weights of a published model."""
    files = [Path(path)] if Path(path).is_file() else Path(path).glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file())


def find_config(path: str) -> tuple[ModularModelConfig, Path]:
    """The settings of a model, and where its tokenizer is; of its weights only what their files begin with is read.

    Args:
      path: a run, the folder of a published model (``config.json`` will do), or a GGUF file.

    Raises:
      CapibaraError: there is none, or it is damaged.
    """
    if is_published(path):
        from capibara.families import open_tensors, read_config, settled

        config, source = read_config(path)
        if model_bytes(path):
            with open_tensors(path, source) as files:
                config, _ = settled(files, config, source)
        return config, Path(path)

    from capibara.config import ModularModelConfig
    from capibara.serve.load import find_checkpoint

    checkpoint = find_checkpoint(path, warn=warn_on_stderr)
    return ModularModelConfig.from_toml(checkpoint.config_path), checkpoint.tokenizer_path


def load_source(
    path: str,
    *,
    quiet: bool,
    ema: bool = False,
    decode: bool | str = True,
    mesh: jax.sharding.Mesh | None = None,
    packing: Callable[[], Mapping[tuple[str, ...], Packed]] | None = None,
) -> LoadedModel:
    """The model in a run, the folder of a published model, a GGUF file, or a compressed file that carries its settings.

    Args:
      quiet: no progress bar.
      ema: with the averaged parameters of a run.
      decode: what to do with quantized weights: :func:`capibara.serve.load_compressed`.
      mesh: that it is divided over; by default it is on one device, or where its settings say.
      packing: what of a published model an engine wants to be packed: :func:`capibara.families.load_pretrained`.

    Raises:
      CapibaraError: there is none, or it is damaged.
    """
    from capibara.cli._archives import progress_bar
    from capibara.core import ModularCapibaraModel
    from capibara.errors import ConfigError
    from capibara.families import load_pretrained
    from capibara.serve.loaded import LoadedModel

    if ema and (is_archive(path) or is_published(path)):
        raise ConfigError(f"--ema: {path!r} is not a run, which alone has averaged parameters. Leave it out")
    if is_archive(path):
        check_archive(path)
        from capibara.serve.weights import load_compressed

        return _divided(load_compressed(path, decode=decode), path, mesh)
    if not is_published(path):
        from capibara.serve.load import find_checkpoint, load_model

        return load_model(find_checkpoint(path, warn=warn_on_stderr), ema=ema, mesh=mesh)
    with progress_bar("loading", model_bytes(path), quiet=quiet) as progress:
        model = load_pretrained(ModularCapibaraModel, path, mesh=mesh, progress=progress, packing=packing)
    return LoadedModel(model, model.params, model.state, None)


def _divided(loaded: LoadedModel, path: str, mesh: jax.sharding.Mesh | None) -> LoadedModel:
    """A model that was read onto one device, over a mesh."""
    import dataclasses

    import jax

    from capibara.compose.physical.sharding import param_shardings
    from capibara.compress.coded import is_coded
    from capibara.errors import ConfigError

    if mesh is None:
        return loaded
    if any(map(is_coded, jax.tree.leaves(loaded.params, is_leaf=is_coded))):
        raise ConfigError(
            f"{path!r}: quantized weights stay in their codes on one device only. Decode them (--decode), or leave "
            "--tensor-parallel out"
        )
    model = loaded.model.on_mesh(mesh)
    model.pretrained, model.tokenizer_files = loaded.model.pretrained, loaded.model.tokenizer_files
    params, state = (
        jax.device_put(tree, param_shardings(tree, axes, mesh, model.backend.rules))
        for tree, axes in ((loaded.params, model.param_axes), (loaded.state, model.state_axes))
    )
    return dataclasses.replace(loaded, model=model, params=params, state=state)


def _trained_further(
    config: ModularModelConfig,
    folder: Path,
    settings: Sequence[str],
    planned: Mapping[str, Any] | None = None,
) -> ModularModelConfig:
    """The settings of a run that goes on from a model of these settings."""
    from capibara.errors import ConfigError

    own = {
        "checkpoint.directory": f"runs/{folder.absolute().name}-trained",
        "train.sequence_length": min(config.model.max_sequence_length, _LONGEST),
        "data.tokenizer": "bytes",
    }
    base = config.with_overrides(_FINETUNING | own).with_overrides(dict(planned or {}))
    chosen = base.with_overrides(list(settings))
    if chosen.data.tokenizer != "bytes":
        raise ConfigError(
            f"data.tokenizer={chosen.data.tokenizer!r} cannot be combined with --model, which has its own. Leave it out"
        )
    return chosen


def named_config(args: argparse.Namespace) -> tuple[ModularModelConfig, str | None]:
    """The settings of ``--model``, a published model, or of ``--config``, with ``key=value``; and its name."""
    from capibara.config import ModularModelConfig

    if args.model is None:
        return ModularModelConfig.from_toml(args.config, args.overrides), args.config
    from capibara.families import read_config

    return read_config(args.model, overrides=args.overrides)[0], None


def further_config(folder: str, settings: Sequence[str]) -> ModularModelConfig:
    """The settings with which ``capibara train --model`` trains a published model; only its config.json is read."""
    from capibara.families import read_config

    return _trained_further(read_config(folder)[0], Path(folder), settings)
