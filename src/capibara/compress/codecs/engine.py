"""Set the engine of codecs for a block of code: ``with use_engine("jax"): …``.

It does not affect the bytes. A codec with several executors uses :func:`wanted_engine` if no executor is given; one
without an executor of that name uses its default. Threads of codecs and archives must be started in a copy of the
context (``contextvars.copy_context().run``) to inherit it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean

__all__ = ["ENGINES", "on_accelerator", "use_engine", "wanted_engine"]

ENGINES = ("auto", "native", "numpy", "torch", "jax")

_wanted: ContextVar[str] = ContextVar("capibara_codec_engine", default="auto")


def wanted_engine() -> str:
    """One of :data:`ENGINES`; ``"auto"`` is the codec's own choice."""
    return _wanted.get()


@cache
def on_accelerator(engine: str) -> bool:
    """Whether ``"jax"`` or ``"torch"`` is available and computes on something other than this machine's CPU."""
    if find_spec(engine) is None:
        return True  # its executor says what is missing
    if engine == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    return jax.default_backend() != "cpu"


@contextlib.contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Make codecs use an engine inside the block, in this thread.

    Raises:
      CompressError: an unknown engine.
    """
    if name not in ENGINES:
        raise CompressError(
            f"engine: got {name!r:.200}, expected one of {', '.join(ENGINES)}.{did_you_mean(str(name), ENGINES)}"
        )
    token = _wanted.set(name)
    try:
        yield
    finally:
        _wanted.reset(token)
