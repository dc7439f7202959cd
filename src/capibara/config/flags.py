"""Options of the XLA compiler as settings: ``"xla_enable_async_all_gather=true"``.

Settings and plans are untrusted files, and some options make the compiler write files anywhere. So only options that
affect how a program is compiled are allowed.
"""

from __future__ import annotations

import re

__all__ = ["flag_problem", "split_flag"]

_WRITES = re.compile(r"dump|path|file|dir(?:_|$)|trace|profile|log")
_NAME = re.compile(r"xla_[A-Za-z0-9_]{1,100}")
_VALUE = re.compile(r"[A-Za-z0-9_.,:+-]{1,100}")


def split_flag(text: str) -> tuple[str, str]:
    """``"name=value"`` as a pair; the value is empty where there is no ``=``."""
    name, _, value = text.partition("=")
    return name, value


def flag_problem(text: str) -> str | None:
    """What is wrong with ``"name=value"``, or None.

    A name is ``xla_`` and letters, digits and underscores, and none of those that make the compiler write files; a
    value is letters, digits and any of ``_.,:+-``.
    """
    name, value = split_flag(text)
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        return f"got {text[:200]!r}, expected name=value, such as xla_enable_async_all_gather=true"
    if _WRITES.search(name):
        return (
            f"got {text[:200]!r}, an option that may write or read files, expected one that only says how to compile. "
            "Set it in the environment variable XLA_FLAGS (LIBTPU_INIT_ARGS for a TPU) of the process"
        )
    return None
