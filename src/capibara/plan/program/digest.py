"""A digest of a program before compilation, equal for programs that tell the compiler the same.

``jax.stages.Lowered.as_text()`` has no places in source files, but names that the compiler does nothing with: of the
program, of its results, and of the functions that it calls. Here functions count by their first place in the text, and
the names of results are left out.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

__all__ = ["program_digest"]

# What is called by a custom call is not a function of the program; what is quoted is not a name.
_PART = re.compile(r'(?P<kept>custom_call\s+@[\w.$-]+|"(?:[^"\\]|\\.)*")|@(?P<name>[\w.$-]+)')
_RESULT = re.compile(r'jax\.result_info = "(?:[^"\\]|\\.)*"(?:, )?')
_EMPTY = re.compile(r",? ?\{\}|, (?=\})")


def program_digest(lowered: Any) -> str:
    """SHA-256 of a program before compilation, in hexadecimal.

    Args:
      lowered: a ``jax.stages.Lowered``, or its ``as_text()``.

    A Pallas kernel is part of the text as bytes that hold the place of its source, too. Lower with
    ``jax.config.update("jax_traceback_in_locations_limit", 0)`` so that a line added above it changes nothing
    (``capibara plan`` does).
    """
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    return hashlib.sha256(_canonical(text).encode()).hexdigest()


def _canonical(text: str) -> str:
    names: dict[str, str] = {}

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        return found["kept"] if name is None else names.setdefault(name, f"@{len(names)}")

    lines = []
    for line in _PART.sub(part, text).splitlines():
        if "jax.result_info" in line:
            line = _EMPTY.sub("", _RESULT.sub("", line))
        lines.append(line)
    return "\n".join(lines)
