"""Finding and reading settings files, which are hostile until checked.

A name is looked up in this order: a file at that path (relative to the working directory); a packaged file,
by the documented path (``capibara/config/configs_toml/production/tpu_v4.toml``), by its path below
``configs_toml`` (``production/tpu_v4``) or by its bare name when only one file has it (``tpu_v4``).
Files are bounded in size, must be regular, UTF-8 and TOML.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from capibara.errors import ConfigError, did_you_mean

__all__ = [
    "MAX_FILE_BYTES",
    "ConfigFileNotFoundError",
    "find_config",
    "list_packaged_configs",
    "read_toml",
    "write_text_atomically",
]

MAX_FILE_BYTES = 256 * 1024
PACKAGED = Path(__file__).parent / "configs_toml"
_DOCUMENTED_PREFIX = PurePosixPath("capibara/config/configs_toml")


class ConfigFileNotFoundError(ConfigError, FileNotFoundError):
    """No settings file of that name exists, here or in the package."""


def list_packaged_configs() -> list[str]:
    """Names of the settings files that ship with Capibara, as ``from_toml`` accepts them."""
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
    """The file that ``path_or_name`` stands for; a real file at that path wins over a packaged one.

    Raises:
      ConfigFileNotFoundError: neither exists; the text lists the packaged names.
      ConfigError: it is a directory, or the name is empty or holds a NUL character.
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


def read_toml(path: Path, *, what: str = "settings file") -> tuple[dict[str, Any], str]:
    """Read a TOML file; returns (its content, its text).

    Raises:
      ConfigError: not a regular file, unreadable, over ``MAX_FILE_BYTES``, not UTF-8 text, or not TOML.
    """
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to must not hang.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise ConfigFileNotFoundError(f"no {what} at {str(path)!r}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{str(path)!r} is not a regular file; a {what} must be one (a TOML text)")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the {what} {str(path)!r} is larger than {MAX_FILE_BYTES // 1024} KiB, the most that is read; "
            "is it really TOML settings?"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the {what} {str(path)!r} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); "
            "it looks like a binary file. Give a TOML file"
        ) from error
    if "\0" in text:
        raise ConfigError(
            f"the {what} {str(path)!r} holds NUL bytes: it looks like a binary file. Give a TOML file"
        )
    try:
        return tomllib.loads(text), text
    except RecursionError as error:
        raise ConfigError(
            f"the {what} {str(path)!r} is not valid TOML: values are nested too deeply"
        ) from error
    except ValueError as error:
        raise ConfigError(f"the {what} {str(path)!r} is not valid TOML: {error}") from error


_HEADER = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\s-]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.-]+)\s*=")


def line_finder(name: str, text: str) -> Callable[[str], str]:
    """A function from a dotted key to ``"<name>, line <n>"``, or to ``name`` alone where no line is found."""
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
    """Write UTF-8 text so that a reader sees the old file or the whole new one, never a part.

    Raises:
      ConfigError: the folder does not exist, the disk is full, permission is missing …; the old file stays.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise ConfigError(
            f"cannot write {str(target)!r}: {error.strerror}. The old file, if any, is unchanged"
        ) from error
