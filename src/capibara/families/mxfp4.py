"""Matrices of experts in MXFP4, as gpt-oss is published (OCP Microscaling Formats, version 1.0): decoded when read.

A matrix ``NAME [experts, in, out]`` is stored transposed, as two tensors of bytes: ``NAME_blocks [experts, out, groups,
16]`` with two numbers of four bits (E2M1) in a byte, the lower one first, and ``NAME_scales [experts, out, groups]``
with the exponent that the 32 numbers of a group share (E8M0: 2 to the power of the byte - 127; 255 is NaN). bfloat16
holds every product of the two exactly, but for those of at least 2¹²⁸.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.formats import FORMATS
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.safetensors_file import Stored
from capibara.families.compressed.decoded import DecodedTensors
from capibara.families.entries import Entries
from capibara.families.errors import FamilyError
from capibara.families.tensors import ModelTensors

__all__ = ["DECODED", "Mxfp4Tensors", "decode", "is_mxfp4", "unpacked"]

DECODED = "its experts were stored in 4 bits (MXFP4) and are decoded"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of a group's numbers
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_mxfp4(config: Any) -> bool:
    """Whether a ``quantization_config`` says that matrices are in MXFP4.

    Its list of what is not quantized says nothing that the tensors' names do not say.
    """
    if not isinstance(config, Mapping) or config.get("quant_method") != "mxfp4":
        return False
    return not any(value for key, value in config.items() if key not in _KNOWN)


_KNOWN = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})


@functools.lru_cache(maxsize=1)
def _pairs() -> np.ndarray:
    """The two bfloat16 numbers, as one of 32 bits, of each scale and byte: ``uint32 [65536]``."""
    values = np.asarray([*_VALUES, *(-value for value in _VALUES)], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ldexp(values, np.arange(256)[:, None] - 127)  # [scale, code]
        scaled[255] = np.nan
        bits = scaled.astype(numpy_dtype(FORMATS["BF16"])).view("<u2").astype(np.uint32)
    both = bits[:, None, :] | (bits[:, :, None] << 16)  # [scale, higher, lower]
    return both.reshape(-1)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 numbers ``[*, 32 groups]``.

    Args:
      blocks: ``uint8 [*, groups, 16]``. scales: ``uint8 [*, groups]``.
    """
    places = (scales[..., None].astype(np.uint16) << 8) | blocks
    found = _pairs().astype("<u4")[places].view("<u2")
    return found.reshape(*scales.shape[:-1], 2 * _BYTES * scales.shape[-1])


def unpacked(files: ModelTensors) -> ModelTensors:
    """``files`` with what is in MXFP4 decoded; itself if nothing is.

    Raises:
      FamilyError: blocks and scales do not fit each other.
    """
    return Mxfp4Tensors(files) if any(name.endswith(_BLOCKS) for name in files) else files


class Mxfp4Tensors(DecodedTensors):
    """The tensors of a folder; those in MXFP4 appear as bfloat16."""

    def __init__(self, files: ModelTensors) -> None:
        super().__init__(files)
        for name, (file, stored) in files.tensors.items():
            if name.endswith(_BLOCKS):
                whole = name.removesuffix(_BLOCKS)
                if whole in files.tensors:
                    raise FamilyError(f"{self.folder}: has {whole} and {name}. Remedy: get the folder again")
                self.tensors[whole] = self, self._decoded(whole, stored)
            elif name.removesuffix(_SCALES) + _BLOCKS not in files.tensors:
                self.tensors[name] = file, stored

    def _decoded(self, name: str, blocks: Stored) -> Stored:
        scales = self._files.tensors.get(name + _SCALES)
        found = [(one.form.name, one.shape) for one in (blocks, *(scales[1:] if scales else ()))]
        shape = blocks.shape
        if len(shape) != 4 or shape[3] != _BYTES or 0 in shape or found != [("U8", shape), ("U8", shape[:3])]:
            raise FamilyError(
                f"{self.folder}: {name}: blocks and scales are {found}, expected U8 [experts, out, groups, "
                f"{_BYTES}] and U8 [experts, out, groups]. Remedy: get the folder again"
            )
        experts, out, groups, _ = shape
        return Stored(FORMATS["BF16"], (experts, 2 * _BYTES * groups, out), blocks.start, blocks.end)

    def numbers(self, name: str) -> Any:
        """The bits of a decoded tensor; what a slice asks for is read then."""
        return Entries(functools.partial(self.matrices, name), self.tensors[name][1].shape)

    def matrices(self, name: str, first: int, last: int) -> np.ndarray:
        """The matrices of experts ``first … last - 1``, as bits ``uint16 [experts, in, out]``."""
        _, into, out = self.tensors[name][1].shape
        found = np.empty((last - first, into, out), "<u2")
        for row, expert in enumerate(range(first, last)):
            blocks, scales = (self._entry(name + end, expert) for end in (_BLOCKS, _SCALES))
            found[row] = decode(blocks, scales).T
        return found

    def _entry(self, name: str, expert: int) -> np.ndarray:
        file, stored = self._files.tensors[name]
        size = int(np.prod(stored.shape[1:], dtype=np.int64))
        return np.asarray(file.numbers(name)[expert * size : (expert + 1) * size]).reshape(stored.shape[1:])
