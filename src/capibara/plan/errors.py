"""Errors of planning."""

from __future__ import annotations

from typing import Any

from capibara.errors import CapibaraError

__all__ = ["CompilationError", "CompilerMissingError", "DoesNotFitError", "PlanError"]


class PlanError(CapibaraError, ValueError):
    """The request cannot be planned."""


class CompilerMissingError(PlanError):
    """The compiler (``libtpu`` for TPUs, JAX's CUDA plugin for GPUs) is not installed on this machine."""


class CompilationError(PlanError, RuntimeError):
    """The compiler refused a program for another reason than memory, or crashed."""


class DoesNotFitError(PlanError, MemoryError):
    """No layout of the work fits the memory of the devices.

    Attributes:
      layout: the one that needs the least memory, if known (:func:`capibara.plan.memory.explain_oom` explains why it
        does not fit).
    """

    layout: Any = None
