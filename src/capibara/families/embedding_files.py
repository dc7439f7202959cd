"""What a folder of sentence-transformers says of its vectors: small JSON files beside the model's, kept as text.

``modules.json`` lists modules by the names of their folders, each of which has a ``config.json``. What the files mean
is for :mod:`capibara.serve.pooling`; here they are only read, within bounds and without leaving the folder, and
checked before they are written elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capibara.families.errors import FamilyError
from capibara.files import read_bounded

__all__ = ["EMBEDDING_FILES", "MODULES", "checked_embedding_files", "is_module", "read_embedding_files"]

MODULES = "modules.json"
EMBEDDING_FILES = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
"""Those with fixed names; a module's is ``NAME/config.json``."""

_MOST = 1 << 20
_MOST_MODULES = 16
_AGAIN = "Remedy: the file as it was published with the model"
# Without a dot it is neither the parent of a folder nor the name of one of its files.
_MODULE = re.compile(r"[^./\\\x00-\x1f\x7f\ud800-\udfff]{1,100}")


def read_embedding_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name → text of the files of sentence-transformers in a folder; nothing if it has no ``modules.json``.

    Raises:
      FamilyError: a file is too large, cannot be read or is not UTF-8.
    """
    root, found = Path(folder), {}
    for name in EMBEDDING_FILES:
        text = _text(root / name)
        if name == MODULES and text is None:
            return {}
        found |= {} if text is None else {name: text}
    for module in _modules(found[MODULES]):
        if (text := _text(root / module / "config.json")) is not None:
            found[f"{module}/config.json"] = text
    return found


def checked_embedding_files(files: Any) -> dict[str, str]:
    """The same, from a record that may say anything: names of files elsewhere, other values than texts.

    Raises:
      ValueError: it is not what :func:`read_embedding_files` gives.
    """
    if not isinstance(files, Mapping) or len(files) > len(EMBEDDING_FILES) + _MOST_MODULES:
        raise ValueError("not the files of sentence-transformers")
    for name, text in files.items():
        module, _, own = str(name).partition("/")
        known = name in EMBEDDING_FILES or (is_module(module) and own == "config.json")
        if not known or not isinstance(text, str) or len(text.encode()) > _MOST:
            raise ValueError(f"{name!r:.80} is not a file of sentence-transformers")
    return dict(files)


def is_module(name: object) -> bool:
    """Whether this can be the name of a module's folder."""
    return isinstance(name, str) and _MODULE.fullmatch(name) is not None


def _modules(text: str) -> list[str]:
    """The folders that ``modules.json`` names; of a damaged file none: its reader says what is wrong."""
    try:
        modules = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(modules, list):
        return []
    places = [one.get("path") for one in modules if isinstance(one, dict)]
    names = [place for place in places if isinstance(place, str) and is_module(place)]
    return list(dict.fromkeys(names))[:_MOST_MODULES]


def _text(path: Path) -> str | None:
    try:
        return read_bounded(path, _MOST).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FamilyError(f"{path}: {error.strerror or error}. {_AGAIN}") from None
    except UnicodeDecodeError as error:
        raise FamilyError(f"{path}: is not JSON in UTF-8 ({error!s:.200}). {_AGAIN}") from None
