"""Packages whose names are imported when they are first asked for, so that importing one costs next to nothing.

:mod:`capibara.ops` imports all operations at once instead: a module that is imported while JAX traces a function can
make JAX trace that function again. A process that hopes to trace nothing says so (:func:`trace_later`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["on_demand", "trace_later", "traces_later"]


def on_demand(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
      package: its ``__name__``.
      homes: the names in each of its modules: ``{"chip": ("Chip", "ChipError")}``.

    Raises (when called):
      AttributeError: the package has no such name.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in module_of:
            if any(home == name or home.startswith(f"{name}.") for home in homes):
                return importlib.import_module(f"{package}.{name}")  # as if the package had imported it
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        vars(sys.modules[package])[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return __getattr__, __dir__


_later = False


def trace_later() -> None:
    """Let :mod:`capibara.ops`, if it is not there yet, import no operation until ``capibara.ops.import_all()``.

    Who calls it calls that before anything is traced.
    """
    global _later
    _later = True


def traces_later() -> bool:
    """Whether :func:`trace_later` was called."""
    return _later
