"""Low-rank adapters in the form of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

import numpy as np

from capibara.compress.errors import ArchiveError
from capibara.compress.formats import FORMATS
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.output_folder import OutputFolder
from capibara.compress.safetensors_file import SafetensorsFile, write_safetensors
from capibara.config.sections import AdapterTarget
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.folder import read_json
from capibara.families.keys import shown_key
from capibara.families.loading import placed_tensors
from capibara.families.peft_experts import (
    adapted_experts,
    is_stacked,
    parameter_targets,
    read_pair,
    stacked_pairs,
)
from capibara.files import replace_file

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "adapter_settings", "load_adapter", "save_adapter"]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG = 1 << 20
_MOST_RANK, _MOST_ALPHA = 65_536, 1e6  # of [finetune]
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias"),
        *("target_parameters", "rank_pattern", "alpha_pattern"),
    }
)
# What says nothing about the numbers that come out, or nothing more than the tensors do.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version"),
        *("revision", "task_type", "runtime_config", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "qalora_group_size", "lora_ga_config", "ensure_weight_tying", "fan_in_fan_out"),
    }
)

Path_ = tuple[str, ...]


def save_adapter(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    family: Family,
    *,
    base: str | None = None,
) -> dict[str, Any]:
    """Write a model's adapters as PEFT reads them.

    Args:
      model: one with ``finetune.method=lora``. params: its parameters.
      folder: to write.
      family: whose names of tensors are used.
      base: ``base_model_name_or_path``, the model that the adapter belongs to.

    Returns:
      What ``adapter_config.json`` says.

    Raises:
      FamilyError: there are no adapters, the family stores several adapted weights in one tensor, or PEFT cannot tell
        its experts from its other feed-forward layers.
      OSError: the folder cannot be written; what was there is unchanged.
    """
    if model.trainable is None:
        raise FamilyError(
            "adapter: the model has none (finetune.method='full'). Remedy: export the whole model"
        )
    from capibara.core.adapters import factor_names

    finetune = model.config.finetune
    _check_experts(model, family)
    tensors: dict[str, np.ndarray] = {}
    modules = set()
    together = is_stacked(family, finetune.targets) and any(True for _ in adapted_experts(model))
    for module, factors, index, _, _ in _adapted(family, model):
        if together and factors[0][-1] != factor_names("weight")[0]:
            continue
        down, up = (np.asarray(_at(params, path)[index]) for path in factors)
        rank = down.shape[-1]
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.reshape(-1, rank).T
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.reshape(rank, -1).T
        modules.add(module.rpartition(".")[2])
    stacked: dict[str, Any] = {}
    if together:
        more, stacked = stacked_pairs(model, lambda path, index: np.asarray(_at(params, path)[index]), family)
        tensors |= more
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": finetune.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **stacked,
    }
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
    form = FORMATS[kinds[model.config.precision.param_dtype]]
    root = Path(folder)
    with OutputFolder(root, values) as output:
        write_safetensors(
            output.place(root / ADAPTER_WEIGHTS)[0],
            {name: (form, tensor.shape) for name, tensor in tensors.items()},
            lambda name: np.ascontiguousarray(tensors[name]).reshape(-1).view(form.unsigned),
            {"format": "pt"},
        )
        text = json.dumps(values, indent=2, allow_nan=False) + "\n"
        replace_file(output.place(root / ADAPTER_CONFIG)[0], text)
    return values


def adapter_settings(folder: str | os.PathLike[str], family: Family) -> dict[str, Any]:
    """The ``[finetune]`` settings of an adapter's folder, as overrides.

    Raises:
      FamilyError: no adapter, a damaged one, or one that asks for what Capibara does not do; the message names the key.
    """
    path = Path(folder) / ADAPTER_CONFIG
    try:
        values = read_json(path, _MOST_CONFIG)
    except OSError as error:
        raise FamilyError(
            f"{path}: {error.strerror or error}. Expected the folder of an adapter (PEFT)"
        ) from None
    if values.get("peft_type") != "LORA":
        raise FamilyError(f"{path}: peft_type: got {values.get('peft_type')!r:.80}, expected 'LORA'")
    if values.get("bias", "none") != "none":
        raise FamilyError(f"{path}: bias: got {values['bias']!r:.80}, expected 'none'")
    for key, value in values.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value:
            raise FamilyError(
                f"{path}: {shown_key(key)}: got {value!r:.80}, which Capibara does not do. Remedy: merge the adapter "
                "with PEFT (merge_and_unload), and import the merged folder"
            )
    rank, alpha, names = values.get("r"), values.get("lora_alpha"), values.get("target_modules")
    if type(rank) is not int or not 0 < rank <= _MOST_RANK or not _is_number(alpha) or alpha == 0:
        raise FamilyError(
            f"{path}: r, lora_alpha: got {rank!r:.40}, {alpha!r:.40}, expected positive numbers, and a rank of at most "
            f"{_MOST_RANK:,}"
        )
    dropout = values.get("lora_dropout", 0.0)
    if not _is_number(dropout) or not dropout < 1:
        raise FamilyError(f"{path}: lora_dropout: got {dropout!r:.40}, expected a number from 0 to below 1")
    rescaled = values.get("use_rslora", False)
    if not isinstance(rescaled, bool):
        raise FamilyError(f"{path}: use_rslora: got {rescaled!r:.40}, expected true or false")
    known = {
        rule.name.removesuffix(".weight").rpartition(".")[2]: target
        for rule in family.inside
        for piece in rule.pieces
        if rule.name.endswith(".weight") and (target := _target(piece.path)) is not None
    }
    targets = parameter_targets(values, family, path)
    if (names is None or names == []) and targets:
        names = []
    elif (
        not isinstance(names, list) or not names or not all(isinstance(n, str) and n in known for n in names)
    ):
        raise FamilyError(
            f"{path}: target_modules: got {names!r:.200}, expected some of {', '.join(known)}: weights of "
            f"{family.name}'s blocks"
        )
    if rescaled:  # alpha / sqrt(rank) (arXiv:2312.03732)
        alpha = alpha * rank**0.5
    return {
        "finetune.method": "lora",
        "finetune.rank": rank,
        "finetune.alpha": float(alpha),
        "finetune.dropout": float(dropout),
        "finetune.targets": list(dict.fromkeys([*(known[name] for name in names), *targets])),
    }


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number from 0 to the largest that settings have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_ALPHA


def load_adapter(
    folder: str | os.PathLike[str], family: Family, model: ModularCapibaraModel, params: Mapping[str, Any]
) -> dict[str, Any]:
    """A model's parameters with the adapters of a folder.

    Args:
      folder: of the adapter. family: of the model.
      model: made with :func:`adapter_settings`. params: all of it; the adapters are replaced.

    Raises:
      FamilyError: tensors are missing, unknown or of another shape.
    """
    import jax

    from capibara.core.adapters import factor_names

    path = Path(folder) / ADAPTER_WEIGHTS
    try:
        file = SafetensorsFile(path)
    except ArchiveError as error:
        raise FamilyError(f"{error}. Remedy: get the file again") from None
    except OSError as error:
        raise FamilyError(
            f"{path}: {error.strerror or error}. Pickled adapters (.bin) are not read"
        ) from None
    with file:
        given: dict[tuple[str, str], str] = {}
        for name in file.tensors:
            found = _NAME.fullmatch(name)
            if found is None:
                raise FamilyError(
                    f"{path}: unknown tensor {name!r:.200}, expected base_model.model.….lora_A.weight"
                )
            given[found[1], found[2]] = name
        flat = {name: np.array(leaf) for name, leaf in _adapters(params)}
        rank = model.config.finetune.rank

        def read(module: str, part: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
            """One factor of an adapter, in one of these shapes."""
            if (stored := given.pop((module, part), None)) is None:
                raise FamilyError(
                    f"{path}: has no lora_{part} of {module}. Remedy: the {ADAPTER_CONFIG} that was saved with it"
                )
            form, shape, _, _ = file.tensors[stored]
            if shape not in shapes or not form.is_float or form.bits < 16:
                raise FamilyError(
                    f"{path}: {stored} is {form.name} {shape}, expected floating-point numbers "
                    f"{' or '.join(map(str, shapes))}"
                )
            return file.read(stored).view(numpy_dtype(form)).reshape(shape)

        done: set[Path_] = set()
        config = read_json(Path(folder) / ADAPTER_CONFIG, _MOST_CONFIG)
        if config.get("target_parameters"):
            stacked = parameter_targets(config, family, Path(folder) / ADAPTER_CONFIG)
            mixture = model.config.model
            sizes = mixture.experts.count, mixture.embed_dim, mixture.resolved_expert_dim, rank
            for module, place, turn in adapted_experts(model):
                for name, *factors in read_pair(module, stacked, family, sizes, read, path):
                    for one, values in zip(factor_names(name), factors, strict=True):
                        flat[(*place, one)][turn] = values.astype(flat[(*place, one)].dtype)
                        done.add((*place, one))
        for module, factors, index, ins, outs in _adapted(family, model):
            if factors[0] in done:
                continue
            for part, shape, place in zip("AB", ((rank, ins), (outs, rank)), factors, strict=True):
                target = flat[place]
                values = read(module, part, [shape]).T
                target[index] = values.astype(target.dtype).reshape(target[index].shape)
        if given:
            raise FamilyError(
                f"{path}: {next(iter(given))[0]:.200} has no adapter in this model, expected the weights that "
                f"target_modules of {ADAPTER_CONFIG} names"
            )

    def replaced(at: Any, leaf: Any) -> Any:
        key = tuple(jax.tree_util.keystr((one,), simple=True) for one in at)
        return jax.device_put(flat[key], leaf.sharding) if key in flat else leaf

    return jax.tree_util.tree_map_with_path(replaced, dict(params))


def _adapters(params: Mapping[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    from capibara.core.adapters import is_adapter

    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _adapters(value, (*path, key))
        elif is_adapter((key,)):
            yield (*path, key), value


def _check_experts(model: ModularCapibaraModel, family: Family) -> None:
    """Refuse adapters of experts beside others with the same names of modules: PEFT would leave these out."""
    mixture = model.config.model.experts
    if any(True for _ in adapted_experts(model)) and (mixture.shared_dim or mixture.first_dense):
        raise FamilyError(
            f"family={family.name!r}: experts have adapters, and so have feed-forward layers that all tokens use; PEFT "
            "does not tell them apart. Remedy: export the merged model, without --adapter, or train adapters of "
            "attention alone (finetune.targets)"
        )


def _target(path: str) -> str | None:
    """The target that a weight is, by its path in its block: ``attention.query.weight``; ``mlp.gate`` of experts."""
    names = path.removesuffix(".weight").split(".")
    return names[-1] if names[-1] in get_args(AdapterTarget) else None


def _adapted(
    family: Family, model: ModularCapibaraModel
) -> Iterator[tuple[str, tuple[Path_, Path_], tuple[int, ...], int, int]]:
    """Each adapted weight of each block and expert: module, paths of its factors, index in their stacks, sizes."""
    from capibara.core.adapters import factor_names

    specs = model.compiled.params
    for placed in placed_tensors(family, model):
        if not placed.name.endswith(".weight"):
            continue  # a parameter of all experts
        for _, path, index, _, _ in placed.parts:
            down, up = ((*path[:-1], name) for name in factor_names(path[-1]))
            if down not in specs:
                continue
            if len(placed.parts) > 1:
                raise FamilyError(
                    f"family={family.name!r}: {placed.name} holds several adapted weights, which PEFT has one adapter "
                    "for. Remedy: export the merged model, without --adapter"
                )
            ins, outs = (specs[one].sizes({}, "a parameter") for one in (down, up))
            sizes = int(np.prod(ins[len(index) : -1])), int(np.prod(outs[len(index) + 1 :]))
            yield placed.name.removesuffix(".weight"), (down, up), index, *sizes


def _at(params: Mapping[str, Any], path: Path_) -> Any:
    value: Any = params
    for key in path:
        value = value[key]
    return value
