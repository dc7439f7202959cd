"""Which tensors of a folder are quantized, and their codes, scales and zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from capibara.compress.codecs.fixed import INT4, INT8
from capibara.compress.formats import FORMATS, NumberFormat, from_float, to_float
from capibara.compress.models.numbers import to_bits
from capibara.families.compressed.packing import pack_rows, packed_width
from capibara.families.compressed.scheme import RECIPES
from capibara.families.errors import FamilyError
from capibara.families.family import Family

__all__ = ["Codes", "Quantizer"]

# What vLLM's kernels take, the best for weights first.
_GROUPS = (128, 64, 32)
_SHRINK = 0.8, 17  # the smallest scale of a row that is tried, relative to the largest, and how many
_ROWS = 1 << 22  # elements that are quantized at a time

# Families whose matrices, or those of whose experts, are stored in another form than [out, in].
_OTHER_LAYERS = ("gpt2", "gpt_oss")

Tensor = tuple[NumberFormat, tuple[int, ...]]


class Codes(Protocol):
    """Codes that exist already, of tensors by their names in a folder."""

    def layout(self, names: Iterable[str]) -> tuple[int, int] | None:
        """Bits and elements of a group, the same for all of these tensors that have codes; ``None``: they differ."""
        ...

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """int8 [out, in] and float32 [out, groups]; ``None``: it has no codes."""
        ...


class Quantizer:
    """Quantizes the matrices of blocks; embeddings, heads, routers, norms and biases stay as they are.

    Args:
      recipe: a name of :data:`~capibara.families.compressed.scheme.RECIPES`. asymmetric: with zero points.
      family: of the folder. shapes: of all tensors, by name.
      codes: existing ones, which are taken where their layout is that of a whole folder.

    Attributes:
      reused, made: how many matrices left with codes that existed, and with new ones.

    Raises:
      FamilyError: an unknown recipe, or a family without such matrices.
    """

    def __init__(
        self,
        recipe: str,
        family: Family,
        shapes: dict[str, tuple[int, ...]],
        *,
        asymmetric: bool = False,
        codes: Codes | None = None,
    ) -> None:
        if recipe not in RECIPES:
            raise FamilyError(f"quantize: got {recipe!r:.80}, expected one of {', '.join(RECIPES)}")
        if family.name in _OTHER_LAYERS:
            raise FamilyError(
                f"quantize: the matrices of {family.name} are not linear layers for compressed-tensors. Remedy: "
                "another format, or a .capi file"
            )
        self.recipe = RECIPES[recipe]
        if asymmetric and self.recipe.activations:
            raise FamilyError(f"asymmetric cannot be combined with quantize={recipe!r}. Remedy: leave it out")
        self.asymmetric = asymmetric
        self._shapes = {name: shape for name, shape in shapes.items() if _is_linear(name, shape)}
        if not self._shapes:
            raise FamilyError(f"quantize: the models of {family.name} have no linear layers")
        widths = [shape[1] for shape in self._shapes.values()]
        self.group = (
            next((g for g in _GROUPS if all(w % g == 0 for w in widths)), 0) if self.recipe.grouped else 0
        )
        self._codes = None
        found = None if codes is None or asymmetric or not self.recipe.packed else codes.layout(self._shapes)
        bits, group = found or (0, 0)
        if bits == self.recipe.bits and group in _GROUPS and all(width % group == 0 for width in widths):
            self.group, self._codes = group, codes
        self.reused = self.made = 0
        self._last: tuple[str, dict[str, np.ndarray]] | None = None

    def takes(self, name: str) -> bool:
        """Whether a tensor is quantized."""
        return name in self._shapes

    def tensors(self, name: str, form: NumberFormat) -> dict[str, Tensor]:
        """The tensors that stand for one; ``form`` is that of its scales."""
        out, width = self._shapes[name]
        across = width // self.group if self.group else 1
        stem, bits = name.removesuffix("weight"), self.recipe.bits
        found: dict[str, Tensor] = {}
        if self.recipe.packed:
            found[f"{stem}weight_packed"] = FORMATS["I32"], (out, packed_width(width, bits))
        else:
            found[name] = FORMATS["I8"], (out, width)
        found[f"{stem}weight_scale"] = form, (out, across)
        if self.asymmetric:
            found[f"{stem}weight_zero_point"] = FORMATS["I32"], (packed_width(out, bits), across)
        if self.recipe.packed:
            found[f"{stem}weight_shape"] = FORMATS["I64"], (2,)
        return found

    def bits(self, tensor: str, name: str, form: NumberFormat, read: Callable[[], np.ndarray]) -> np.ndarray:
        """The bits of one of :meth:`tensors`; ``read`` gives the matrix, float [out, in]."""
        if self._last is None or self._last[0] != name:
            self._last = name, self._made(name, form, read)
        return self._last[1][tensor]

    def _made(self, name: str, form: NumberFormat, read: Callable[[], np.ndarray]) -> dict[str, np.ndarray]:
        bits, stem = self.recipe.bits, name.removesuffix("weight")
        given = None if self._codes is None else self._codes.codes(name)
        zeros = None
        if given is not None:
            self.reused += 1
            codes, scales = given
            scale_bits = from_float(scales, form)
        else:
            self.made += 1
            matrix = read().astype(np.float32)
            if not np.isfinite(matrix).all():
                raise FamilyError(f"quantize: {name} has values that are not finite. Remedy: another format")
            codes, scale_bits, zeros = self._quantised(matrix, form)
        found = {f"{stem}weight_scale": scale_bits.reshape(-1)}
        if self.recipe.packed:
            found[f"{stem}weight_packed"] = _flat(pack_rows(codes, bits))
            found[f"{stem}weight_shape"] = _flat(np.array(self._shapes[name], "<i8"))
        else:
            found[name] = _flat(codes)
        if zeros is not None:
            found[f"{stem}weight_zero_point"] = _flat(pack_rows(zeros.T, bits).T)
        return found

    def _quantised(
        self, matrix: np.ndarray, form: NumberFormat
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Codes int8 [out, in], bits of scales [out, groups], zero points int8 [out, groups] or ``None``."""
        width = matrix.shape[1]
        group = self.group or width
        if not self.asymmetric and self.recipe.grouped and self.group:
            return *_by_codec(matrix, self.recipe.bits, group, form), None
        step = max(_ROWS // width, 1)
        parts = [
            _by_rows(matrix[first : first + step].reshape(-1, group), self.recipe.bits, form, self.asymmetric)
            for first in range(0, len(matrix), step)
        ]
        codes = np.concatenate([one[0] for one in parts])
        scales = np.concatenate([one[1] for one in parts])
        across = width // group
        if not self.asymmetric:
            return codes.reshape(matrix.shape), scales, None
        zeros = np.concatenate([one[2] for one in parts if one[2] is not None])
        return codes.reshape(matrix.shape), scales, zeros.reshape(-1, across)

    def config(self, mixture: bool) -> dict[str, Any]:
        """The ``quantization_config``."""
        shared = {"dynamic": False, "symmetric": True, "type": "int", "group_size": None}
        strategy = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        weights = shared | {"num_bits": self.recipe.bits, "symmetric": not self.asymmetric} | strategy
        activations = None
        if self.recipe.activations:
            activations = shared | {"num_bits": 8, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "pack-quantized" if self.recipe.packed else "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations,
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head", *(["re:.*\\.gate$"] if mixture else [])],
            "kv_cache_scheme": None,
        }

    def notes(self) -> tuple[str, ...]:
        """How many matrices were quantized and how many kept their codes."""
        if not self.reused:
            return (f"{self.made} matrices were quantized",)
        return (f"{self.reused} matrices kept their existing codes, {self.made} were quantized",)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    in_block = name.startswith("model.layers.")
    return in_block and len(shape) == 2 and name.endswith(".weight") and not name.endswith(".gate.weight")


def _flat(array: np.ndarray) -> np.ndarray:
    return to_bits(np.ascontiguousarray(array).reshape(-1))[0]


def _by_codec(matrix: np.ndarray, bits: int, group: int, form: NumberFormat) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the archive's own codec, with the least squared error of each group."""
    codec, single = (INT4 if bits == 4 else INT8), FORMATS["F32"]
    payload = codec.encode(from_float(matrix.reshape(-1), single), single, matrix.shape, {"group": group})
    parts = codec.parts(memoryview(payload), single, matrix.shape, {})
    return codes_of(parts, bits), from_float(parts.scales, form)


def codes_of(parts: Any, bits: int) -> np.ndarray:
    """int8 [rows, length] of a tensor in an archive's stored form."""
    if bits == 8:
        return parts.codes
    pairs = np.stack([parts.codes & 15, parts.codes >> 4], axis=2).reshape(len(parts.codes), -1)
    return pairs[:, : parts.length].astype(np.int8) - np.int8(8)


def _by_rows(
    rows: np.ndarray, bits: int, form: NumberFormat, asymmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes int8 of rows with a scale each, bits of the scales [rows], and zero points int8 [rows] or ``None``."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if asymmetric:
        least, most = np.minimum(rows.min(1), 0), np.maximum(rows.max(1), 0)
        scale_bits, scale = _rounded((most - least) / (high - low), form)
        zeros = np.clip(np.rint(low - least / scale), low, high)
        codes = np.clip(np.rint(rows / scale[:, None]) + zeros[:, None], low, high)
        return codes.astype(np.int8), scale_bits, zeros.astype(np.int8)
    widest = np.abs(rows).max(1, initial=0) / high
    best = np.full(len(rows), np.inf)
    chosen, chosen_bits = np.empty(rows.shape, np.int8), np.empty(len(rows), form.unsigned)
    for share in np.linspace(1.0, *_SHRINK):
        scale_bits, scale = _rounded(widest * np.float32(share), form)
        codes = np.clip(np.rint(rows / scale[:, None]), low, high)
        error = np.square(codes * scale[:, None] - rows).sum(1, dtype=np.float64)
        better = error < best
        best[better], chosen[better], chosen_bits[better] = error[better], codes[better], scale_bits[better]
    return chosen, chosen_bits, None


def _rounded(scale: np.ndarray, form: NumberFormat) -> tuple[np.ndarray, np.ndarray]:
    """Scales in the format that they are stored in, bits and float32; those of zeros are 1."""
    bits = from_float(scale.astype(np.float32), form)
    found = to_float(bits, form).astype(np.float32)
    bits[found == 0] = from_float(np.ones(1, np.float32), form)
    return bits, np.where(found == 0, np.float32(1), found)
