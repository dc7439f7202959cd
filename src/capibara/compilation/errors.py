"""Errors and warnings about compiled programs."""

from __future__ import annotations

from capibara.errors import CapibaraError, ConfigError

__all__ = [
    "CompilationOptionError",
    "CompilationOptionWarning",
    "NotCompiledError",
    "PackedProgramError",
    "RecompilationWarning",
]


class CompilationOptionError(ConfigError):
    """A compilation option is invalid, or the platform does not have it."""


class CompilationOptionWarning(UserWarning):
    """An option of the configuration has no effect on the platform that a program is compiled for."""


class RecompilationWarning(UserWarning):
    """A function was compiled again; the message names the argument that changed."""


class NotCompiledError(CapibaraError, TypeError):
    """A call does not match any of the programs that were compiled ahead of time."""


class PackedProgramError(CapibaraError, ValueError):
    """A file of a compiled program is damaged, not to be trusted, or made for another environment or function."""
