"""The engine that writes many texts at once: see :mod:`capibara.serve.engine.engine`."""

from __future__ import annotations

from capibara.serve.engine.engine import Engine

__all__ = ["Engine"]
