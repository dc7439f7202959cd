"""From a model's parameters to a GGUF file, through the package ``gguf``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.config.sections import ModelSection
from capibara.errors import MissingExtraError
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.gguf.names import ARCHITECTURES, Architecture, of_family
from capibara.families.gguf.settings import frequency_factors, metadata_of, values_of
from capibara.families.gguf.tokens import tokenizer_metadata
from capibara.families.known import FAMILIES, find_family
from capibara.families.loading import placed_tensors
from capibara.families.saving import differing, gathered, read_settings, tokenizer_files
from capibara.families.tensors import Placed
from capibara.files import NewFile

if TYPE_CHECKING:
    from capibara.core import ModularCapibaraModel

__all__ = ["QUANTIZATIONS", "save_gguf"]

# Name → the package's name of the format, and the file type in the header (llama.h).
QUANTIZATIONS = {
    "f32": ("F32", 0),
    "f16": ("F16", 1),
    "q4_0": ("Q4_0", 2),
    "q8_0": ("Q8_0", 7),
    "bf16": ("BF16", 32),
}
_BLOCK = 32
# Small tensors that llama.cpp wants in float32.
_WIDE = ("ffn_gate_inp.weight", "position_embd.weight")


def save_gguf(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    family: str | None = None,
) -> dict[str, Any]:
    """Write a model as a GGUF file, which appears when it is complete. Adapters are merged into the weights.

    Matrices have the chosen format; rows that are no multiple of 32 stay float16, vectors and routers float32, and with
    ``q4_0`` the head has ``q8_0``.

    Args:
      model: its settings and tokenizer. params: its parameters.
      path: of the file.
      quantize: ``"q8_0"``, ``"q4_0"``, ``"f16"``, ``"bf16"`` or ``"f32"``; by default that of the parameters.
      family: ``"llama"`` …; by default that of ``model.pretrained``, otherwise the first that has such models.

    Returns:
      ``family``, ``architecture`` (llama.cpp's name), ``quantize``, and ``notes``.

    Raises:
      FamilyError: llama.cpp has no such models, or no such tokenizers; the message says which settings.
      MissingExtraError: the package ``gguf`` is not installed.
      OSError: the file cannot be written; what was there is unchanged.
    """
    gguf = _library()
    if model.trainable is not None:
        model = model.merged(params)
        params = model.params
    section = _without_idle_windows(model.config.model)
    arch, chosen = _chosen(section, family, model.pretrained)
    if quantize is None:
        own = str(model.config.precision.param_dtype)
        quantize = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(own, "f32")
    if quantize not in QUANTIZATIONS:
        raise FamilyError(f"quantize: got {quantize!r:.80}, expected one of {', '.join(QUANTIZATIONS)}")
    kind, number = QUANTIZATIONS[quantize]
    tokens, notes = tokenizer_metadata(tokenizer_files(model), section.vocab_size)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The package opens a file by its name.
    with NewFile(path, clean=True) as new:
        writer = gguf.GGUFWriter(new.stream.name, arch.name)
        try:
            writer.add_string("general.type", "model")
            writer.add_string("general.name", path.stem)
            writer.add_file_type(number)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in (metadata_of(section, arch) | tokens).items():
                _add(writer, key, value)
            _write_tensors(gguf, writer, arch, section, placed_tensors(chosen, model), params, kind)
        finally:
            writer.close()
    return {"family": chosen.name, "architecture": arch.name, "quantize": quantize, "notes": notes}


def _library() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "gguf":
            raise
        raise MissingExtraError("gguf", "gguf", "writing GGUF files") from None
    return gguf


def _without_idle_windows(model: ModelSection) -> ModelSection:
    """The same function without windows that no text is longer than."""
    if model.window is None or model.window < model.max_sequence_length:
        return model
    kinds = tuple("attention" if kind == "local" else kind for kind in model.block_kinds)
    return model.replace(pattern=kinds, window=None)


def _chosen(model: ModelSection, family: str | None, source: Any) -> tuple[Architecture, Family]:
    """The architecture that computes the same."""
    if family is not None or source is not None:
        named = source.family.name if family is None else family
        arch = of_family(find_family(named, "family").name)
        if problem := _differing(model, arch):
            raise FamilyError(
                f"llama.cpp's {arch.name} does not support {problem}. Remedy: override the setting if the model "
                "computes the same without it, or choose another format"
            )
        return arch, FAMILIES[named]
    problems = []
    for arch in ARCHITECTURES:
        if not (problem := _differing(model, arch)):
            return arch, FAMILIES[arch.family]
        problems.append(f"{arch.family}: {problem}")
    raise FamilyError(f"no llama.cpp architecture supports these settings ({'; '.join(problems[:3])})")


def _differing(model: ModelSection, arch: Architecture) -> str:
    """The settings that a file of this architecture would not have."""
    names = {"output.weight"} - ({"output.weight"} if model.tie_embeddings else set())
    names |= {"blk.0.attn_q.bias"} if model.attention_bias else set()
    names |= {"blk.0.ffn_up.bias"} if model.mlp_bias else set()
    factors = frequency_factors(model)
    try:
        read = None if factors is None else lambda: factors
        metadata: dict[str, Any] = dict(metadata_of(model, arch))
        values = values_of(metadata, names, arch, model.vocab_size, "GGUF", read)
        back = read_settings(FAMILIES[arch.family], values, "GGUF")
    except FamilyError as error:
        return str(error)
    # Llama's family has one key for all biases of attention.
    return differing(model, back)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(
    gguf: Any,
    writer: Any,
    arch: Architecture,
    model: ModelSection,
    wanted: list[Placed],
    params: Mapping[str, Any],
    kind: str,
) -> None:
    """The header's tensors, then their bytes, one tensor in memory at a time."""
    members: dict[str, list[Placed]] = {}
    for one in wanted:
        members.setdefault(arch.to_file(one.name)[0], []).append(one)
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    factors = frequency_factors(model)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    plans: list[tuple[str, list[Placed], Any]] = []
    for name, parts in members.items():
        shape = parts[0].shape
        change = arch.change(name)
        shape = shape[::-1] if change is not None and change.name == "transposed" else shape
        shape = shape if "{expert}" not in _template(arch, name) else (len(parts), *shape)
        form = gguf.GGMLQuantizationType[_format(name, shape, kind, model.tie_embeddings)]
        block, size = gguf.GGML_QUANT_SIZES[form]
        count = int(np.prod(shape, dtype=np.int64))
        # The package takes shapes in bytes for arrays of bytes, and in elements for others.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count // block * size, raw_dtype=form)
        plans.append((name, parts, form))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name, parts, form in plans:
        changed = _changed(arch, name, heads)
        stacked = "{expert}" in _template(arch, name)
        arrays = (_coded(gguf, changed(gathered(params, one)), form) for one in parts)
        writer.write_tensor_data(np.stack(list(arrays)) if stacked else next(arrays))


def _template(arch: Architecture, name: str) -> str:
    return arch.to_folder(name) or ""


def _changed(arch: Architecture, name: str, heads: Mapping[str, int]) -> Callable[[np.ndarray], np.ndarray]:
    change = arch.change(name)
    count = heads[arch.heads_of(name)]
    if change is None:
        return lambda array: array
    if change.name == "offset":
        return lambda array: change.there(array.astype(np.float32), count)
    return lambda array: np.ascontiguousarray(change.there(array, count))


def _format(name: str, shape: tuple[int, ...], kind: str, tied: bool) -> str:
    if len(shape) == 1 or name.endswith(_WIDE):
        return "F32"
    if not kind.startswith("Q"):
        return kind
    if shape[-1] % _BLOCK:
        return "F16"
    head = name == "output.weight" or (tied and name == "token_embd.weight")
    return "Q8_0" if head else kind


def _coded(gguf: Any, array: np.ndarray, form: Any) -> np.ndarray:
    """The bytes of a tensor."""
    if form.name == str(array.dtype).replace("bfloat16", "BF16"):
        return np.ascontiguousarray(array).view(np.uint8)
    return gguf.quants.quantize(np.ascontiguousarray(array.astype(np.float32)), form)
