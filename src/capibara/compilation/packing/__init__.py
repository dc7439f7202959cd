"""Compiled programs in files: compile on one machine, run on another without compiling.

A compiled program is machine code for one kind of device, made by one version of the compiler with one set of flags.
The file records all of these (:mod:`~capibara.compilation.packing.environment`), and :func:`load_program` refuses it
with the reason where they differ. It holds no pickle: JAX's own ``jax.experimental.serialize_executable`` pickles the
trees and types around the code, while here they are computed again from the function, which the other machine has
anyway, and only the code comes from the file (:mod:`~capibara.compilation.packing.container`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.compilation.packing.container import PackedProgram, read_packed
    from capibara.compilation.packing.loading import load_program
    from capibara.compilation.packing.writing import pack_program

__all__ = ["PackedProgram", "load_program", "pack_program", "read_packed"]

_HOMES = {
    "container": ("PackedProgram", "read_packed"),
    "loading": ("load_program",),
    "writing": ("pack_program",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
