"""What a compiled program does, read from its text: loops and trip counts, operations, bytes, cycles, collectives,
kernel calls, and what overlaps with what.

A compiler's own ``cost_analysis()`` counts the body of a loop once, so a model that scans over its layers appears to
do the work of one layer. Here loop bodies are multiplied by their trip counts. Pure Python; JAX is not imported.
"""

from __future__ import annotations

from capibara.plan.program.facts import Collective, Kernel, OperationFacts, Piece, ProgramFacts
from capibara.plan.program.frames import Frame, Frames
from capibara.plan.program.groups import mesh_axes_of
from capibara.plan.program.overlap import Overlap, OverlapByKind, overlap_by_kind, overlaps
from capibara.plan.program.reading import read_operations, read_places, read_program

__all__ = [
    "Collective",
    "Frame",
    "Frames",
    "Kernel",
    "OperationFacts",
    "Overlap",
    "OverlapByKind",
    "Piece",
    "ProgramFacts",
    "mesh_axes_of",
    "overlap_by_kind",
    "overlaps",
    "read_operations",
    "read_places",
    "read_program",
]
