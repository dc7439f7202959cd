"""The file of measurements of a device: one per type of device and version of Capibara.

::

    ~/.cache/capibara/tuning/<version>/<device>.json      (below $XDG_CACHE_HOME, if that is set)

``CAPIBARA_TUNING_DIR`` names another folder, and ``CAPIBARA_TUNING=0`` disables the files. A file belongs to one type
of device (its name as JAX reports it; for a CPU its name and the number of its cores), since devices differ in what
is fast, and to one version, since the next one has different kernels.

The files are untrusted. A file is read with a limit on its size, validated entry by entry, and holds only names and
numbers, which the operations check against what they declare: the worst that a file can do is to choose a slow
variant. A broken file is moved aside with a warning, and the heuristics decide. Writers take a lock, read the current
entries, add theirs and replace the file atomically, so that two processes may tune at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from capibara import __version__
from capibara.errors import CapibaraError
from capibara.files import replace_file

__all__ = ["CacheError", "Device", "Entry", "TuningWarning", "cache_file", "cache_folder", "read", "write"]

FORMAT = 1
MAX_BYTES = 1 << 20
MAX_ENTRIES = 4096
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_KEY = re.compile(r"[A-Za-z0-9_.+|,=-]{1,400}")


class CacheError(CapibaraError, ValueError):
    """A file of measurements is invalid, or cannot be written."""


class TuningWarning(UserWarning):
    """A file of measurements was ignored or moved aside."""


@dataclass(frozen=True)
class Device:
    """The device that a file is valid for: its platform (``"cpu"``, ``"cuda"``, ``"tpu"`` …) and its type."""

    platform: str
    kind: str


@dataclass(frozen=True)
class Entry:
    """The measurements for one operation, dtype and range of shapes.

    Attributes:
      fastest: The implementation that was measurably faster than the preferred one; None if there is none.
      parameters: By implementation, the parameters that were measurably faster than its heuristic.
      gains: Time of the heuristic / time of the choice, by implementation, and under ``""`` of the whole choice.
      rounds: How many times each was timed in the decisive comparison.
      jax: The version of JAX it was measured with.
    """

    fastest: str | None = None
    parameters: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0
    jax: str = ""


def cache_folder() -> Path | None:
    """The folder of this version's files; None if the environment disables them or there is no home directory.

    Raises:
      CacheError: ``CAPIBARA_TUNING`` is neither 0 nor 1.
    """
    switch = os.environ.get("CAPIBARA_TUNING", "1")
    if switch not in ("0", "1", ""):
        raise CacheError(
            f"CAPIBARA_TUNING must be 0 (leave measurements out) or 1, got {switch!r}; a folder goes into "
            "CAPIBARA_TUNING_DIR"
        )
    if switch == "0":
        return None
    if given := os.environ.get("CAPIBARA_TUNING_DIR", ""):
        return Path(given).expanduser() / __version__
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The specification: a relative path is to be ignored.
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return base / "capibara" / "tuning" / __version__


def cache_file(folder: Path, device: Device) -> Path:
    """The file of a kind of device: a readable name, and a digest that keeps two kinds apart."""
    readable = re.sub(r"[^a-z0-9]+", "-", device.kind.lower()).strip("-")[:60]
    digest = hashlib.sha256(f"{device.platform}\n{device.kind}".encode()).hexdigest()[:8]
    return folder / f"{device.platform}-{readable}-{digest}.json"


def read(path: Path, device: Device) -> dict[str, Entry]:
    """The entries of a file; empty if there is no file. A broken one is moved aside with a :class:`TuningWarning`."""
    try:
        return _entries(_load(path), device)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn(f"the measurements in {path} cannot be read and are ignored: {error.strerror or error}")
    except CacheError as error:
        aside = path.with_name(f"{path.name}.broken")
        try:
            os.replace(path, aside)
            where = f"it was moved to {aside}"
        except OSError as failure:
            where = f"it could not be moved aside ({failure.strerror or failure})"
        _warn(f"the measurements in {path} are ignored, {where}: {error}. Remedy: capibara tune.")
    return {}


def write(path: Path, device: Device, entries: Mapping[str, Entry]) -> None:
    """Add ``entries`` to the file, replacing those with the same keys; other writers' entries are kept.

    Raises:
      CacheError: the folder or the file cannot be written, or there would be too many entries.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f".{path.name}.lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            merged = {**read(path, device), **entries}
            if len(merged) > MAX_ENTRIES:
                raise CacheError(f"{path} would have {len(merged)} entries, {MAX_ENTRIES} at most")
            content = {
                "format": FORMAT,
                "capibara": __version__,
                "device": asdict(device),
                "entries": {key: asdict(entry) for key, entry in sorted(merged.items())},
            }
            text = json.dumps(content, indent=1)
            _entries(json.loads(text), device)  # what is written can be read
            replace_file(path, text + "\n")
    except OSError as error:
        raise CacheError(
            f"the measurements cannot be written to {path}: {error.strerror or error}. Remedy: another folder, by "
            "CAPIBARA_TUNING_DIR or --cache."
        ) from error


def _warn(text: str) -> None:
    warnings.warn(text, TuningWarning, stacklevel=2)


def _load(path: Path) -> Any:
    # Without blocking: a named pipe in that place would wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CacheError("it is not a regular file")
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise CacheError(f"it has more than {MAX_BYTES} bytes")
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CacheError(f"it is not JSON ({str(error)[:100]})") from None


def _fields(where: str, value: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise CacheError(f"{where} must be an object with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise CacheError(f"{where}: {name} has the wrong type, {type(value[name]).__name__}")
    return value


def _entries(content: Any, device: Device) -> dict[str, Entry]:
    kinds = {"format": int, "capibara": str, "device": dict, "entries": dict}
    whole = _fields("the file", content, kinds)
    if whole["format"] != FORMAT:
        raise CacheError(f"format must be {FORMAT}, got {str(whole['format'])[:20]}")
    if whole["capibara"] != __version__:
        raise CacheError(f"it is of version {whole['capibara'][:20]!r}, not {__version__}")
    if whole["device"] != asdict(device):
        raise CacheError(f"it is of another device, {str(whole['device'])[:200]}, not {device}")
    if len(whole["entries"]) > MAX_ENTRIES:
        raise CacheError(f"it has more than {MAX_ENTRIES} entries")
    return {key: _entry(key, value) for key, value in whole["entries"].items()}


def _entry(key: str, value: Any) -> Entry:
    if not _KEY.fullmatch(key):
        raise CacheError(f"a key has characters it should not have, or too many: {key[:100]!r}")
    where = f"entry {key[:100]!r}"
    kinds = {"fastest": str | None, "parameters": dict, "gains": dict, "rounds": int, "jax": str}
    found = _fields(where, value, kinds)
    names = [*found["parameters"], *(name for name in found["gains"] if name)]
    if found["fastest"] is not None:
        names.append(found["fastest"])
    for name, chosen in found["parameters"].items():
        if not isinstance(chosen, dict) or len(chosen) > 16:
            raise CacheError(f"{where}: the parameters of {name[:64]!r} must be an object of 16 at most")
        # Files of earlier builds have this parameter under its former name.
        if "chunk_length" in chosen:
            chosen["chunk_size"] = chosen.pop("chunk_length")
        for parameter, number in chosen.items():
            names.append(parameter)
            if isinstance(number, str):
                names.append(number)
            elif not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 31:
                raise CacheError(f"{where}: {parameter[:64]!r} must be a name or an integer below 2³¹")
    for name in names:
        if not _NAME.fullmatch(name):
            raise CacheError(f"{where}: {name[:100]!r} is not a name")
    for name, gain in found["gains"].items():
        number = isinstance(gain, int | float) and not isinstance(gain, bool)
        if not number or not (0 < gain < 1e6 and math.isfinite(gain)):
            raise CacheError(f"{where}: the gain of {name!r} must be a number above 0")
    if not 0 <= found["rounds"] < 1 << 20 or len(found["jax"]) > 40:
        raise CacheError(f"{where}: rounds or jax is out of range")
    with contextlib.suppress(ValueError):  # a lone surrogate cannot be printed
        found["jax"].encode()
        return Entry(**found)
    raise CacheError(f"{where}: jax is not a version")
