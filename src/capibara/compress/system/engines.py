"""The available engines: JAX, PyTorch, or neither; and the warning about a missing JAX.

Compression works with any of them. Availability is determined by importing a package once, on first use: a package
that is installed but broken counts as missing, and the reason is kept for messages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import warnings
from functools import cache

from capibara.errors import CapibaraError

__all__ = [
    "JAX_AVAILABLE",
    "FallbackWarning",
    "MissingEngineError",
    "engine_problem",
    "fallback_engine",
    "strategy_engine",
    "warn_fallback",
]

JAX_AVAILABLE: bool
"""Whether ``import jax`` works here."""


class MissingEngineError(CapibaraError, ImportError):
    """The request needs JAX or PyTorch, which cannot be imported here."""

    def __init__(self, name: str, reason: str) -> None:
        label, remedy = {"jax": ("JAX", "jax"), "torch": ("PyTorch", "torch")}[name]
        super().__init__(f"This needs {label}: {reason}. Remedy: pip install {remedy}.", name=name)


class FallbackWarning(RuntimeWarning):
    """Something other than the request runs, with the same results."""


@cache
def engine_problem(name: str) -> str | None:
    """Why the package ``"jax"`` or ``"torch"`` cannot be imported; ``None`` if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises: a missing library, a wrong version …
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None


def fallback_engine() -> str:
    """The engine used without JAX: ``"torch"``, or ``"numpy"`` if that is missing too."""
    return "numpy" if engine_problem("torch") else "torch"


def strategy_engine(strategy: str) -> contextlib.AbstractContextManager[None]:
    """The engine of the codecs: JAX with the strategy ``"jax"`` or, if it is missing, another with a warning.

    If JAX only has the CPU, compiled code is used if it is built: it writes the same bytes, and JAX would first have
    to compile a program for every shape, which takes longer than the work itself.
    """
    from capibara.compress.codecs.engine import on_accelerator, use_engine
    from capibara.compress.codecs.executors import has_native

    if strategy != "jax":
        return contextlib.nullcontext()
    if (problem := engine_problem("jax")) is not None:
        warn_fallback(
            "jax",
            f"strategy='jax': JAX does not run here ({problem}): codecs use another engine, with the same bytes.",
        )
        return contextlib.nullcontext()
    if not on_accelerator("jax") and has_native():
        return use_engine("native")
    return use_engine("jax")


_warned: set[str] = set()
_lock = threading.Lock()


def warn_fallback(subject: str, text: str) -> bool:
    """Warn of a fallback, once per subject and process; returns whether it warned."""
    with _lock:
        if subject in _warned:
            return False
        _warned.add(subject)
    # Where the user's code called.
    here, level, frame = os.path.dirname(os.path.dirname(__file__)), 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FallbackWarning, stacklevel=level)
    return True


def __getattr__(name: str) -> bool:
    if name == "JAX_AVAILABLE":
        return engine_problem("jax") is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
