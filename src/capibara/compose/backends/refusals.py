"""Why a method was refused: the library's own words, with the arguments that it was given."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from capibara.compose.errors import ComposeError, InputError

__all__ = ["refusal"]

_BACKENDS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def refusal(
    function: str, args: tuple[Any, ...], options: dict[str, Any], error: Exception
) -> InputError | None:
    """An error of NumPy, PyTorch or JAX as one of Capibara's; None for what is not about the arguments.

    Args:
        function: the name of the operation. args, options: what it was called with. error: what it raised.
    """
    own = isinstance(error, ComposeError)
    full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    # JAX's own classes of errors say what cannot be traced, or that a device failed.
    if own or (type(error).__module__.partition(".")[0] in ("jax", "jaxlib") and not full):
        return None
    function = _method(sys._getframe(1)) or function
    text = ", ".join([*map(_said, args), *(f"{k}={_said(v)}" for k, v in options.items())])
    why = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
    reason = "there is no memory for that" if full else f"{type(error).__name__}: {why}"
    return InputError(f"{function}({text}): {reason}")


def _method(frame: FrameType | None) -> str | None:
    """The method that the user called, of those that called each other."""
    name = None
    while frame is not None and _BACKENDS in frame.f_code.co_filename:
        if "methods" in frame.f_code.co_filename and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _said(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return f"{value!r:.80}"
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
