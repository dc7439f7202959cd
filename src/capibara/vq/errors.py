"""Errors of the vector-quantisation layers."""

from __future__ import annotations

from capibara.errors import CapibaraError

__all__ = ["TracedUpdateError", "VQConfigError", "VQInputError"]


class VQConfigError(CapibaraError, ValueError):
    """A layer's setting lies outside what it accepts."""


class VQInputError(CapibaraError, TypeError):
    """An input cannot be used the way the layer was built."""


class TracedUpdateError(CapibaraError, RuntimeError):
    """A layer was asked to write its own state while being traced by ``jit``, ``grad`` or ``vmap``."""
