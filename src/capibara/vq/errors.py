"""Errors of the vector-quantisation layers."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["TracedUpdateError", "VQConfigError", "VQInputError"]


class VQConfigError(CapibaraError, ValueError):
    """A layer's setting is out of range."""


class VQInputError(CapibaraError, TypeError):
    """An input does not match the layer's settings."""


class TracedUpdateError(CapibaraError, RuntimeError):
    """A layer cannot write its own state while it is traced by ``jit``, ``grad`` or ``vmap``."""
