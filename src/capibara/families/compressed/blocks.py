"""Folders whose matrices are stored in eight-bit floats with a scale for each block (``quant_method`` ``fp8``).

A matrix [out, in] is E4M3 numbers and ``weight_scale_inv``, float32 [out / rows, in / columns], rounded up: an element
is its number times the scale of its block. Tensors without such scales are stored as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.formats import FORMATS, to_float
from capibara.compress.safetensors_file import Stored
from capibara.families.compressed.decoded import FORMAT_OF_DTYPE, DecodedMatrices
from capibara.families.errors import FamilyError

if TYPE_CHECKING:
    from capibara.families.tensors import ModelTensors

__all__ = ["BlockScheme", "BlockTensors", "read_block_scheme"]

_SCALE = "_scale_inv"
_MOST_BLOCK = 1 << 20


@dataclass(frozen=True)
class BlockScheme:
    """Eight-bit floats with a scale for each block of ``rows`` × ``columns``; ``notes``: what a user should know."""

    rows: int
    columns: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"fp8, blocks of {self.rows} × {self.columns}"


def read_block_scheme(config: Mapping[str, Any], where: object) -> BlockScheme:
    """The scheme of a ``quantization_config`` whose ``quant_method`` is ``fp8``.

    Raises:
      FamilyError: another scheme than that of blocks of E4M3 numbers.
    """

    def wrong(key: str, expected: str) -> FamilyError:
        return FamilyError(
            f"{where}: quantization_config.{key}: got {config.get(key)!r:.200}, expected {expected}. Remedy: the "
            "model's weights before they were quantized"
        )

    if config.get("fmt", "e4m3") != "e4m3":
        raise wrong("fmt", "'e4m3'")
    sizes = config.get("weight_block_size")
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 0 < size <= _MOST_BLOCK for size in sizes)
    ):
        raise wrong("weight_block_size", "two sizes, as [128, 128]")
    known = {"quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert"}
    for key in config.keys() - known:
        if config[key]:
            raise wrong(key, "nothing")
    notes = ["its weights were quantized to 8-bit floats in blocks (fp8) and are decoded"]
    if config.get("activation_scheme"):
        notes.append("other programs quantize its activations too, which Capibara does not")
    return BlockScheme(sizes[0], sizes[1], tuple(notes))


class BlockTensors(DecodedMatrices):
    """The tensors of such a folder.

    Args:
      files: of the folder; closed with this object. scheme: of its ``config.json``.
      dtype: of the model, in which matrices are recorded.

    Raises:
      FamilyError: scales are missing, or do not fit their matrix.
    """

    def __init__(self, files: ModelTensors, scheme: BlockScheme, dtype: str) -> None:
        super().__init__(files)
        self._scheme = scheme
        for name, (file, stored) in files.tensors.items():
            if name.endswith(_SCALE) and name.removesuffix(_SCALE) in files.tensors:
                continue
            if stored.form.name != "F8_E4M3":
                self.tensors[name] = file, stored
                continue
            self._check(name, stored)
            self.tensors[name] = self, Stored(FORMATS["F32"], stored.shape, stored.start, stored.end)
            self.dtypes[name] = FORMAT_OF_DTYPE.get(dtype, "F32")

    def _check(self, name: str, stored: Stored) -> None:
        """A matrix and its scales, before anything is allocated."""
        found = self._files.tensors.get(name + _SCALE)
        if found is None or len(stored.shape) != 2:
            what = (
                "has no scales" if found is None else f"has the shape {stored.shape}, expected two dimensions"
            )
            raise FamilyError(f"{self.folder}: {name}: {what}. Remedy: get the folder again")
        out, width = stored.shape
        shape = -(-out // self._scheme.rows), -(-width // self._scheme.columns)
        if found[1].form.name != "F32" or found[1].shape != shape:
            raise FamilyError(
                f"{self.folder}: {name}{_SCALE}: is {found[1].form.name} {found[1].shape}, expected F32 {shape}. "
                "Remedy: get the folder again"
            )

    def decoded(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows ``first … last - 1`` of a quantized matrix, float32 [rows, in]; one row of blocks after another."""
        (file, stored), (of_scales, scales) = (self._files.tensors[one] for one in (name, name + _SCALE))
        width, across = stored.shape[1], scales.shape[1]
        found = np.empty((last - first, width), np.float32)
        bits, factors = file.numbers(name), of_scales.numbers(name + _SCALE)
        size = self._scheme.rows
        for block in range(first // size, -(-last // size)):
            start, end = max(first, block * size), min(last, (block + 1) * size)
            row = np.asarray(factors[block * across : (block + 1) * across]).view(np.float32)
            values = to_float(np.asarray(bits[start * width : end * width]), stored.form)
            part = values.astype(np.float32).reshape(end - start, width)
            with np.errstate(over="ignore", invalid="ignore"):
                part *= np.repeat(row, self._scheme.columns)[:width]
            found[start - first : end - first] = part
        return found
