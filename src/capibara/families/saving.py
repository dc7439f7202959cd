"""From a model's parameters to a folder that others load."""

from __future__ import annotations

import json
import math
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
from capibara.config.problems import SettingsError
from capibara.config.sections import ModelSection
from capibara.data import BYTE_VALUES
from capibara.data.tokenizer_file import TOKENIZER_FILES, byte_tokenizer_files
from capibara.families.compressed.writing import Codes, Quantizer
from capibara.families.embedding_files import EMBEDDING_FILES
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

__all__ = ["config_values", "differing", "gathered", "read_settings", "save_folder", "tokenizer_files"]

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_SHARD = 5_000_000_000
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def config_values(model: ModelSection, family: Family) -> dict[str, Any]:
    """The ``config.json`` of a family for settings.

    Raises:
      FamilyError: the family does not have such models; the message says which settings it cannot express.
    """
    try:
        values = family.write(model)
        back = read_settings(family, values, family.name)
    except (FamilyError, SettingsError) as error:
        raise FamilyError(f"family={family.name!r} cannot express these settings ({error})") from None
    if shown := differing(model, back):
        raise FamilyError(f"family={family.name!r} cannot express {shown}")
    # Capibara has no special tokens; what readers would assume may not even be in the vocabulary.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [family.architecture], "model_type": family.name} | special | values


def read_settings(family: Family, values: Mapping[str, Any], where: object) -> ModelSection:
    """The settings for the values of a ``config.json``."""
    return ModelSection(**_without_none(family.read(Keys(values, where))))


def differing(model: ModelSection, other: ModelSection) -> str:
    """The settings of ``model`` that make it another function than ``other``, as a text; empty: none."""
    differ = [key for key in ModelSection.model_fields if _meaning(model, key) != _meaning(other, key)]
    return ", ".join(f"{key}={getattr(model, key)!r:.80}" for key in differ[:6])


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    from capibara.config.sections import ExpertsSection, LatentSection, RopeSection, SSMSection

    found = {key: value for key, value in settings.items() if value is not None}
    if "pattern" in found:
        found["pattern"] = tuple(found["pattern"])
    if "rope" in found:
        found["rope"] = RopeSection(**found["rope"])
    if "latent" in found:
        found["latent"] = LatentSection(**found["latent"])
    if "experts" in found:
        found["experts"] = ExpertsSection(**found["experts"])
    if "ssm" in found:
        found["ssm"] = SSMSection(**found["ssm"])
    return found


# What does not say which function a model is.
_INDIFFERENT = frozenset({"dropout_rate", "remat", "scan_layers", "vq"})
# Nor what is said of layers that a model does not have.
_OF_ATTENTION = frozenset(
    {"num_heads", "num_kv_heads", "head_dim", "max_sequence_length", "qk_norm", "rope_theta"}
)


def _meaning(model: ModelSection, key: str) -> Any:
    if key in _INDIFFERENT:
        return None
    if not model.attends and (key in _OF_ATTENTION or key.startswith("attention_")):
        return None
    if not model.attends and key == "positions":
        return model.positions == "learned"
    if model.mlp == "none" and key in ("mlp_dim", "activation"):
        return None
    if key == "ssm":
        return model.ssm.replace(chunk_size=None) if "ssm" in model.block_kinds else None
    if key == "pattern":
        return model.block_kinds
    if key == "head_dim":
        return model.resolved_head_dim
    if key in ("activation_limit", "activation_alpha") and model.activation != "swiglu_clamped":
        return None
    if key == "mlp_dim":
        return model.resolved_mlp_dim if model.dense_blocks else None
    if key == "experts" and model.experts.count:
        return model.experts.replace(dim=model.resolved_expert_dim)
    if key == "attention_scale":
        return np.float32(model.attention_scale or model.resolved_head_dim**-0.5)
    if key == "tie_embeddings" and model.head == "none":
        return None
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
        # Not every reader knows infinity in the form that `read_json` gives it: as it is written now, or left out.
        infinite = {key for key, value in before.items() if "__float__" in json.dumps(value)}
        before = {
            key: back[key] if key in infinite else value
            for key, value in before.items()
            if key in back or key not in infinite
        }
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
    return not differing(model, read_settings(source.family, source.values, "config.json"))


def save_folder(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    family: str | None = None,
    dtype: str | None = None,
    source: Pretrained | None = None,
    quantize: str | None = None,
    asymmetric: bool = False,
    codes: Codes | None = None,
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
      quantize, asymmetric, codes: matrices of blocks leave in the form of compressed-tensors, as for
        :func:`~capibara.families.save_model`.
      most_bytes: of one file.

    Returns:
      What ``config.json`` says; with ``quantize`` also ``notes``.

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
    quantizer = None
    if quantize is not None:
        shapes = {one.name: one.shape for one in wanted}
        quantizer = Quantizer(quantize, chosen, shapes, asymmetric=asymmetric, codes=codes)
        values["quantization_config"] = quantizer.config(model.config.model.experts.count > 0)
    tensors: dict[str, tuple[NumberFormat, tuple[int, ...]]] = {}
    owners: dict[str, Placed] = {}
    for one in wanted:
        if quantizer is not None and quantizer.takes(one.name):
            own = quantizer.tensors(one.name, kinds[one.name])
        else:
            own = {one.name: (kinds[one.name], one.shape)}
        tensors |= own
        owners |= dict.fromkeys(own, one)

    def bits(name: str) -> np.ndarray:
        one = owners[name]
        kind = kinds[one.name]
        if quantizer is not None and quantizer.takes(one.name):
            return quantizer.bits(name, one.name, kind, lambda: gathered(params, one))
        return gathered(params, one).astype(numpy_dtype(kind)).reshape(-1).view(kind.unsigned)

    files = list(_files(tensors, most_bytes))
    root = Path(folder)
    with OutputFolder(root, {"config": values, "dtypes": names}) as output:
        index: dict[str, str] = {}
        for number, members in enumerate(files):
            name = WEIGHTS if len(files) == 1 else f"model-{number + 1:05}-of-{len(files):05}.safetensors"
            index |= dict.fromkeys(members, name)
            some = {member: tensors[member] for member in members}
            write_safetensors(output.place(root / name)[0], some, bits, {"format": "pt"})
        texts = {CONFIG: values}
        if len(files) > 1:
            total = sum(_bytes(*one) for one in tensors.values())
            texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": index}
        for name, value in texts.items():
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            replace_file(output.place(root / name)[0], text)
        tokenizer = {name: content for name, content in tokenizer_files(model).items() if name != CONFIG}
        embedding = {} if source is None else dict(source.embedding)
        for name, content in {**tokenizer, **embedding}.items():
            replace_file(output.place(root / name)[0], content)
    # Files of an earlier model would be read with these, or instead of them.
    written = {*index.values(), *texts, *tokenizer, *embedding}
    for path in root.glob("*"):
        stale = _WEIGHTS.fullmatch(path.name) or (tokenizer and path.name in TOKENIZER_FILES)
        stale = stale or (embedding and path.name in EMBEDDING_FILES)
        if stale and path.name not in written:
            path.unlink()
    return values if quantizer is None else values | {"notes": quantizer.notes()}


def tokenizer_files(model: ModularCapibaraModel) -> dict[str, bytes]:
    """The files of a model's tokenizer; of one with bytes, files that other programs read."""
    if model.tokenizer_files:
        return dict(model.tokenizer_files)
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


def gathered(params: Mapping[str, Any], one: Placed) -> np.ndarray:
    """The tensor's numbers."""
    found = []
    for piece, path, index, shape, _ in one.parts:
        value = _at(params, path)
        array = np.asarray(value[index] if index else value)
        back = np.argsort(piece.order)
        found.append(array.transpose(tuple(back)).reshape(piece.stored(shape)))
    if one.step > 1:
        return np.stack(found, axis=one.axis + 1).reshape(one.shape)
    return found[0] if len(found) == 1 else np.concatenate(found, axis=one.axis)


def _bytes(kind: NumberFormat, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * kind.bits // 8


def _files(tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]], most: int) -> Iterator[list[str]]:
    """The names in each file."""
    members: list[str] = []
    size = 0
    for name, one in tensors.items():
        own = _bytes(*one)
        if members and size + own > most:
            yield members
            members, size = [], 0
        members.append(name)
        size += own
    yield members
