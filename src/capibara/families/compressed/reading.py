"""Tensors of a folder of quantized weights, decoded row by row on access."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from capibara.compress.formats import FORMATS, to_float
from capibara.compress.safetensors_file import Stored
from capibara.families.compressed.decoded import FORMAT_OF_DTYPE, DecodedMatrices
from capibara.families.compressed.packing import packed_width, unpack_rows
from capibara.families.compressed.scheme import Scheme
from capibara.families.errors import FamilyError

if TYPE_CHECKING:
    from capibara.families.tensors import ModelTensors

__all__ = ["CompressedTensors"]

_FLOATS = ("F32", "BF16", "F16")
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
# Scales of activations, for readers that quantize these.
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


class CompressedTensors(DecodedMatrices):
    """The tensors of a folder of quantized weights.

    Args:
      files: of the folder; closed with this object. scheme: of its ``config.json``.
      dtype: of the model, in which matrices are recorded.

    Raises:
      FamilyError: a part of a matrix is missing, or does not fit the others.
    """

    def __init__(self, files: ModelTensors, scheme: Scheme, dtype: str) -> None:
        super().__init__(files)
        self._scheme = scheme
        for name, (file, stored) in files.tensors.items():
            stem, dot, last = name.rpartition(".")
            scaled = f"{stem}{dot}weight_scale" in files.tensors
            if scaled and last in _ACTIVATIONS:
                continue
            if last == "weight_packed" or (last == "weight" and scaled):
                whole = f"{stem}{dot}weight"
                if last == "weight_packed" and whole in files.tensors:
                    raise self._wrong(name, f"{whole} is there too")
                shape = self._shape(name, f"{stem}{dot}")
                self.tensors[whole] = self, Stored(FORMATS["F32"], shape, stored.start, stored.end)
                self.dtypes[whole] = FORMAT_OF_DTYPE.get(dtype, "F32")
            elif not (scaled and last in _PARTS):
                self.tensors[name] = file, stored

    def _wrong(self, name: str, what: str) -> FamilyError:
        return FamilyError(f"{self.folder}: {name}: {what}. Remedy: get the folder again")

    def _expect(self, name: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> Stored:
        found = self._files.tensors.get(name)
        if found is None:
            raise self._wrong(name, "is missing")
        stored = found[1]
        if stored.form.name not in kinds or (shapes and stored.shape not in shapes):
            raise self._wrong(
                name,
                f"is {stored.form.name} {stored.shape}, expected {' or '.join(kinds)} "
                f"{' or '.join(map(str, shapes))}",
            )
        return stored

    def _shape(self, name: str, stem: str) -> tuple[int, ...]:
        """The shape of a matrix, its parts checked against each other before anything is allocated."""
        scheme = self._scheme
        stored = self._expect(name, ("I32",) if scheme.packed else ("I8",))
        if len(stored.shape) != 2 or 0 in stored.shape:
            raise self._wrong(name, f"has the shape {stored.shape}, expected two dimensions")
        out, width = stored.shape
        if scheme.packed:
            self._expect(f"{stem}weight_shape", ("I64", "I32"), (2,))
            sizes = self._read(f"{stem}weight_shape").tolist()
            if (
                sizes[0] != out
                or not 0 < sizes[1] <= 32 * width
                or packed_width(sizes[1], scheme.bits) != width
            ):
                raise self._wrong(
                    f"{stem}weight_shape", f"says {sizes}, which does not fit {stored.shape} words"
                )
            width = sizes[1]
        across = self._across(width)
        scales: tuple[tuple[int, ...], ...] = ((out, across),)
        if scheme.group == 0:
            scales = (out, 1), (out,)
        elif scheme.group < 0:
            scales = (1,), (), (1, 1)
        self._expect(f"{stem}weight_scale", _FLOATS, *scales)
        if not scheme.symmetric:
            if scheme.packed and scheme.group >= 0:
                self._expect(f"{stem}weight_zero_point", ("I32",), (packed_width(out, scheme.bits), across))
            else:
                self._expect(f"{stem}weight_zero_point", ("I8",), *scales)
        if f"{stem}weight_g_idx" in self._files.tensors:
            self._expect(f"{stem}weight_g_idx", ("I32",), (width,))
            if scheme.group <= 0:
                raise self._wrong(f"{stem}weight_g_idx", "is for groups, and there are none")
        return out, width

    def _across(self, width: int) -> int:
        return -(-width // self._scheme.group) if self._scheme.group > 0 else 1

    def _read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or rows of it, as it is stored; floats as float32."""
        file, stored = self._files.tensors[name]
        shape, each = stored.shape, math.prod(stored.shape[1:])
        first, last = (0, shape[0] if shape else 1) if rows is None else (rows.start, rows.stop)
        bits = np.asarray(file.numbers(name)[first * each : last * each])
        shape = (last - first, *shape[1:]) if shape else ()
        if stored.form.is_float:
            return to_float(bits, stored.form).astype(np.float32).reshape(shape)
        return bits.view(np.dtype(stored.form.numpy)).reshape(shape)

    def decoded(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows ``first … last - 1`` of a quantized matrix, float32 [rows, in]."""
        scheme, stem = self._scheme, name.removesuffix("weight")
        out, width = self.tensors[name][1].shape
        rows = slice(first, last)
        if scheme.packed:
            codes = unpack_rows(self._read(f"{stem}weight_packed", rows), scheme.bits, width)
        else:
            codes = self._read(name, rows)
        scales = self._of_rows(f"{stem}weight_scale", rows)
        values = codes.astype(np.float32)
        place = self._groups(f"{stem}weight_g_idx", width)
        if not scheme.symmetric:
            zeros = self._zeros(f"{stem}weight_zero_point", out, rows)
            values -= zeros[:, place] if zeros.shape[1] > 1 else zeros
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales[:, place] if scales.shape[1] > 1 else scales
        return values

    def _of_rows(self, name: str, rows: slice) -> np.ndarray:
        """[rows, groups], or one row for all."""
        if self._scheme.group < 0:
            return self._read(name).reshape(1, 1)
        found = self._read(name, rows)
        return found.reshape(len(found), -1)

    def _zeros(self, name: str, out: int, rows: slice) -> np.ndarray:
        if not self._scheme.packed or self._scheme.group < 0:
            return self._of_rows(name, rows).astype(np.float32)
        return unpack_rows(self._read(name).T, self._scheme.bits, out).T[rows].astype(np.float32)

    def _groups(self, name: str, width: int) -> np.ndarray:
        """The group of each column."""
        size = max(self._scheme.group, 1)
        plain = np.arange(width) // size
        if name not in self._files.tensors:
            return plain
        found = self._read(name)
        if (found == -1).any():  # not set
            return plain
        if found.min(initial=0) < 0 or found.max(initial=0) >= self._across(width):
            raise self._wrong(
                name, f"names a group that is not there, expected 0 to {self._across(width) - 1}"
            )
        return found
