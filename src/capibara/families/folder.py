"""The files of a model's folder: ``config.json``, and safetensors in one file or several with an index.

Nothing is taken for granted: sizes are bounded before anything is read, names in an index must be those of files in
the folder, and what is stored as pickle is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from capibara.compress.errors import ArchiveError
from capibara.compress.formats import FORMATS
from capibara.compress.safetensors_file import SafetensorsFile, Stored
from capibara.config import ModularModelConfig
from capibara.config.problems import SettingsError
from capibara.families.errors import FamilyError
from capibara.families.family import Family
from capibara.families.keys import Keys
from capibara.families.known import find_family

__all__ = ["CONFIG", "INDEX", "WEIGHTS", "Pretrained", "TensorFiles", "read_config", "read_json"]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_MOST_CONFIG = 16 << 20
_MOST_INDEX = 256 << 20
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float64"}


@dataclass(frozen=True)
class Pretrained:
    """Where a model came from.

    ``to_json`` and ``from_json`` are for a checkpoint's record.

    Attributes:
      family: its family. values: its ``config.json``.
      dtypes: of the tensors as stored, by name, in safetensors' names.
      notes: what its user should know.
    """

    family: Family
    values: Mapping[str, Any]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"config": dict(self.values), "dtypes": dict(self.dtypes)}

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
            or not set(dtypes.values()) <= set(FORMATS)
        ):
            raise FamilyError(f"{where}: does not say in a known form where the model came from")
        return cls(find_family(config.get("model_type"), where), config, dtypes)


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A JSON object from a file of at most ``most`` bytes.

    Raises:
      FamilyError: it is too large, or no JSON object.
      OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > most:
        raise FamilyError(f"{path}: has {size} bytes, expected at most {most}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FamilyError(f"{path}: is not JSON ({error!s:.200})") from None
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
    path = Path(folder)
    path = path if path.name == CONFIG else path / CONFIG
    try:
        values = read_json(path, _MOST_CONFIG)
    except OSError as error:
        raise FamilyError(
            f"{path}: {error.strerror or error}. Expected the folder of a published model, with {CONFIG}"
        ) from None
    family = find_family(values.get("model_type"), path)
    keys = Keys(values, path)
    keys.only("quantization_config", None)
    settings = family.read(keys)
    keys.finish()
    kind = dtype or values.get("dtype") or values.get("torch_dtype") or "float32"
    kind = str(kind).removeprefix("torch.")
    if kind not in _DTYPES:
        raise FamilyError(f"dtype={kind!r:.80} must be one of {', '.join(_DTYPES)}")
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
    return config, Pretrained(family, values, notes=tuple(keys.notes))


class TensorFiles:
    """The safetensors files of a folder, open for reading; use it as a context manager.

    Attributes:
      tensors: name → its file and how it is stored there.

    Raises:
      FamilyError: there are none, or the index does not fit the files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, tuple[SafetensorsFile, Stored]] = {}
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
                    raise FamilyError(f"{error}. Remedy: get the file again") from None
                stack.callback(one.close)
                for tensor, stored in one.tensors.items():
                    if tensor in self.tensors:
                        raise FamilyError(f"{path}: {tensor} is in another file too")
                    self.tensors[tensor] = one, stored
            if expected is not None:
                self._compare(index, expected)
            self._stack = stack.pop_all()

    def _compare(self, index: Path, expected: Mapping[str, str]) -> None:
        for tensor, name in expected.items():
            if tensor not in self.tensors or self.tensors[tensor][0].path.name != name:
                raise FamilyError(f"{index}: says that {tensor} is in {name}, which does not have it")
        if unknown := self.tensors.keys() - expected.keys():
            raise FamilyError(f"{index}: does not say where {min(unknown)} is")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def _index(path: Path) -> dict[str, str]:
    """Tensor → the name of its file."""
    found = read_json(path, _MOST_INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise FamilyError(f"{path}: weight_map: expected an object of names of tensors and their files")
    for tensor, name in found.items():
        # No way out of the folder.
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise FamilyError(
                f"{path}: {tensor}: got {name!r:.200}, expected the name of a .safetensors file"
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
