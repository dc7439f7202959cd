"""Published models: folders in the form of Hugging Face, read and written.

A family is one short file: which key of ``config.json`` is which setting of ``[model]``, and which tensor is which
parameter. Both are read in both directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.families.embedding_files import read_embedding_files
    from capibara.families.errors import FamilyError
    from capibara.families.exporting import save_model
    from capibara.families.family import Family
    from capibara.families.folder import Pretrained, TensorFiles, open_tensors, read_config
    from capibara.families.gguf.file import is_gguf
    from capibara.families.gguf.writing import save_gguf
    from capibara.families.known import FAMILIES
    from capibara.families.loading import further_layers, load_params, settled
    from capibara.families.peft import save_adapter
    from capibara.families.published import load_pretrained, tokenizer_files_of
    from capibara.families.saving import config_values, save_folder

__all__ = [
    "FAMILIES",
    "Family",
    "FamilyError",
    "Pretrained",
    "TensorFiles",
    "config_values",
    "further_layers",
    "is_gguf",
    "load_params",
    "load_pretrained",
    "open_tensors",
    "read_config",
    "read_embedding_files",
    "save_adapter",
    "save_folder",
    "save_gguf",
    "save_model",
    "settled",
    "tokenizer_files_of",
]

_HOMES = {
    "embedding_files": ("read_embedding_files",),
    "errors": ("FamilyError",),
    "exporting": ("save_model",),
    "family": ("Family",),
    "folder": (
        "Pretrained",
        "TensorFiles",
        "open_tensors",
        "read_config",
    ),
    "gguf.file": ("is_gguf",),
    "gguf.writing": ("save_gguf",),
    "known": ("FAMILIES",),
    "loading": (
        "further_layers",
        "load_params",
        "settled",
    ),
    "peft": (
        "adapter_settings",
        "load_adapter",
        "save_adapter",
    ),
    "published": ("load_pretrained", "tokenizer_files_of"),
    "saving": (
        "config_values",
        "save_folder",
    ),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
