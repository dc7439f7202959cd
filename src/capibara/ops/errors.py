"""Errors that operations raise on purpose."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["NoImplementationError", "OpShapeError", "OpTypeError", "OpValueError", "OpWarning"]


class OpShapeError(CapibaraError, ValueError):
    """An array argument has a rank or a size that does not fit the others."""


class OpValueError(CapibaraError, ValueError):
    """An argument's value lies outside what the operation accepts."""


class OpTypeError(CapibaraError, TypeError):
    """An argument has the wrong type or dtype."""


class OpWarning(UserWarning):
    """An argument has no effect here, or stands for something that was chosen; the message names the remedy."""


class NoImplementationError(CapibaraError, NotImplementedError):
    """The implementation asked for cannot run this problem."""
