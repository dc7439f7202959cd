"""Errors of health checks."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["HealthError", "UnknownCheckError"]


class HealthError(CapibaraError, ValueError):
    """An argument of a health check is invalid."""


class UnknownCheckError(CapibaraError, KeyError):
    """A health report has no check of that name."""

    def __str__(self) -> str:  # KeyError would show the text in quotes
        return str(self.args[0]) if self.args else ""
