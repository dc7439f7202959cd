"""A GGUF file as if it were the folder of a published model: its ``config.json``, its tensors by their names there."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from capibara.compress.formats import FORMATS, from_float, to_float
from capibara.compress.safetensors_file import Stored
from capibara.families.errors import FamilyError
from capibara.families.gguf.file import GgufFile
from capibara.families.gguf.metadata import value_of
from capibara.families.gguf.names import Architecture, find_architecture
from capibara.families.gguf.settings import values_of
from capibara.families.known import find_family

__all__ = ["GgufTensors", "gguf_values"]

_FACTORS = "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def gguf_values(path: str | os.PathLike[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The ``config.json`` of a file, and notes for its user.

    Raises:
      FamilyError: not a GGUF file, a damaged one, or one that asks for what Capibara does not do.
    """
    with GgufFile(path) as file:
        arch = _architecture(file)
        values = {"architectures": [find_family(arch.family, path).architecture]} | _values(file, arch)
        kinds = _kinds(file)
        dtype = next(iter(kinds))
        values["dtype"] = _DTYPES.get(dtype, "bfloat16")
        ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        for theirs, ours in ids.items():
            values[theirs] = value_of(file.metadata, f"tokenizer.ggml.{ours}_token_id", int, path)
    coded = [name for name in kinds if name not in _DTYPES]
    notes = (f"its weights were quantized ({', '.join(coded)}) and are decoded",) if coded else ()
    return values, notes


def _architecture(file: GgufFile) -> Architecture:
    name = value_of(file.metadata, "general.architecture", str, file.path)
    experts = value_of(file.metadata, f"{name}.expert_count", int, file.path)
    return find_architecture(name, bool(experts), file.path)


def _values(file: GgufFile, arch: Architecture) -> dict[str, Any]:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise FamilyError(f"{file.path}: has no tensor token_embd.weight of two dimensions")
    factors = file.tensors.get(_FACTORS)
    if factors is not None and (factors.kind.name != "F32" or len(factors.shape) != 1):
        raise FamilyError(f"{file.path}: {_FACTORS}: expected F32 in one dimension")

    def read() -> np.ndarray:
        return file.read(_FACTORS, 0, file.tensors[_FACTORS].shape[0]).view(np.float32)

    return values_of(
        file.metadata, file.tensors, arch, table.shape[0], file.path, None if factors is None else read
    )


def _kinds(file: GgufFile) -> Counter[str]:
    """Elements in each format, the most frequent first; vectors are always F32 and do not count."""
    found: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            found[tensor.kind.name] += math.prod(tensor.shape)
    return Counter(dict(found.most_common())) or Counter({"F32": 0})


class GgufTensors:
    """The tensors of a GGUF file by their names in a folder, as :class:`~capibara.families.folder.TensorFiles`.

    Tensors with blocks are decoded to float32 when they are read, one at a time.

    Attributes:
      folder: the file. tensors: name → this object, and how the tensor appears.
      dtypes: name → the format in which a folder is to have it.

    Raises:
      FamilyError: not a GGUF file, a damaged one, or one with a tensor that its architecture does not have.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = self.path = Path(path)
        self._file = GgufFile(path)
        try:
            self._arch = _architecture(self._file)
            # What may not be a number of heads is refused here, before any array is taken apart by it.
            values = _values(self._file, self._arch)
            self._heads = {
                "num_heads": values.get("num_attention_heads", 1),
                "num_kv_heads": values.get("num_key_value_heads", 1),
            }
            self.tensors: dict[str, tuple[GgufTensors, Stored]] = {}
            self._places: dict[str, tuple[str, int | None]] = {}
            for name in self._file.tensors:
                if name != _FACTORS:
                    self._add(name)
        except BaseException:
            self._file.close()
            raise
        main = next(iter(_kinds(self._file)))
        self.dtypes = dict.fromkeys(self.tensors, main if main in _DTYPES else "BF16")

    def _add(self, name: str) -> None:
        stored = self._file.tensors[name]
        theirs = self._arch.to_folder(name)
        if theirs is None:
            raise FamilyError(
                f"{self.path}: {self._arch.name} has no place for the tensor {name!a:.80}. Remedy: the model's folder "
                "(Hugging Face)"
            )
        change = self._arch.change(name)
        shape = stored.shape
        if change is not None and change.name == "transposed":
            shape = shape[::-1]
        elif change is not None and change.name == "rotary":
            heads = self._heads[self._arch.heads_of(name)]
            if shape[0] % (2 * heads):
                raise FamilyError(
                    f"{self.path}: {name} has the shape {shape}, expected rows of {heads} heads"
                )
        form = stored.kind.plain or FORMATS["F32"]
        size = math.prod(shape)
        if "{expert}" not in theirs:
            self._put(theirs, Stored(form, shape, 0, size * form.bits // 8), name, None)
            return
        if len(shape) != 3:
            raise FamilyError(
                f"{self.path}: {name} has the shape {shape}, expected three dimensions: experts first"
            )
        each = size // shape[0]
        for expert in range(shape[0]):
            one = Stored(form, shape[1:], 0, each * form.bits // 8)
            self._put(theirs.replace("{expert}", str(expert)), one, name, expert)

    def _put(self, theirs: str, stored: Stored, name: str, expert: int | None) -> None:
        if theirs in self.tensors:
            raise FamilyError(
                f"{self.path}: {name!a:.80} and {self._places[theirs][0]!a:.80} are the same tensor"
            )
        self.tensors[theirs] = self, stored
        self._places[theirs] = name, expert

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def numbers(self, name: str) -> Any:
        """The bits of a tensor: a slice is read when it is taken."""
        return _Numbers(self, name)

    def read_bits(self, name: str, first: int, last: int) -> np.ndarray:
        """Elements ``first … last - 1`` of a tensor that is not changed."""
        stored, expert = self._places[name]
        form, shape = self.tensors[name][1][:2]
        offset = (expert or 0) * math.prod(shape)
        return self._file.values(stored, offset + first, offset + last).view(form.unsigned)

    def is_changed(self, name: str) -> bool:
        """Whether llama.cpp stores this tensor in another form."""
        return self._arch.change(self._places[name][0]) is not None

    def unchanged(self, name: str) -> np.ndarray:
        """All of a tensor's bits, in the form that a folder has."""
        stored, _ = self._places[name]
        change = self._arch.change(stored)
        form, shape = self.tensors[name][1][:2]
        bits = self.read_bits(name, 0, math.prod(shape))
        if change is None:
            return bits
        heads = self._heads[self._arch.heads_of(stored)]
        array = bits.reshape(self._file.tensors[stored].shape)
        if change.name != "offset":
            return np.ascontiguousarray(change.back(array, heads)).reshape(-1)
        return from_float(change.back(to_float(array, form), heads), form).reshape(-1)


class _Numbers:
    """A tensor's bits, as :class:`~capibara.compress.container.file_bytes.FileNumbers`."""

    def __init__(self, files: GgufTensors, name: str) -> None:
        self._files, self._name = files, name
        self._all: np.ndarray | None = None

    def __getitem__(self, part: slice) -> np.ndarray:
        if not self._files.is_changed(self._name):
            return self._files.read_bits(self._name, part.start, part.stop)
        if self._all is None:
            self._all = self._files.unchanged(self._name)
        return self._all[part]
