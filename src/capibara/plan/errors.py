"""What can go wrong in planning."""

from __future__ import annotations

from typing import Any

from capibara.errors import CapibaraError

__all__ = ["CompilationError", "CompilerMissingError", "DoesNotFitError", "PlanError"]


class PlanError(CapibaraError, ValueError):
    """A plan cannot be made of what was asked for."""


class CompilerMissingError(PlanError):
    """The TPU compiler, the package ``libtpu``, is not on this machine."""


class CompilationError(PlanError, RuntimeError):
    """The compiler refused a program for another reason than its memory, or died of it."""


class DoesNotFitError(PlanError, MemoryError):
    """No layout of the work fits the memory of the devices.

    Attributes:
      layout: the one that takes the least, where it is known (:func:`capibara.plan.memory.explain_oom` says why).
    """

    layout: Any = None
