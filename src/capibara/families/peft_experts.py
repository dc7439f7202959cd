"""Adapters of experts that PEFT stores for all experts of a layer at once (its ``target_parameters``).

Transformers has the matrices of a layer's experts as one parameter: ``gate_up_proj``, with both of these, and
``down_proj``. An adapter of such a parameter has the tensors ``lora_A [experts * rank, in]`` and ``lora_B [out, rank *
experts]``. Where ``gate`` and ``up`` have adapters of their own, ``gate_up_proj`` has one of twice the rank: the first
half of it is ``gate``'s, and what ``lora_B`` would add to the other matrix is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.families.errors import FamilyError
from capibara.families.family import Family

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["adapted_experts", "is_stacked", "parameter_targets", "read_pair", "stacked_pairs"]

PARAMETERS: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The parameters of a layer's experts, and our matrices in each; PEFT wraps the later ones around the earlier ones."""

_GATE_UP = "gate_up_proj"
_MERGE = "Remedy: merge the adapter with PEFT (merge_and_unload), and import the merged folder"


def is_stacked(family: Family, targets: Collection[str]) -> bool:
    """Whether the adapters of experts are written for all of them at once.

    Otherwise each expert has its own, as folders with a tensor for each expert have them, which older readers know.
    PEFT turns those into the other form, but for ``gate`` and ``up`` only where ``down`` has adapters too.
    """
    adapted = set(targets) & {"gate", "up", "down"}
    return adapted not in ({"down"}, {"gate", "up", "down"}) or any(
        "{expert}" not in rule.name for rule in _expert_rules(family)
    )


def _expert_rules(family: Family) -> list[Any]:
    return [rule for rule in family.inside if any(piece.path == "mlp.gate" for piece in rule.pieces)]


def parameter_targets(values: Mapping[str, Any], family: Family, where: object) -> list[str]:
    """The targets (as in ``finetune.targets``) that ``target_parameters`` of an adapter's settings names.

    Args:
      values: ``adapter_config.json``, whose ``r`` and ``lora_alpha`` are numbers.

    Raises:
      FamilyError: parameters that are not those of the family's experts, or ranks of their own that are not twice the
        adapter's for ``gate_up_proj``.
    """
    given = values.get("target_parameters") or []
    known = list(PARAMETERS) if _expert_rules(family) else []
    names = [str(name).rpartition(".")[2] for name in given] if isinstance(given, list) else []
    if not isinstance(given, list) or not set(names) <= set(known):
        expected = f"some of {', '.join(known)}" if known else f"none: {family.name} has no experts"
        raise FamilyError(f"{where}: target_parameters: got {given!r:.200}, expected {expected}")
    for key, base in (("rank_pattern", values["r"]), ("alpha_pattern", values["lora_alpha"])):
        own = values.get(key) or {}
        if not isinstance(own, Mapping) or any(
            not str(name).replace("\\", "").endswith(f".{_GATE_UP}")
            or isinstance(number, bool)
            or number != 2 * base
            or _GATE_UP not in names
            for name, number in own.items()
        ):
            raise FamilyError(
                f"{where}: {key}: got {own!r:.200}, expected nothing, or {2 * base} (twice that of the others) for "
                f"experts.{_GATE_UP}. {_MERGE}"
            )
    if bool(values.get("rank_pattern")) != bool(values.get("alpha_pattern")):
        raise FamilyError(f"{where}: rank_pattern and alpha_pattern: got one of them, expected both or none")
    return [target for name in PARAMETERS if name in names for target in PARAMETERS[name]]


def adapted_experts(model: ModularCapibaraModel) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Each layer whose experts have adapters: its module, the path of its parameters and its index in their stack."""
    from capibara.core.adapters import factor_names
    from capibara.core.decoder import block_places

    specs = model.compiled.params
    for layer, (prefix, turn) in enumerate(block_places(model.config.model)):
        path = (*prefix, "mlp")
        if any((*path, factor_names(name)[0]) in specs for name in ("gate", "up", "down")):
            yield f"model.layers.{layer}.mlp.experts", path, turn


def _wrapped(targets: Sequence[str]) -> dict[str, str]:
    """Each parameter with adapters, and what stands between its module and the names of its factors."""
    found = [name for name, parts in PARAMETERS.items() if set(parts) & set(targets)]
    return {name: ".base_layer" * (len(found) - 1 - n) for n, name in enumerate(found)}


def stacked_pairs(
    model: ModularCapibaraModel, at: Any, family: Family
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of all experts' adapters, by name, and what an adapter's settings say of them.

    Args:
      at: of a path and an index in a stack, a parameter as an array.
    """
    from capibara.core.adapters import factor_names

    finetune = model.config.finetune
    interleaved = any(rule.interleaved for rule in _expert_rules(family))
    places = _wrapped(finetune.targets)
    tensors: dict[str, np.ndarray] = {}
    for module, path, turn in adapted_experts(model):
        for name, between in places.items():
            parts = PARAMETERS[name]
            mine = [part for part in parts if part in finetune.targets]
            pairs = [[at((*path, one), turn) for one in factor_names(part)] for part in mine]
            experts, _, rank = pairs[0][0].shape
            down = np.concatenate([a for a, _ in pairs], axis=2)  # [experts, in, ranks]
            outs = pairs[0][1].shape[2]
            up = np.zeros((experts, rank * len(mine), len(parts), outs), pairs[0][1].dtype)
            for n, (part, (_, b)) in enumerate(zip(mine, pairs, strict=True)):
                up[:, n * rank : (n + 1) * rank, parts.index(part)] = b
            if interleaved:
                up = up.swapaxes(2, 3)
            key = f"base_model.model.{module}{between}"
            tensors[f"{key}.lora_A.weight"] = down.swapaxes(1, 2).reshape(-1, down.shape[1])
            flat = up.reshape(experts, rank * len(mine), -1).transpose(2, 1, 0)
            tensors[f"{key}.lora_B.weight"] = flat.reshape(flat.shape[0], -1)
    settings: dict[str, Any] = {"target_parameters": [f"mlp.experts.{name}" for name in places]}
    if {"gate", "up"} <= set(finetune.targets):
        settings["rank_pattern"] = {f"mlp.experts.{_GATE_UP}": 2 * finetune.rank}
        settings["alpha_pattern"] = {f"mlp.experts.{_GATE_UP}": 2 * finetune.alpha}
    return tensors, settings


def read_pair(
    module: str,
    targets: Sequence[str],
    family: Family,
    sizes: tuple[int, int, int, int],
    read: Any,
    where: Path,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The factors ``a [experts, in, rank]`` and ``b [experts, rank, out]`` of each adapted matrix of a layer's experts.

    Args:
      module: of the experts. targets: what the adapter's settings name.
      sizes: experts, features of the model, inner features, and the rank.
      read: of a module, a factor (``"A"``, ``"B"``) and shapes, the tensor in one of them.

    Raises:
      FamilyError: an adapter of ``gate_up_proj`` of twice the rank that does not have a half for each matrix.
    """
    experts, embed, hidden, rank = sizes
    interleaved = any(rule.interleaved for rule in _expert_rules(family))
    for name, between in _wrapped(targets).items():
        parts = PARAMETERS[name]
        ins, outs = (hidden, embed) if name == "down_proj" else (embed, hidden * len(parts))
        ranks = [rank] if len(parts) == 1 else [rank, 2 * rank]
        given = f"{module}{between}"
        down = (
            read(given, "A", [(experts * one, ins) for one in ranks]).reshape(experts, -1, ins).swapaxes(1, 2)
        )
        own = down.shape[2]
        up = read(given, "B", [(outs, own * experts)]).reshape(outs, own, experts).transpose(2, 1, 0)
        up = up.reshape(experts, own, *((-1, len(parts)) if interleaved else (len(parts), -1)))
        up = up.swapaxes(2, 3) if interleaved else up
        if own == rank:
            for n, part in enumerate(parts):
                yield part, down, up[:, :, n]
            continue
        halves = slice(0, rank), slice(rank, None)
        if up[:, halves[0], 1].any() or up[:, halves[1], 0].any():
            raise FamilyError(
                f"{where}: {given}: an adapter of {name} of rank {own} whose halves are not those of gate and up. "
                f"{_MERGE}"
            )
        for n, (part, half) in enumerate(zip(parts, halves, strict=True)):
            yield part, down[:, :, half], up[:, half, n]
