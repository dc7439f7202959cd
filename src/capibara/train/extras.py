"""The packages of the extra ``train``.

Each is imported where it is used, so that the rest of Capibara works without them. A run asks for all of them
before its first step: finding out at the first checkpoint would cost what was trained until then.
"""

from __future__ import annotations

import importlib
from typing import Any

from capibara.errors import MissingExtraError

__all__ = ["figure_canvas", "optax", "orbax", "require", "tensorboard"]


def optax() -> Any:
    """The module ``optax``.

    Raises:
      MissingExtraError: it is not installed.
    """
    return _import("optax", "optax", "training")


def orbax() -> Any:
    """The module ``orbax.checkpoint``.

    Raises:
      MissingExtraError: it is not installed.
    """
    return _import("orbax.checkpoint", "orbax-checkpoint", "reading and writing checkpoints")


def figure_canvas() -> tuple[Any, Any]:
    """Matplotlib's ``Figure`` and a canvas that needs no window system.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    figure = _import("matplotlib.figure", "matplotlib", "the loss plot")
    canvas = _import("matplotlib.backends.backend_agg", "matplotlib", "the loss plot")
    return figure.Figure, canvas.FigureCanvasAgg


def tensorboard() -> tuple[Any, Any, Any]:
    """Of ``tensorboardX`` the modules of events, of summaries, and of files.

    Raises:
      MissingExtraError: it is not installed.
    """
    names = ("proto.event_pb2", "proto.summary_pb2", "event_file_writer")
    events, summaries, files = (
        _import(f"tensorboardX.{name}", "tensorboardX", "train.tensorboard=true") for name in names
    )
    return events, summaries, files


def require() -> None:
    """Import all that every run needs.

    Raises:
      MissingExtraError: one is not installed.
    """
    optax()
    orbax()
    figure_canvas()


def _import(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # Installed, but broken or without something that it needs itself: Python's own words say more.
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(package, "train", purpose) from None
