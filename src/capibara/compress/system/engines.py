"""Which engines are here: JAX, PyTorch, or neither; and the one warning about a missing JAX.

Compression works with any of them. What is missing is found out by importing it, once, when it is first asked for: a
package that is installed and broken is as good as none, but the reason is kept and told.
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
    """Something that cannot be done without JAX, or without PyTorch, which cannot be imported here."""

    def __init__(self, name: str, reason: str) -> None:
        label, remedy = {"jax": ("JAX", "jax"), "torch": ("PyTorch", "torch")}[name]
        super().__init__(f"This needs {label}: {reason}. Remedy: pip install {remedy}.", name=name)


class FallbackWarning(RuntimeWarning):
    """Something else runs than what was asked for, with the same results."""


@cache
def engine_problem(name: str) -> str | None:
    """Why the package ``"jax"`` or ``"torch"`` cannot be imported; ``None`` where it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises: a missing library, a wrong version …
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None


def fallback_engine() -> str:
    """What runs where JAX does not: ``"torch"``, or ``"numpy"`` where that is missing too."""
    return "numpy" if engine_problem("torch") else "torch"


def strategy_engine(strategy: str) -> contextlib.AbstractContextManager[None]:
    """Where codecs compute: with the strategy ``"jax"`` in JAX; with a warning on what is here, where that is not.

    Where JAX has the CPU alone, compiled code computes, if it is built: it makes the same bytes, and JAX would have to
    compile a program for every shape first, which takes longer than the work.
    """
    from capibara.compress.codecs.engine import on_accelerator, use_engine
    from capibara.compress.codecs.executors import has_native

    if strategy != "jax":
        return contextlib.nullcontext()
    if (problem := engine_problem("jax")) is not None:
        warn_fallback(
            "jax",
            f"strategy='jax': JAX does not run here ({problem}): codecs run on what is here, with the same bytes.",
        )
        return contextlib.nullcontext()
    if not on_accelerator("jax") and has_native():
        return use_engine("native")
    return use_engine("jax")


_warned: set[str] = set()
_lock = threading.Lock()


def warn_fallback(subject: str, text: str) -> bool:
    """Warn of a fallback, once for each subject in the life of this process; returns whether it did."""
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
