"""The error types and the wording helpers that every room shares.

Every error Capibara raises on purpose derives from :class:`CapibaraError`, and its text says four things:
which argument, what came, what was expected, and what to do. The concrete classes also derive from the
built-in error a Python user would catch (``ValueError``, ``TypeError`` …).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["CapibaraError", "ConfigError", "MissingExtraError", "did_you_mean", "printable"]

_STRANGE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, halves of surrogate pairs


class CapibaraError(Exception):
    """Base of every error that Capibara raises on purpose."""


class ConfigError(CapibaraError, ValueError):
    """A setting has an unknown name, a wrong type or a value outside its range."""


class MissingExtraError(CapibaraError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'capibara-jax[{extra}]'"
        )
        self.package = package
        self.extra = extra


def printable(text: object, most: int = 200) -> str:
    """The beginning of a text from outside, for a message: what would change a terminal is escaped."""
    return _STRANGE.sub(lambda one: ascii(one[0])[1:-1], str(text)[:most])


def did_you_mean(name: str, options: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest spelling in ``options``, or an empty string."""
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
