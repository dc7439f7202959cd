"""Reading a TOML file that may be anything: bounded in size, a regular file, UTF-8, valid TOML."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError, ConfigError

__all__ = ["MAX_FILE_BYTES", "read_toml"]

MAX_FILE_BYTES = 256 * 1024


def read_toml(
    path: Path,
    *,
    what: str = "settings file",
    error: type[CapibaraError] = ConfigError,
    missing: type[CapibaraError] | None = None,
) -> tuple[dict[str, Any], str]:
    """Read a TOML file; returns (its content, its text).

    Args:
      path: the file.
      what: how error texts call it.
      error: the class of every error raised; ``missing`` (if given) is that of a file that does not exist.

    Raises:
      error: not a regular file, unreadable, over ``MAX_FILE_BYTES``, not UTF-8 text, or not TOML.
    """
    shown = str(path)
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to must not hang.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as cause:
        raise (missing or error)(f"no {what} at {shown!r}") from cause
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        raise error(f"cannot read the {what} {shown!r}: {reason}") from cause
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{shown!r} is not a regular file; a {what} must be one (a TOML text)")
    try:
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as cause:
        raise error(f"cannot read the {what} {shown!r}: {cause.strerror or cause}") from cause
    if len(data) > MAX_FILE_BYTES:
        raise error(
            f"the {what} {shown!r} is larger than {MAX_FILE_BYTES // 1024} KiB, the most that is read; "
            "is it really a TOML text?"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(
            f"the {what} {shown!r} is not UTF-8 text (byte {cause.start} is {data[cause.start]:#04x}); "
            "it looks like a binary file. Give a TOML file"
        ) from cause
    if "\0" in text:
        raise error(f"the {what} {shown!r} holds NUL bytes: it looks like a binary file. Give a TOML file")
    try:
        return tomllib.loads(text), text
    except RecursionError as cause:
        raise error(
            f"the {what} {shown!r} is not valid TOML: values are nested too deeply. Correct it there."
        ) from cause
    except ValueError as cause:
        raise error(f"the {what} {shown!r} is not valid TOML: {cause}. Correct it there.") from cause
