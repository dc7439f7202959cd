"""The compiler's own memory figure of a step, without waiting for its machine code."""

from __future__ import annotations

from capibara.plan.compiler import Job, Memory, ProgramCache, compile_program
from capibara.plan.errors import CompilationError, DoesNotFitError

__all__ = ["measure_memory"]


def measure_memory(job: Job, *, timeout: float = 1800.0, cache: ProgramCache | None = None) -> Memory:
    """The memory that the compiler assigns to a program, without waiting for its machine code.

    A compilation for a TPU takes a minute or more. Buffers are assigned within seconds; the rest is machine code.

    Args:
      timeout: seconds after which the process is stopped.
      cache: of results; by default the user's.

    Returns:
      Arguments (in the devices' memory, with padding), outputs that take new memory, and temporaries.

    Raises:
      DoesNotFitError: the compiler refuses it because of its memory; the message is the compiler's.
      CompilationError: it refuses it for another reason, or takes too long.
      CompilerMissingError: the TPU compiler is not installed.
    """
    result = compile_program(job, cache=cache, timeout=timeout, schedule=True)
    if result.status == "oom":
        raise DoesNotFitError(f"{job.slice}: {result.message}")
    if result.memory is None:
        raise CompilationError(result.message)
    return result.memory
