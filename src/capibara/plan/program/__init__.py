"""What a compiled program does, read from its text: loops and how often they run, operations, bytes, cycles, exchanges
between devices, calls of kernels, and what is in flight beside what.

A compiler's own ``cost_analysis()`` counts the body of a loop once, so a model that scans over its layers appears to do
the work of one. Here loops are multiplied out. Pure Python; JAX is not imported.
"""

from __future__ import annotations

from capibara.plan.program.facts import Collective, Kernel, Piece, ProgramFacts
from capibara.plan.program.groups import mesh_axes_of
from capibara.plan.program.reading import read_program

__all__ = ["Collective", "Kernel", "Piece", "ProgramFacts", "mesh_axes_of", "read_program"]
