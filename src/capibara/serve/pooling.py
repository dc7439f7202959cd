"""How hidden states become one vector of a text, and what a folder of sentence-transformers says of it.

Such a folder has ``modules.json``: the model, the pooling, and perhaps a normalisation, one after another. Other
modules are refused by name. The files are untrusted: sizes are bounded, and no path leads out of the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import ConfigError
from capibara.families.embedding_files import MODULES, is_module, read_embedding_files

if TYPE_CHECKING:
    import jax

__all__ = ["POOLINGS", "EmbeddingSettings", "embedding_settings", "pool", "read_embedding_settings"]

POOLINGS = ("mean", "cls", "last", "max")
"""The mean of a text's states, the first, the last, or the maximum of each feature."""

# What a module has to say of pooling, in both forms of its file.
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a folder's vectors are made.

    Attributes:
      pooling: one of :data:`POOLINGS`. normalise: to length 1.
      max_length: tokens of a text; None: as many as the model reads. lower: texts become lower case before.
      prompts: name → what is put before texts. prompt: the name of the one that is used by default.
    """

    pooling: str = "mean"
    normalise: bool = False
    max_length: int | None = None
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None


def pool(
    hidden: jax.Array,
    texts: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    pooling: str,
    normalise: bool,
) -> jax.Array:
    """Vectors ``[texts, embed]`` in float32, of hidden states of rows that hold several texts each.

    Args:
      hidden: ``[rows, sequence, embed]``.
      texts: which text each token belongs to, ``int [rows, sequence]``; -1: padding.
      starts: where each text begins, counted over all rows; lengths: its tokens; ``int [texts]`` both. Of a text
        without tokens the vector is 0.
      pooling: one of :data:`POOLINGS`. normalise: to length 1.
    """
    import jax
    import jax.numpy as jnp

    flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
    own, count = texts.reshape(-1), lengths[:, None]
    if pooling in ("mean", "max"):
        # What is not finite reaches no other text; padding is a text of its own, which is left out.
        others = jnp.where(own < 0, len(lengths), own)
        combined = jax.ops.segment_sum if pooling == "mean" else jax.ops.segment_max
        out = combined(flat, others, len(lengths) + 1)[:-1]
        if pooling == "mean":
            out = out / jnp.maximum(count, 1)
    else:
        out = flat[starts if pooling == "cls" else starts + jnp.maximum(lengths - 1, 0)]
    out = jnp.where(count > 0, out, 0)
    if normalise:
        out = out / jnp.maximum(jnp.linalg.norm(out, axis=1, keepdims=True), 1e-12)
    return out


def read_embedding_settings(folder: str | os.PathLike[str]) -> EmbeddingSettings | None:
    """What a folder says of its vectors; None if it has no ``modules.json``.

    Raises:
      ConfigError: a file is damaged, or asks for what Capibara does not do.
    """
    return embedding_settings(read_embedding_files(folder), folder)


def embedding_settings(files: Mapping[str, str], folder: str | os.PathLike[str]) -> EmbeddingSettings | None:
    """As :func:`read_embedding_settings`, of files that were read before; ``folder`` is for messages.

    Args:
      files: name → text, as :attr:`capibara.families.Pretrained.embedding`.
    """
    root = Path(folder)
    said = {root / name: text for name, text in files.items()}
    where = root / MODULES
    modules = _json(said, where)
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"{where}: expected a list of objects")
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{where}: got the modules {kinds!s:.200}, expected Transformer, Pooling and perhaps Normalize; others "
            "are not supported"
        )
    if modules[0].get("path") not in ("", None):
        raise ConfigError(f"{where}: the Transformer is in {modules[0].get('path')!r:.80}. Give that folder")
    place = modules[1].get("path")
    if not is_module(place):
        raise ConfigError(f"{where}: Pooling: path: got {place!r:.80}, expected the name of a folder in it")
    model = _object(said, root / "sentence_bert_config.json")
    known = _object(said, root / "config_sentence_transformers.json")
    pooling = _pooling(said, root / place / "config.json")
    length = model.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ConfigError(f"{root / 'sentence_bert_config.json'}: max_seq_length: got {length!r:.80}")
    prompts, prompt = known.get("prompts") or {}, known.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(
            f"{root / 'config_sentence_transformers.json'}: prompts: expected an object of texts"
        )
    if prompt is not None and prompt not in prompts:
        raise ConfigError(
            f"{root / 'config_sentence_transformers.json'}: default_prompt_name: got {prompt!r:.80}, expected one of "
            f"{', '.join(prompts)!s:.200}"
        )
    lower = model.get("do_lower_case") is True
    return EmbeddingSettings(pooling, len(kinds) == 3, length, lower, prompts, prompt)


def _pooling(said: Mapping[Path, str], path: Path) -> str:
    values = _object(said, path)
    named = values.get("pooling_mode")
    if named is not None:
        chosen = [_NAMES.get(named)] if isinstance(named, str) else [None]
        asked: list[Any] = [named]
    else:
        asked = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
        chosen = [_MODES.get(key) for key in asked]
    if len(chosen) != 1 or chosen[0] is None:
        raise ConfigError(
            f"{path}: got the pooling {asked!s:.200}, expected one of {', '.join(_MODES)}. Others are not "
            "supported"
        )
    if values.get("include_prompt", True) is not True:
        raise ConfigError(f"{path}: include_prompt: got {values['include_prompt']!r:.80}, expected true")
    return chosen[0]


def _object(said: Mapping[Path, str], path: Path) -> dict[str, Any]:
    value = _json(said, path)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def _json(said: Mapping[Path, str], path: Path) -> Any:
    if path not in said:
        return None
    try:
        return json.loads(said[path])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error!s:.200})") from None
