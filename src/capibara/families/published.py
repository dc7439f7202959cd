"""A published model with its parameters, and its tokenizer's files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from capibara.data import read_tokenizer_files
from capibara.families.embedding_files import read_embedding_files
from capibara.families.folder import open_tensors, read_config
from capibara.families.gguf.file import is_gguf
from capibara.families.gguf.tokens import gguf_tokenizer_files
from capibara.families.loading import further_layers, load_params, settled
from capibara.families.peft import adapter_settings, load_adapter

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel
    from capibara.families.on_host import Packed

__all__ = ["load_pretrained", "tokenizer_files_of"]


def tokenizer_files_of(model: str | os.PathLike[str]) -> dict[str, bytes]:
    """Name → content of the tokenizer's files of a model's folder or GGUF file; nothing if it has no tokenizer.

    Raises:
      TokenizerError, FamilyError: a file is damaged or too large.
    """
    return gguf_tokenizer_files(model)[0] if is_gguf(model) else read_tokenizer_files(model)


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
    packing: Callable[[], Mapping[tuple[str, ...], Packed]] | None = None,
) -> ModularCapibaraModel:
    """See :meth:`capibara.core.ModularCapibaraModel.from_pretrained`; ``kind`` is the class of the model.

    With ``packing``, parameters that it names, when it is called, may be of another form, which an engine alone reads:
    :func:`~capibara.families.load_params`.
    """
    config, source = read_config(folder, dtype=dtype, overrides=overrides)
    embedding = read_embedding_files(folder)
    if adapter is not None:
        config = config.with_overrides(adapter_settings(adapter, source.family))
    with open_tensors(folder, source) as files:
        left_out = further_layers(source)
        config, source = settled(files, config, source)
        model = kind(config, mesh=mesh, rules=rules)
        how = {"left_out": left_out, "progress": progress, "packing": packing and packing()}
        params, dtypes = load_params(files, source.family, model, **how)
    params = model.with_adapters(params)
    model.params = params if adapter is None else load_adapter(adapter, source.family, model, params)
    model.pretrained = dataclasses.replace(source, dtypes=dtypes, embedding=embedding)
    model.tokenizer_files = tokenizer_files_of(folder)
    return model
