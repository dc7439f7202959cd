"""The models that a verb's arguments name: settings, published folders, runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.data import Tokenizer
    from capibara.train import Origin

__all__ = ["named_config", "start_from", "warn_on_stderr"]


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


def start_from(path: str, settings: Sequence[str]) -> tuple[ModularModelConfig, Tokenizer, Origin]:
    """What a run needs that goes on from a model.

    Args:
      path: the folder of a published model, or of a run.
      settings: ``key=value``, over those of the model and those for training further.

    Returns:
      Its settings, the tokenizer, and its first parameters.

    Raises:
      ConfigError: there is no model, or one without a tokenizer.
    """
    import jax

    from capibara.core import ModularCapibaraModel
    from capibara.errors import ConfigError
    from capibara.families import Pretrained, load_params, read_config
    from capibara.families.folder import CONFIG, TensorFiles
    from capibara.serve.load import find_checkpoint, load_model, take_tokenizer
    from capibara.train import Origin
    from capibara.train.checkpoint import SOURCE

    folder = Path(path)
    own: dict[str, Any] = {"checkpoint.directory": f"runs/{folder.absolute().name}-trained"}

    def settled(config: ModularModelConfig) -> ModularModelConfig:
        length = min(config.model.max_sequence_length, _LONGEST)
        base = config.with_overrides(
            _FINETUNING | own | {"train.sequence_length": length, "data.tokenizer": "bytes"}
        )
        chosen = base.with_overrides(list(settings))
        if chosen.data.tokenizer != "bytes":
            raise ConfigError(
                f"data.tokenizer={chosen.data.tokenizer!r} cannot be combined with --model, which has its own. Leave "
                "it out"
            )
        return chosen

    record: list[Any] = [None]
    if not (folder / CONFIG).is_file():
        checkpoint = find_checkpoint(folder, warn=warn_on_stderr)
        loaded = load_model(checkpoint)
        config = settled(loaded.model.config.with_overrides({"finetune.method": "full"}))

        def cast(model: Any) -> Any:
            kind = model.config.precision.param_dtype
            merged = loaded.model.merged(loaded.params).params
            return model.with_adapters(jax.tree.map(lambda leaf: leaf.astype(kind), merged))

        return config, loaded.model.tokenizer, Origin(cast, lambda: checkpoint.meta.get(SOURCE))

    read, source = read_config(folder)

    def load(model: Any) -> Any:
        with TensorFiles(folder) as files:
            params, dtypes = load_params(files, source.family, model)
        record[0] = Pretrained(source.family, source.values, dtypes).to_json()
        return model.with_adapters(params)

    published = ModularCapibaraModel(read)
    published.pretrained = source
    take_tokenizer(published, folder)
    return settled(read), published.tokenizer, Origin(load, lambda: record[0])


def named_config(args: argparse.Namespace) -> tuple[ModularModelConfig, str | None]:
    """The settings of ``--model``, a published folder, or of ``--config``, with ``key=value``; and its name."""
    from capibara.config import ModularModelConfig

    if args.model is None:
        return ModularModelConfig.from_toml(args.config, args.overrides), args.config
    from capibara.families import read_config

    return read_config(args.model, overrides=args.overrides)[0], None
