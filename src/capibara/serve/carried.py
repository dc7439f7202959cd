"""What a compressed file carries besides parameters, so that it is a whole model: settings, source, tokenizer.

They are in the archive's metadata, which is JSON text: the settings as TOML, the tokenizer's files deflated. A file
from outside is untrusted: what a text inflates to is bounded as the files of a folder are.
"""

from __future__ import annotations

import base64
import binascii
import json
import tomllib
import zlib
from collections.abc import Mapping
from typing import Any

from capibara.compress.errors import DamagedError
from capibara.config import ModularModelConfig
from capibara.data.tokenizer_file import TOKENIZER_FILES
from capibara.families import Pretrained

__all__ = ["carried_config", "carried_source", "carried_tokenizer", "metadata_of_model"]

_CONFIG, _SOURCE, _TOKENIZER = "capibara.config", "capibara.pretrained", "capibara.tokenizer."
_MOST_TOKENIZER = 12 << 20  # characters, with the source's: an archive's index has at most 16 MiB


def metadata_of_model(model: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """The metadata for an archive of a model's parameters, and notes.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel`.
    """
    found = {_CONFIG: model.config.to_toml()}
    if model.pretrained is not None:
        # How tensors were stored is for folders, and as many texts as there are tensors.
        found[_SOURCE] = json.dumps(model.pretrained.to_json() | {"dtypes": {}})
    files = {
        f"{_TOKENIZER}{name}": base64.b64encode(zlib.compress(content)).decode()
        for name, content in model.tokenizer_files.items()
    }
    if sum(map(len, files.values())) + len(found.get(_SOURCE, "")) > _MOST_TOKENIZER:
        return found, ("its tokenizer is too large for the file: use it with --model",)
    return found | files, ()


def carried_config(metadata: Mapping[str, str], path: object) -> ModularModelConfig | None:
    """The settings in an archive's metadata; ``None``: there are none.

    Raises:
      ConfigError: they are not settings of this version.
      DamagedError: they are not TOML.
    """
    if (text := metadata.get(_CONFIG)) is None:
        return None
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DamagedError(f"{path}: its settings are not TOML ({error!s:.200})") from None
    return ModularModelConfig.from_dict(values)


def carried_source(metadata: Mapping[str, str], path: object) -> Pretrained | None:
    """Where the model of an archive came from; ``None``: it does not say.

    Raises:
      FamilyError: it does not say so in a known form.
      DamagedError: it is not JSON.
    """
    if (text := metadata.get(_SOURCE)) is None:
        return None
    try:
        return Pretrained.from_json(json.loads(text), path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError | RecursionError):
            raise DamagedError(f"{path}: the record of the model's origin has an unknown format") from None
        raise


def carried_tokenizer(metadata: Mapping[str, str], path: object) -> dict[str, bytes]:
    """Name → content of the tokenizer's files in an archive's metadata; may be empty.

    Raises:
      DamagedError: a file is not what was written, or too large.
    """
    found = {}
    for name, most in TOKENIZER_FILES.items():
        if (text := metadata.get(f"{_TOKENIZER}{name}")) is None:
            continue
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(base64.b64decode(text, validate=True), most)
        except (binascii.Error, ValueError, zlib.error) as error:
            raise DamagedError(f"{path}: its {name} is damaged ({error!s:.100})") from None
        if not stream.eof:
            raise DamagedError(f"{path}: its {name} is damaged, or larger than {most:,} bytes")
        found[name] = content
    return found
