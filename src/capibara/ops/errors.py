"""Errors raised by operations."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["NoImplementationError", "OpShapeError", "OpTypeError", "OpValueError", "OpWarning"]


class OpShapeError(CapibaraError, ValueError):
    """The rank or size of an array argument does not match the other arguments."""


class OpValueError(CapibaraError, ValueError):
    """The value of an argument is outside the accepted range."""


class OpTypeError(CapibaraError, TypeError):
    """An argument has the wrong type or dtype."""


class OpWarning(UserWarning):
    """An argument has no effect here, or a value was chosen for it; the message names the remedy."""


class NoImplementationError(CapibaraError, NotImplementedError):
    """The requested implementation does not support this problem."""
