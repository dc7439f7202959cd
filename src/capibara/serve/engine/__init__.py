"""The engine that writes many texts at once: see :mod:`capibara.serve.engine.engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.serve.engine.adapters import AdapterRoom
    from capibara.serve.engine.bundle import ProgramBundle, write_bundle
    from capibara.serve.engine.engine import Engine
    from capibara.serve.engine.speculation import Speculation

__all__ = ["AdapterRoom", "Engine", "ProgramBundle", "Speculation", "write_bundle"]

_HOMES = {
    "adapters": ("AdapterRoom",),
    "bundle": (
        "ProgramBundle",
        "write_bundle",
    ),
    "engine": ("Engine",),
    "speculation": ("Speculation",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
