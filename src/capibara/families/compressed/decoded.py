"""Tensors that are decoded when they are read: what the forms of quantized folders share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from capibara.compress.safetensors_file import Stored
from capibara.families.entries import Entries

if TYPE_CHECKING:
    from capibara.families.tensors import ModelTensors

__all__ = ["FORMAT_OF_DTYPE", "DecodedMatrices", "DecodedTensors"]

FORMAT_OF_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
"""The format in which decoded matrices of a model are recorded, by the dtype that its ``config.json`` names."""


class DecodedTensors(ABC):
    """The tensors of a folder, as :class:`~capibara.families.folder.TensorFiles`; quantized ones appear decoded.

    Args:
      files: of the folder, or of its archives; closed with this object.

    Attributes:
      folder: the folder. tensors: name → a file, or this object, and how the tensor appears.
      dtypes: name → the format in which a folder is to have it, where that is another.
    """

    def __init__(self, files: ModelTensors) -> None:
        self.folder: Path = files.folder
        self.tensors: dict[str, tuple[Any, Stored]] = {}
        self.dtypes: dict[str, str] = {}
        self._files = files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    @abstractmethod
    def numbers(self, name: str) -> Any:
        """The bits of a decoded tensor: they are read when a slice is taken."""


class DecodedMatrices(DecodedTensors):
    """The same, of matrices that are decoded as rows of float32."""

    def numbers(self, name: str) -> Any:
        """The bits of a decoded matrix: rows are read when a slice is taken."""

        def bits(first: int, last: int) -> np.ndarray:
            return self.decoded(name, first, last).view(np.uint32)

        return Entries(bits, self.tensors[name][1].shape)

    @abstractmethod
    def decoded(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows ``first … last - 1`` of a quantized matrix, float32 [rows, in]."""
