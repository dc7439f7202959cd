"""A model and its trained parameters, wherever they were read from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.families import tokenizer_files_of

if TYPE_CHECKING:
    from capibara.train import Checkpoint

__all__ = ["LoadedModel", "build_model", "take_tokenizer"]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its trained parameters.

    Attributes:
      model: a :class:`capibara.core.ModularCapibaraModel`.
      params, state: its parameters and its non-trained state.
      checkpoint: their source; ``None`` if there is only a compressed file.
    """

    model: Any
    params: Any
    state: Any
    checkpoint: Checkpoint | None


def take_tokenizer(model: Any, folder: str | os.PathLike[str]) -> None:
    """Give a model the tokenizer of a folder or GGUF file, if there is one.

    Raises:
      TokenizerError: a file is too large, or cannot be read.
    """
    if files := tokenizer_files_of(folder):
        model.tokenizer_files = files


def build_model(config: Any) -> Any:
    """Build the model that settings describe.

    Raises:
      ConfigError: they need float64 without JAX's 64-bit mode.
    """
    from capibara.core import ModularCapibaraModel
    from capibara.core.float64 import check_float64

    check_float64(config, "a model of such numbers")
    return ModularCapibaraModel(config)
