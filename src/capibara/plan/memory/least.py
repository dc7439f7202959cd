"""The least memory that the compiler can fit a layout into, and how long its step takes then.

Without a limit the compiler uses memory as it likes. Told of a limit just below that, it orders the program so that
fewer buffers are live at once, which takes longer, or refuses it and says what the program would take. That figure is
the next limit to ask for, from below: a refusal takes seconds, and the first limit that is accepted ends the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_program
from capibara.plan.compiler.limits import LIMIT, limit_option
from capibara.plan.program import read_program
from capibara.plan.targets import Target
from capibara.plan.time import predict_step
from capibara.sharding import Layout

if TYPE_CHECKING:
    from capibara.plan.work import Work

__all__ = ["LeastMemory", "find_least_memory"]

_TRIES = 6
# A refusal says how much is needed in hundredths of a GiB.
_ROUNDED = 6 << 20
# What is nearer to the memory that the program takes without a limit is not less.
_WORTH = 0.995


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """A layout compiled for the least memory that the compiler accepted.

    Attributes:
      layout: with the flag of that limit.
      limit_bytes: the limit. hbm_bytes: what one device then needs.
      seconds: predicted for one step.
    """

    layout: Layout
    limit_bytes: int
    hbm_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": self.layout.to_json(),
            "limit_bytes": self.limit_bytes,
            "hbm_bytes": self.hbm_bytes,
            "step_seconds": self.seconds,
        }


def find_least_memory(
    work: Work,
    target: Target,
    layout: Layout,
    program: CompiledProgram,
    *,
    cache: ProgramCache | None = None,
    progress: Callable[[str, Layout, CompiledProgram | None], None] | None = None,
) -> LeastMemory | None:
    """The least memory that the compiler accepts for a layout; None if it is not less than what it takes anyway.

    Args:
      program: the compiled layout.
      cache: of compiled results.
      progress: called with ``"start"`` or ``"done"``, a layout, and the compiled program.

    Raises:
      CompilerMissingError, CompilationError: as :func:`capibara.plan.compiler.compile_program`.
    """
    if program.memory is None or target.limit_flag(1) is None:
        return None
    most = int(program.memory.total * _WORTH)
    limit = program.memory.total - program.memory.temporaries
    for _ in range(_TRIES):
        limit = max(limit, 1 << 20) + (1 << 20) - 1 >> 20 << 20
        if limit >= most:
            return None
        others = [pair for pair in layout.flags if pair[0] != LIMIT]
        tried = replace(layout, flags=(*others, limit_option(limit)))
        if progress is not None:
            progress("start", tried, None)
        found = compile_program(work.job(tried, target), cache=cache)
        if progress is not None:
            progress("done", tried, found)
        if found.memory is not None:
            time = predict_step(read_program(found.text), target, tried.mesh, places=found.coordinates)
            return LeastMemory(
                layout=tried, limit_bytes=limit, hbm_bytes=found.memory.total, seconds=time.seconds
            )
        if found.status != "oom" or not found.needed_bytes:
            return None
        limit = max(limit + (limit >> 8), found.needed_bytes + _ROUNDED)
    return None
