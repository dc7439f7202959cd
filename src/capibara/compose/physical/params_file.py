"""Parameters of a compiled model in a file: safetensors, with dotted names.

The format is a JSON header and raw bytes, so that reading a file runs no code. The header carries
``format = "capibara.compose.params"`` and ``version = "1"``. Files are untrusted: the size is limited by what the
model needs, and names, shapes and dtypes must match the model.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from capibara.compose.errors import InputError, MissingFileError
from capibara.compose.physical.checks import check_unknown
from capibara.compose.physical.specs import ArraySpec, nest, shape_text
from capibara.errors import MissingExtraError, did_you_mean
from capibara.files import replace_file

__all__ = ["VERSION", "file_to_read", "file_to_write", "load_params", "save_params"]

VERSION = "1"
_FORMAT = "capibara.compose.params"
_HEADER_LIMIT = 64 << 20
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Path = tuple[str, ...]


def _path(path: Any) -> FilePath:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise InputError(f"path={path!r:.80} must be the name of a file") from None
    if not name or "\0" in name:
        raise InputError(f"path={name!r:.80} is not a name for a file")
    return FilePath(name)


def file_to_read(path: Any) -> FilePath:
    """The path of an existing file.

    Raises:
        MissingFileError: it does not exist. InputError: it is not a regular file, or not a path.
    """
    file = _path(path)
    if file.is_file():
        return file
    if file.exists():
        raise InputError(f"{str(file)!r} is not a file")
    raise MissingFileError(f"there is no file {str(file)!r}")


def file_to_write(path: Any) -> FilePath:
    """A file that may be there or not, in a folder that is.

    Raises:
        MissingFileError: the folder is not. InputError: it is a folder itself, or no name.
    """
    file = _path(path)
    if file.is_dir():
        raise InputError(f"{str(file)!r} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise MissingFileError(f"there is no folder {str(file.parent)!r}")
    return file


def _library() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise MissingExtraError("safetensors", "train", "Saving and loading parameters") from None
    return safetensors


def save_params(
    path: str | os.PathLike[str],
    params: Mapping[str, Any],
    specs: Mapping[Path, ArraySpec],
    left_out: Iterable[Path] = (),
) -> None:
    """Write parameters, all or nothing: the file at ``path`` is the old one or the whole new one.

    Args:
        path: of the file, in a folder that exists. params: nested dict of arrays. specs: what the model has.
        left_out: what may be there, and is not written.

    Raises:
        InputError: parameters are missing, unknown or of another shape or dtype; ``path`` is not a name for a file.
        MissingFileError: there is no such folder. MissingExtraError: safetensors is missing.
    """
    library = _library()
    path = file_to_write(path)
    check_unknown("params", params, nest(dict.fromkeys((*specs, *left_out))))
    arrays = {}
    for place, spec in specs.items():
        value: Any = params
        for key in place:
            if not isinstance(value, Mapping) or key not in value:
                raise InputError(
                    f"params has no {'.'.join(place)!r}: pass parameters as from randomize_params()"
                )
            value = value[key]
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # of which NumPy knows nothing; float32 holds it exactly
                value = value.float().numpy().astype(_dtype("bfloat16"))
        data = np.asarray(value)
        _check_shape(f"params[{'.'.join(place)!r}]", data.shape, spec)
        if data.dtype.name != spec.dtype:
            raise InputError(
                f"params[{'.'.join(place)!r}] has dtype {data.dtype}, expected {spec.dtype}, as load_params requires"
            )
        arrays[".".join(place)] = np.ascontiguousarray(data)
    text = library.numpy.save(arrays, metadata={"format": _FORMAT, "version": VERSION})
    replace_file(path, text)


def load_params(path: str | os.PathLike[str], specs: Mapping[Path, ArraySpec]) -> dict[Path, np.ndarray]:
    """Read parameters that :func:`save_params` wrote for the same model.

    Returns:
        NumPy arrays by path.

    Raises:
        MissingFileError: there is no such file (also a FileNotFoundError).
        InputError: it is not a file of parameters, of another version, too large, or of another model.
        MissingExtraError: safetensors is missing.
    """
    library = _library()
    file = file_to_read(path)
    header = _header(file, specs)
    names = {".".join(place): place for place in specs}
    unknown = [n for n in header if n not in names]
    missing = [n for n in names if n not in header]
    if unknown or missing:
        hint = did_you_mean(unknown[0], missing) if unknown and missing else ""
        raise InputError(
            f"{file} holds the parameters of another model: missing {missing[:8]}, unknown {unknown[:8]}.{hint}"
        )
    for name, (dtype, shape) in header.items():
        spec = specs[names[name]]
        _check_shape(f"{file}: {name!r}", shape, spec)
        if dtype != spec.dtype:
            raise InputError(f"{file}: {name!r} has dtype {dtype}, expected {spec.dtype}")
    try:
        entries = library.deserialize(file.read_bytes())
    except Exception as error:  # the library's own error, whose type differs between versions
        raise InputError(f"{file} is not a safetensors file: {error}") from None
    arrays = {}
    for name, entry in entries:
        spec = specs[names[name]]
        data = np.frombuffer(entry["data"], _dtype(spec.dtype))
        arrays[names[name]] = data.reshape(entry["shape"])
    return {place: arrays[place] for place in specs}


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


def _header(file: FilePath, specs: Mapping[Path, ArraySpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype, shape), read and bounded before anything else is."""
    size = file.stat().st_size
    largest = 8 * sum(math.prod(n for n in s.shape or () if isinstance(n, int)) for s in specs.values())
    known = all(s.shape is not None and all(isinstance(n, int) for n in s.shape) for s in specs.values())
    if known and size > largest + _HEADER_LIMIT:
        raise InputError(f"{file} has {size} bytes, more than this model's parameters can take")
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, max(size - 8, 0)):
            raise InputError(f"{file} is not a safetensors file: its header would have {length} bytes")
        text = stream.read(length)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise ValueError("its header has a duplicate key")
        return dict(items)

    try:
        header = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not a safetensors file: {error}") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise InputError(f"{file} was not written by save_params: its format is not {_FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise InputError(f"{file} has version {metadata.get('version')!r}; this release reads {VERSION!r}")
    found = {}
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise InputError(f"{file}: the entry {name!r} has no shape")
        found[name] = (_NAMES.get(str(entry.get("dtype")), str(entry.get("dtype"))), tuple(shape))
    return found


def _check_shape(place: str, shape: tuple[int, ...], spec: ArraySpec) -> None:
    want = spec.shape
    if want is None:
        return
    if len(shape) != len(want) or any(
        isinstance(w, int) and n != w for n, w in zip(shape, want, strict=True)
    ):
        raise InputError(f"{place} has shape {tuple(shape)}, expected {shape_text(want)}")
