"""Errors of composing a model.

Each error names the two conflicting places in the nested model, their properties, and the line of the user's code
that connected them (see :class:`Site`).
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from capibara.errors import CapibaraError

__all__ = [
    "CompileError",
    "ComposeError",
    "CycleError",
    "InputError",
    "KindError",
    "MissingFileError",
    "PicklingError",
    "ShapeError",
    "Site",
    "UnconnectedError",
    "WiringError",
    "user_site",
]


class ComposeError(CapibaraError):
    """Base of the errors of :mod:`capibara.compose`."""


class WiringError(ComposeError, ValueError):
    """A connection that cannot be made: an unknown port, two producers of one value, a block used twice."""


class ShapeError(ComposeError, ValueError):
    """Two connected values have shapes that cannot be made equal."""


class KindError(ComposeError, TypeError):
    """A value of one kind (float, int, bool) is connected where another kind is needed."""


class CycleError(ComposeError, ValueError):
    """A value depends on itself."""


class UnconnectedError(ComposeError, ValueError):
    """A block's input is not connected."""


class CompileError(ComposeError, ValueError):
    """A model cannot be compiled as requested (an unknown key, an unresolved size …)."""


class InputError(ComposeError, ValueError):
    """Values passed to a compiled model do not match it (a missing key, a wrong shape)."""


class MissingFileError(InputError, FileNotFoundError):
    """There is no file or folder of that name."""


class PicklingError(ComposeError, TypeError):
    """A model or backend cannot be pickled: it contains functions; models have a text format instead."""


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_site() -> Site | None:
    """The nearest line on the call stack outside Capibara itself: where the user connected two blocks.

    Only a file name and a number are taken from the frame (no source text), so it costs about a microsecond.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return Site(file, frame.f_lineno)
        frame = frame.f_back
    return None
