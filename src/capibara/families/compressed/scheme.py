"""How the weights of a folder are quantized: ``quantization_config`` of its ``config.json``.

``pack-quantized`` has the codes of a matrix [out, in] in 32-bit words, ``int-quantized`` (and ``naive-quantized``) in
bytes. Each group of a row, or each row, has a scale, and a zero point if the scheme is asymmetric:
``weight = (code - zero point) · scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.families.compressed.blocks import BlockScheme, read_block_scheme
from capibara.families.errors import FamilyError

__all__ = ["RECIPES", "Recipe", "Scheme", "read_scheme"]

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_MOST_GROUPS = 4096  # entries of config_groups


@dataclass(frozen=True)
class Scheme:
    """How the weights of a folder are quantized.

    Attributes:
      packed: codes are in 32-bit words. bits: of a code.
      group: elements of a row that share a scale; 0: a row has one; -1: the matrix has one.
      symmetric: there are no zero points.
      notes: what a user should know.
    """

    packed: bool
    bits: int
    group: int
    symmetric: bool = True
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = "a scale per row" if self.group == 0 else "one scale"
        group = f"groups of {self.group}" if self.group > 0 else rest
        return f"compressed-tensors, {self.bits} bits, {group}, {'' if self.symmetric else 'a'}symmetric"


@dataclass(frozen=True)
class Recipe:
    """A scheme that is written.

    Attributes:
      bits: of a weight. grouped: groups have scales of their own. packed: as in :class:`Scheme`.
      activations: 8-bit codes of the activations too, which the reader makes while it computes.
    """

    bits: int
    grouped: bool
    packed: bool
    activations: bool = False


RECIPES = {
    "int4": Recipe(4, grouped=True, packed=True),
    "int8": Recipe(8, grouped=False, packed=True),
    "w8a8": Recipe(8, grouped=False, packed=False, activations=True),
}


def read_scheme(config: Any, where: object) -> Scheme | BlockScheme:
    """The scheme of a ``quantization_config``.

    Raises:
      FamilyError: another method, or a scheme that is not decoded here.
    """
    if not isinstance(config, Mapping):
        raise _wrong(where, "", config, "an object")
    method = config.get("quant_method")
    if method == "fp8":
        return read_block_scheme(config, where)
    if method != "compressed-tensors":
        raise _wrong(where, "quant_method", method, "'compressed-tensors' or 'fp8'")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if (value := config.get(key)) and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _wrong(where, key, value, "none")
    if (format := config.get("format")) not in _FORMATS:
        raise _wrong(where, "format", format, f"one of {', '.join(_FORMATS)}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MOST_GROUPS:
        raise _wrong(where, "config_groups", groups, "an object of groups")
    found = {_group(one, format == "pack-quantized", where) for one in groups.values()}
    if len(found) != 1:
        raise FamilyError(
            f"{where}: quantization_config.config_groups: got {len(found)} schemes of weights, expected one for all"
        )
    return found.pop()


def _group(group: Any, packed: bool, where: object) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _wrong(where, "config_groups", group, "groups with weights")
    if (kind := weights.get("type", "int")) != "int":
        raise _wrong(where, "weights.type", kind, "'int'")
    bits = weights.get("num_bits", 8)
    if type(bits) is not int or bits not in ((2, 3, 4, 5, 6, 7, 8) if packed else (8,)):
        raise _wrong(where, "weights.num_bits", bits, "2 to 8" if packed else "8")
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "group":
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 1 << 31:
            raise _wrong(where, "weights.group_size", size, "an integer of at least 1")
        group_size = size
    elif strategy in ("channel", "tensor"):
        group_size = 0 if strategy == "channel" else -1
    else:
        raise _wrong(where, "weights.strategy", strategy, "group, channel or tensor")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _wrong(where, "weights.symmetric", symmetric, "true or false")
    notes = [f"its weights were quantized to {bits} bits (compressed-tensors) and are decoded"]
    if isinstance(group, Mapping) and group.get("input_activations"):
        notes.append("other programs quantize its activations too, which Capibara does not")
    return Scheme(packed, bits, group_size, symmetric, tuple(notes))


def _wrong(where: object, key: str, got: Any, expected: str) -> FamilyError:
    name = f"quantization_config.{key}" if key else "quantization_config"
    return FamilyError(
        f"{where}: {name}: got {got!r:.200}, expected {expected}. Remedy: the model's weights before "
        "they were quantized"
    )
