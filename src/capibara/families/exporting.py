"""Export formats: a folder, a folder of quantized weights, a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.errors import did_you_mean
from capibara.families.compressed.scheme import RECIPES
from capibara.families.compressed.writing import Codes
from capibara.families.errors import FamilyError
from capibara.families.gguf.file import is_gguf
from capibara.families.gguf.writing import QUANTIZATIONS, save_gguf
from capibara.families.saving import save_folder

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["FORMATS", "save_model"]

FORMATS = ("safetensors", "compressed-tensors", "gguf")


def save_model(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    quantize: str | None = None,
    asymmetric: bool = False,
    family: str | None = None,
    dtype: str | None = None,
    codes: Codes | None = None,
) -> dict[str, Any]:
    """Write a model in one of the forms that others load; adapters are merged into the weights.

    Args:
      model: its settings, tokenizer and source. params: its parameters.
      path: of the folder or the file; it appears when it is complete.
      format: ``"safetensors"``, ``"compressed-tensors"`` or ``"gguf"``; by default GGUF for a path that ends with
        ``.gguf``, otherwise compressed-tensors with ``quantize``, otherwise safetensors.
      quantize: for compressed-tensors ``"int4"``, ``"int8"`` or ``"w8a8"``; for GGUF ``"q8_0"``, ``"q4_0"``,
        ``"f16"``, ``"bf16"`` or ``"f32"``.
      asymmetric: for compressed-tensors: each group has a zero point too.
      family, dtype: as for :func:`~capibara.families.save_folder`; GGUF has no ``dtype``.
      codes: gives codes that exist already, for compressed-tensors.

    Returns:
      ``format``, ``family``, ``dtype``, ``quantize`` and ``notes``.

    Raises:
      FamilyError: the form cannot hold the model, or the arguments do not fit; the message names them.
      OSError: it cannot be written; what was there is unchanged.
    """
    chosen = _format(path, format, quantize)
    known = {"compressed-tensors": tuple(RECIPES), "gguf": tuple(QUANTIZATIONS), "safetensors": ()}[chosen]
    if quantize is not None and quantize not in known:
        hint = did_you_mean(str(quantize), known)
        raise FamilyError(
            f"quantize: got {quantize!r:.80} for format={chosen!r}, expected "
            f"{'one of ' + ', '.join(known) if known else 'none'}.{hint}"
        )
    if asymmetric and chosen != "compressed-tensors":
        raise FamilyError(f"asymmetric cannot be combined with format={chosen!r}. Remedy: leave it out")
    if chosen == "gguf":
        if dtype is not None:
            raise FamilyError("dtype cannot be combined with format='gguf'. Remedy: quantize='bf16' …")
        told = save_gguf(model, params, path, quantize=quantize, family=family)
        return {
            "format": chosen,
            "family": told["family"],
            "dtype": None,
            "quantize": told["quantize"],
            "notes": told["notes"],
        }
    if chosen == "compressed-tensors" and quantize is None:
        raise FamilyError(f"format='compressed-tensors' needs quantize, one of {', '.join(RECIPES)}")
    values = save_folder(
        model,
        params,
        path,
        family=family,
        dtype=dtype,
        source=model.pretrained,
        quantize=quantize,
        asymmetric=asymmetric,
        codes=codes,
    )
    notes = values.pop("notes", ())
    return {
        "format": chosen,
        "family": values["model_type"],
        "dtype": values["dtype"],
        "quantize": quantize,
        "notes": notes,
    }


def _format(path: str | os.PathLike[str], given: str | None, quantize: str | None) -> str:
    if given is None:
        return "gguf" if is_gguf(path) else "safetensors" if quantize is None else "compressed-tensors"
    if given not in FORMATS:
        raise FamilyError(
            f"format: got {given!r:.80}, expected one of {', '.join(FORMATS)}.{did_you_mean(str(given), FORMATS)}"
        )
    if (given == "gguf") != is_gguf(path):
        raise FamilyError(
            f"format={given!r} does not fit {os.fspath(path)!r}: only the name of a GGUF file ends with .gguf"
        )
    return given
