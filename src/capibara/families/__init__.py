"""Published models: folders in the form of Hugging Face, read and written.

A family is one short file: which key of ``config.json`` is which setting of ``[model]``, and which tensor is which
parameter. Both are read in both directions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from capibara.data import read_tokenizer_files
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.folder import Pretrained, TensorFiles, read_config
from capibara.families.known import FAMILIES
from capibara.families.loading import load_params
from capibara.families.peft import adapter_settings, load_adapter, save_adapter
from capibara.families.saving import config_values, save_folder

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = [
    "FAMILIES",
    "Family",
    "FamilyError",
    "Pretrained",
    "TensorFiles",
    "config_values",
    "load_params",
    "load_pretrained",
    "read_config",
    "save_adapter",
    "save_folder",
]


def load_pretrained(
    kind: type[ModularCapibaraModel],
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    mesh: Any = None,
    rules: Any = None,
    overrides: Any = (),
    adapter: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ModularCapibaraModel:
    """See :meth:`capibara.core.ModularCapibaraModel.from_pretrained`; ``kind`` is the class of the model."""
    import dataclasses

    config, source = read_config(folder, dtype=dtype, overrides=overrides)
    if adapter is not None:
        config = config.with_overrides(adapter_settings(adapter, source.family))
    with TensorFiles(folder) as files:
        model = kind(config, mesh=mesh, rules=rules)
        params, dtypes = load_params(files, source.family, model, progress=progress)
    params = model.with_adapters(params)
    model.params = params if adapter is None else load_adapter(adapter, source.family, model, params)
    model.pretrained = dataclasses.replace(source, dtypes=dtypes)
    model.tokenizer_files = read_tokenizer_files(folder)
    return model
