"""From a model's parameters to a folder that others load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.formats import FORMATS, NumberFormat
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.output_folder import OutputFolder
from capibara.compress.safetensors_file import write_safetensors
from capibara.config.sections import ModelSection
from capibara.data import BYTE_VALUES
from capibara.data.tokenizer_file import TOKENIZER_FILES, byte_tokenizer_files
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.folder import CONFIG, INDEX, WEIGHTS, Pretrained
from capibara.families.keys import Keys
from capibara.families.known import FAMILIES, find_family
from capibara.families.loading import placed_tensors
from capibara.families.tensors import Placed
from capibara.files import replace_file

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["config_values", "save_folder"]

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_SHARD = 5_000_000_000
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def config_values(model: ModelSection, family: Family) -> dict[str, Any]:
    """The ``config.json`` of a family for settings.

    Raises:
      FamilyError: the family does not have such models; the message says which settings it cannot express.
    """
    values = family.write(model)
    keys = Keys(values, family.name)
    back = ModelSection(**_without_none(family.read(keys)))
    differ = [key for key in ModelSection.model_fields if _meaning(model, key) != _meaning(back, key)]
    if differ:
        shown = ", ".join(f"{key}={getattr(model, key)!r:.80}" for key in differ[:6])
        raise FamilyError(f"family={family.name!r} has no models with {shown}")
    # Capibara has no special tokens; what readers would assume may not even be in the vocabulary.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [family.architecture], "model_type": family.name} | special | values


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    from capibara.config.sections import ExpertsSection, RopeSection

    found = {key: value for key, value in settings.items() if value is not None}
    if "pattern" in found:
        found["pattern"] = tuple(found["pattern"])
    if "rope" in found:
        found["rope"] = RopeSection(**found["rope"])
    if "experts" in found:
        found["experts"] = ExpertsSection(**found["experts"])
    return found


# What does not say which function a model is.
_INDIFFERENT = frozenset({"dropout_rate", "remat", "scan_layers", "ssm", "vq"})


def _meaning(model: ModelSection, key: str) -> Any:
    if key in _INDIFFERENT:
        return None
    if key == "pattern":
        return model.block_kinds
    if key == "head_dim":
        return model.resolved_head_dim
    if key == "mlp_dim":
        return model.resolved_mlp_dim if model.dense_blocks else None
    if key == "experts" and model.experts.count:
        return model.experts.replace(dim=model.resolved_expert_dim)
    if key == "attention_scale":
        return np.float32(model.attention_scale or model.resolved_head_dim**-0.5)
    if key in ("rope_theta", "rope") and model.positions != "rotary":
        return None
    return getattr(model, key)


def _chosen(
    model: ModelSection, family: str | None, source: Pretrained | None
) -> tuple[Family, dict[str, Any]]:
    """The family and its ``config.json``."""
    if family is not None:
        chosen = find_family(family, "family")
        return chosen, config_values(model, chosen)
    if source is not None:
        written = config_values(model, source.family)
        # What it was made of, but for what has another value now.
        back = source.family.write(model)
        before = {key: value for key, value in source.values.items() if key not in ("dtype", "torch_dtype")}
        if _same_settings(source, model):
            return source.family, before
        changed = {key: value for key, value in back.items() if key in before or key not in source.values}
        return source.family, before | changed | {"architectures": written["architectures"]}
    problems = []
    for one in FAMILIES.values():
        try:
            return one, config_values(model, one)
        except FamilyError as error:
            problems.append(str(error))
    raise FamilyError(
        f"no family has models with these settings: {'; '.join(problems[:3])}. Remedy: a .capi archive or a checkpoint "
        "keeps any model"
    )


def _same_settings(source: Pretrained, model: ModelSection) -> bool:
    keys = Keys(source.values, "config.json")
    before = ModelSection(**_without_none(source.family.read(keys)))
    return all(_meaning(before, key) == _meaning(model, key) for key in ModelSection.model_fields)


def save_folder(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    family: str | None = None,
    dtype: str | None = None,
    source: Pretrained | None = None,
    most_bytes: int = _SHARD,
) -> dict[str, Any]:
    """Write ``config.json`` and safetensors as the family's models have them; the folder appears when it is complete.

    Adapters are merged into the weights.

    Args:
      model: its settings. params: its parameters.
      folder: to write.
      family: ``"llama"`` …; by default that of ``source``, otherwise the first that has such models.
      dtype: of the tensors; by default as they were stored in ``source``, otherwise as the parameters are.
      source: where the model came from.
      most_bytes: of one file.

    Returns:
      What ``config.json`` says.

    Raises:
      FamilyError: no family has such models; an unknown dtype.
      OSError: the folder cannot be written; what was there is unchanged.
    """
    if dtype is not None and dtype not in _NAMES:
        raise FamilyError(f"dtype={dtype!r:.80} must be one of {', '.join(_NAMES)}")
    if model.trainable is not None:
        model = model.merged(params)
        params = model.params
    chosen, values = _chosen(model.config.model, family, source)
    wanted = placed_tensors(chosen, model)
    stored = source.dtypes if source is not None and source.family is chosen else {}
    names = {
        one.name: _NAMES[dtype] if dtype else stored.get(one.name, _NAMES[_dtype_of(params, one)])
        for one in wanted
    }
    kinds = {name: FORMATS[kind] for name, kind in names.items()}
    most = max(kinds.values(), key=lambda kind: list(names.values()).count(kind.name)).name
    values["dtype"] = next(ours for ours, theirs in _NAMES.items() if theirs == most)
    placed = {one.name: one for one in wanted}

    def bits(name: str) -> np.ndarray:
        array = _gathered(params, placed[name])
        return array.astype(numpy_dtype(kinds[name])).reshape(-1).view(kinds[name].unsigned)

    files = list(_files(wanted, kinds, most_bytes))
    root = Path(folder)
    with OutputFolder(root, {"config": values, "dtypes": names}) as output:
        index: dict[str, str] = {}
        for number, members in enumerate(files):
            name = WEIGHTS if len(files) == 1 else f"model-{number + 1:05}-of-{len(files):05}.safetensors"
            index |= dict.fromkeys(members, name)
            tensors = {member: (kinds[member], placed[member].shape) for member in members}
            write_safetensors(output.place(root / name)[0], tensors, bits, {"format": "pt"})
        texts = {CONFIG: values}
        if len(files) > 1:
            total = sum(_bytes(one, kinds[one.name]) for one in wanted)
            texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": index}
        for name, value in texts.items():
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            replace_file(output.place(root / name)[0], text)
        tokenizer = _tokenizer(model)
        for name, content in tokenizer.items():
            replace_file(output.place(root / name)[0], content)
    # Files of an earlier model would be read with these, or instead of them.
    written = {*index.values(), *texts, *tokenizer}
    for path in root.glob("*"):
        stale = _WEIGHTS.fullmatch(path.name) or (tokenizer and path.name in TOKENIZER_FILES)
        if stale and path.name not in written:
            path.unlink()
    return values


def _tokenizer(model: ModularCapibaraModel) -> dict[str, bytes]:
    """The files of a model's tokenizer, but for ``config.json``."""
    if model.tokenizer_files:
        return {name: content for name, content in model.tokenizer_files.items() if name != CONFIG}
    if model.pretrained is None and model.config.model.vocab_size >= BYTE_VALUES:
        return byte_tokenizer_files()
    return {}


def _dtype_of(params: Mapping[str, Any], one: Placed) -> str:
    return str(_at(params, one.parts[0][1]).dtype)


def _at(params: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = params
    for key in path:
        value = value[key]
    return value


def _gathered(params: Mapping[str, Any], one: Placed) -> np.ndarray:
    """The tensor's numbers."""
    found = []
    for piece, path, index, shape, _ in one.parts:
        value = _at(params, path)
        array = np.asarray(value[index] if index else value)
        back = np.argsort(piece.order)
        found.append(array.transpose(tuple(back)).reshape(piece.stored(shape)))
    return found[0] if len(found) == 1 else np.concatenate(found, axis=one.axis)


def _bytes(one: Placed, kind: NumberFormat) -> int:
    return int(np.prod(one.shape, dtype=np.int64)) * kind.bits // 8


def _files(wanted: list[Placed], kinds: Mapping[str, NumberFormat], most: int) -> Iterator[list[str]]:
    """The names in each file."""
    members: list[str] = []
    size = 0
    for one in wanted:
        own = _bytes(one, kinds[one.name])
        if members and size + own > most:
            yield members
            members, size = [], 0
        members.append(one.name)
        size += own
    yield members
