"""The files of a model's folder: ``config.json``, and safetensors in one file or several with an index.

Nothing is taken for granted: sizes are bounded before anything is read, names in an index must be those of files in
the folder, and what is stored as pickle is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from capibara.compress.container.index import SUFFIX, is_lean
from capibara.compress.errors import ArchiveError
from capibara.compress.formats import FORMATS
from capibara.compress.safetensors_file import SafetensorsFile, Stored
from capibara.config import ModularModelConfig
from capibara.config.problems import SettingsError
from capibara.errors import printable
from capibara.families.compressed.blocks import BlockScheme, BlockTensors
from capibara.families.compressed.scheme import Scheme, read_scheme
from capibara.families.embedding_files import checked_embedding_files
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.gguf.file import is_gguf
from capibara.families.keys import Keys
from capibara.families.known import find_family
from capibara.families.mxfp4 import DECODED, is_mxfp4, unpacked
from capibara.families.tensors import ModelTensors
from capibara.files import read_bounded

__all__ = [
    "CONFIG",
    "INDEX",
    "WEIGHTS",
    "Pretrained",
    "TensorFiles",
    "is_read_from_archives",
    "open_tensors",
    "read_config",
    "read_json",
]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_MOST_CONFIG = 16 << 20
_MOST_INDEX = 64 << 20
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,200}\.safetensors")
_AGAIN = "Remedy: get the file again"
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float64"}


@dataclass(frozen=True)
class Pretrained:
    """Where a model came from.

    ``to_json`` and ``from_json`` are for a checkpoint's record.

    Attributes:
      family: its family. values: its ``config.json``.
      dtypes: of the tensors as stored, by name, in safetensors' names.
      notes: what its user should know.
      scheme: how its folder's weights are quantized; they are decoded when they are read, and ``values`` does not say.
      embedding: name → text of its files of sentence-transformers, if it has such.
    """

    family: Family
    values: Mapping[str, Any]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scheme: Scheme | BlockScheme | None = None
    embedding: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        record: dict[str, Any] = {"config": dict(self.values), "dtypes": dict(self.dtypes)}
        return record | ({"embedding": dict(self.embedding)} if self.embedding else {})

    @classmethod
    def from_json(cls, record: Any, where: object) -> Self:
        """What :meth:`to_json` gave.

        Raises:
          FamilyError: it is not that.
        """
        config, dtypes = (
            record.get(key) if isinstance(record, dict) else None for key in ("config", "dtypes")
        )
        if (
            not isinstance(config, dict)
            or not isinstance(dtypes, dict)
            or not all(isinstance(kind, str) and kind in FORMATS for kind in dtypes.values())
        ):
            raise FamilyError(
                f"{where}: the record of the model's origin has an unknown format. Remedy: import it again"
            )
        try:
            embedding = checked_embedding_files(record.get("embedding", {}))
        except ValueError as error:
            raise FamilyError(
                f"{where}: the record of the model's origin: embedding: {error}. Remedy: import it again"
            ) from None
        return cls(find_family(config.get("model_type"), where), config, dtypes, embedding=embedding)


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A JSON object from a file of at most ``most`` bytes.

    ``Infinity`` and ``NaN``, which are not JSON, become ``{"__float__": "Infinity"}``, as newer files have them.

    Raises:
      FamilyError: it is not a JSON object, or one that would take many times the file's bytes.
      OSError: it cannot be read, is too large, or is not a regular file.
    """
    content = read_bounded(path, most)
    # Parsed, an empty object takes many times its bytes. Strings take little.
    if not is_lean(content, strings=False):
        raise FamilyError(f"{path}: has more objects and lists than a writer makes. {_AGAIN}")
    try:
        value = json.loads(content, parse_constant=lambda name: {"__float__": name})
    except (ValueError, RecursionError) as error:
        raise FamilyError(f"{path}: is not JSON ({error!s:.200}). {_AGAIN}") from None
    if not isinstance(value, dict):
        raise FamilyError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def read_config(
    folder: str | os.PathLike[str], *, dtype: str | None = None, overrides: Any = ()
) -> tuple[ModularModelConfig, Pretrained]:
    """The settings that a folder's ``config.json`` asks for. Nothing else is read.

    Args:
      folder: the folder, or the file.
      dtype: of parameters and arithmetic; by default that of the file, otherwise float32.
      overrides: as for :meth:`~capibara.config.ModularModelConfig.from_toml`.

    Raises:
      FamilyError: no such file, no JSON, an unknown family, or a key that asks for what Capibara does not do.
    """
    path, values, told = _config_values(folder)
    family = find_family(values.get("model_type"), path)
    scheme = None
    if (given := values.get("quantization_config")) is not None:
        values = {key: value for key, value in values.items() if key != "quantization_config"}
        if is_mxfp4(given):
            told = (*told, DECODED)
        else:
            scheme = read_scheme(given, path)
            told = (*told, *scheme.notes)
    keys = Keys(values, path)
    settings = family.read(keys)
    keys.finish()
    kind = dtype or values.get("dtype") or values.get("torch_dtype") or "float32"
    kind = str(kind).removeprefix("torch.")
    if kind not in _DTYPES:
        raise FamilyError(f"{path}: dtype={kind!r:.80} must be one of {', '.join(_DTYPES)}")
    length = settings["max_sequence_length"]
    data = {
        "model": {key: value for key, value in settings.items() if value is not None},
        "precision": {"param_dtype": kind, "compute_dtype": kind}
        | ({"accumulate_dtype": kind} if kind == "float64" else {}),
        "train": {"sequence_length": min(length, 2048)},
    }
    try:
        config = ModularModelConfig.from_dict(data, overrides)
    except SettingsError as error:
        raise FamilyError(f"{path}: {error}") from None
    return config, Pretrained(family, values, notes=(*told, *keys.notes), scheme=scheme)


def _config_values(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], tuple[str, ...]]:
    """Where a model's settings are, what they are, and notes."""
    path = Path(folder)
    if is_gguf(path):
        from capibara.families.gguf.reading import gguf_values

        return path, *gguf_values(path)
    path = path if path.name == CONFIG else path / CONFIG
    try:
        return path, read_json(path, _MOST_CONFIG), ()
    except OSError as error:
        raise FamilyError(
            f"{path}: {error.strerror or error}. Expected the folder of a published model, with {CONFIG}, or a .gguf "
            "file"
        ) from None


def is_read_from_archives(folder: Path) -> bool:
    """Whether a model's weights are those of the folder's archives: it has some, and no safetensors files."""
    return any(folder.glob(f"*{SUFFIX}")) and not any(folder.glob("*.safetensors"))


def open_tensors(folder: str | os.PathLike[str], source: Pretrained) -> ModelTensors:
    """The tensors of a model's folder (of safetensors or archives) or GGUF file; use it as a context manager.

    Args:
      folder: the folder, or the file. source: what :func:`read_config` gave.

    Raises:
      FamilyError: as :class:`TensorFiles`.
    """
    if is_gguf(folder):
        from capibara.families.gguf.reading import GgufTensors

        return GgufTensors(folder)
    path = Path(folder)
    # An archive of a quantized folder has the parts of its matrices, as the folder's own files have them.
    if is_read_from_archives(path):
        from capibara.families.archives import ArchiveTensors

        files: Any = ArchiveTensors(path)
    else:
        files = TensorFiles(path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files)
        if source.scheme is None:
            found = unpacked(files)
        else:
            from capibara.families.compressed.reading import CompressedTensors

            own = source.values.get("dtype") or source.values.get("torch_dtype") or "float32"
            kind = BlockTensors if isinstance(source.scheme, BlockScheme) else CompressedTensors
            found = kind(files, source.scheme, str(own).removeprefix("torch."))  # type: ignore[arg-type]
        stack.pop_all()
    return found


class TensorFiles:
    """The safetensors files of a folder, open for reading; use it as a context manager.

    Attributes:
      tensors: name → its file and how it is stored there.
      dtypes: name → the format in which a folder is to have it, where that is another.

    Raises:
      FamilyError: there are none, or the index does not fit the files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, tuple[SafetensorsFile, Stored]] = {}
        self.dtypes: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            index = self.folder / INDEX
            expected = _index(index) if index.is_file() else None
            for name in [WEIGHTS] if expected is None else sorted(set(expected.values())):
                path = self.folder / name
                if not path.is_file():
                    raise FamilyError(_no_weights(self.folder, name))
                try:
                    one = SafetensorsFile(path)
                except ArchiveError as error:
                    raise FamilyError(f"{error}. {_AGAIN}") from None
                stack.callback(one.close)
                for tensor, stored in one.tensors.items():
                    if tensor in self.tensors:
                        raise FamilyError(
                            f"{path}: {tensor} is in another file too. Remedy: the index's files"
                        )
                    self.tensors[tensor] = one, stored
            if expected is not None:
                self._compare(index, expected)
            self._stack = stack.pop_all()

    def _compare(self, index: Path, expected: Mapping[str, str]) -> None:
        for tensor, name in expected.items():
            if tensor not in self.tensors or self.tensors[tensor][0].path.name != name:
                raise FamilyError(
                    f"{index}: says that {printable(tensor)} is in {name}, which does not have it. {_AGAIN}"
                )
        if unknown := self.tensors.keys() - expected.keys():
            raise FamilyError(f"{index}: does not say where {printable(min(unknown))} is. {_AGAIN}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def _index(path: Path) -> dict[str, str]:
    """Tensor → the name of its file."""
    try:
        found = read_json(path, _MOST_INDEX).get("weight_map")
    except OSError as error:
        raise FamilyError(f"{path}: {error.strerror or error}. {_AGAIN}") from None
    if not isinstance(found, dict) or not found:
        raise FamilyError(f"{path}: weight_map: expected an object of names of tensors and their files")
    for tensor, name in found.items():
        # No way out of the folder.
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise FamilyError(
                f"{path}: {printable(tensor)}: got {name!a:.200}, expected the name of a .safetensors file in the "
                "folder"
            )
    return found


def _no_weights(folder: Path, name: str) -> str:
    text = f"{folder}: has no {name}"
    pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickled:
        return (
            f"{text}, and {pickled[0]} is a pickle, which may run any code when it is read. Remedy: convert it where "
            "you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
        )
    return f"{text}. Expected {WEIGHTS}, or several files and {INDEX}"
