"""Find and read settings files, which are untrusted.

A name is looked up in this order: a file at that path (relative to the working directory); a packaged file,
by the documented path (``capibara/config/configs_toml/production/tpu_v4.toml``), by its path below
``configs_toml`` (``production/tpu_v4``) or by its bare name if only one file has it (``tpu_v4``). Files are limited
in size and must be regular files with UTF-8 TOML.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from capibara.errors import ConfigError, did_you_mean
from capibara.files import replace_file

__all__ = [
    "ConfigFileNotFoundError",
    "find_config",
    "list_packaged_configs",
    "write_text_atomically",
]

PACKAGED = Path(__file__).parent / "configs_toml"
_DOCUMENTED_PREFIX = PurePosixPath("capibara/config/configs_toml")


class ConfigFileNotFoundError(ConfigError, FileNotFoundError):
    """No settings file of that name exists, here or in the package."""


def list_packaged_configs() -> list[str]:
    """Names of the packaged settings files, as accepted by ``from_toml``."""
    return sorted(p.relative_to(PACKAGED).with_suffix("").as_posix() for p in PACKAGED.rglob("*.toml"))


def _find_packaged(name: str) -> Path | None:
    path = PurePosixPath(name.replace(os.sep, "/"))
    parts = path.parts
    prefix = _DOCUMENTED_PREFIX.parts
    for start in range(len(parts) - len(prefix)):
        # Also `./capibara/…` and `src/capibara/…`, but not an absolute path: that names one real file.
        if parts[start : start + len(prefix)] == prefix and not path.is_absolute():
            path = PurePosixPath(*parts[start + len(prefix) :])
            break
    wanted = path.with_suffix("").as_posix() if path.suffix == ".toml" else path.as_posix()
    names = list_packaged_configs()
    if wanted in names:
        return PACKAGED / f"{wanted}.toml"
    same_stem = [n for n in names if PurePosixPath(n).name == wanted]
    return PACKAGED / f"{same_stem[0]}.toml" if len(same_stem) == 1 else None


def find_config(path_or_name: str | os.PathLike[str]) -> Path:
    """The file of ``path_or_name``; a real file at that path takes precedence over a packaged one.

    Raises:
      ConfigFileNotFoundError: neither exists; the message lists the packaged names.
      ConfigError: it is a directory, or the name is empty or contains a NUL character.
    """
    name = os.fspath(path_or_name)
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(
            f"path_or_name: got {name!r}, expected the path of a TOML file or one of the packaged names "
            f"{', '.join(list_packaged_configs())}"
        )
    path = Path(name).expanduser()
    try:
        exists, is_directory = path.exists(), path.is_dir()
    except OSError as error:  # such as a name longer than the file system allows
        raise ConfigFileNotFoundError(
            f"cannot look up the settings file {name[:200]!r}: {error.strerror}"
        ) from error
    if exists and not is_directory:
        return path
    packaged = _find_packaged(name)
    if packaged is not None:
        return packaged
    names = list_packaged_configs()
    if is_directory:
        inside = sorted(p.name for p in path.glob("*.toml"))[:8]
        raise ConfigError(
            f"{name!r} is a directory, expected a TOML file."
            + (f" It holds: {', '.join(inside)}." if inside else "")
            + f" Packaged names: {', '.join(names)}"
        )
    stem = PurePosixPath(name.replace(os.sep, "/")).name.removesuffix(".toml")
    hint = did_you_mean(stem, [n.rsplit("/", 1)[-1] for n in names])
    raise ConfigFileNotFoundError(
        f"no settings file {name!r} (looked in {Path.cwd()} and in the package).{hint} "
        f"Packaged names: {', '.join(names)}"
    )


_HEADER = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\s-]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.-]+)\s*=")


def line_finder(name: str, text: str) -> Callable[[str], str]:
    """A function from a dotted key to ``"<name>, line <n>"``, or to ``name`` alone if no line is found."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEADER.match(line):
            table = re.sub(r"\s", "", match[1])
            lines.setdefault(table, number)
        elif match := _KEY.match(line):
            lines.setdefault(f"{table}.{match[1]}" if table else match[1], number)

    def origin_of(key: str) -> str:
        bare = re.sub(r"\[\d+\].*", "", key)
        while bare:
            if bare in lines:
                return f"{name}, line {lines[bare]}"
            bare = bare.rpartition(".")[0]
        return name

    return origin_of


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text atomically: a reader sees the old file or the complete new one.

    Raises:
      ConfigError: the folder does not exist, the disk is full, permission is missing …; the old file is unchanged.
    """
    target = Path(path)
    try:
        replace_file(target, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(target)!r}: {error.strerror}. The old file, if any, is unchanged"
        ) from error
