"""The memory and work of a step on the device here, from its own compiler."""

from __future__ import annotations

from typing import Any

from capibara.plan.errors import CompilationError
from capibara.plan.hbm.choice import Considered
from capibara.plan.program import read_program

__all__ = ["compile_here"]


def compile_here(
    how: str, step: Any, args: tuple[Any, ...], donated: tuple[int, ...], bandwidth_gbps: float | None
) -> Considered:
    """Compile a step for the device here.

    Args:
      how: its rematerialisation.
      step, args, donated: the function, its arguments (arrays or shapes), and those that are donated.
      bandwidth_gbps: GB/s of the device's memory that count; by default the catalogue's.

    Raises:
      CompilationError: the compiler refuses it.
    """
    import jax

    try:
        compiled = jax.jit(step, donate_argnums=donated).lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        raise CompilationError(f"the compiler refuses it: {str(error).splitlines()[0]}") from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise CompilationError(f"the compiler for {jax.default_backend()} reports no memory of a program")
    facts = read_program(text)
    return Considered(
        remat=how,
        bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        flops=facts.flops,
        traffic=facts.hbm_bytes,
        seconds=_seconds(facts.flops, facts.hbm_bytes, bandwidth_gbps),
    )


def _seconds(flops: float, traffic: float, bandwidth_gbps: float | None) -> float | None:
    """A roofline (Williams, Waterman and Patterson, 2009) of the chip here; None if its peak is not known."""
    from capibara.hardware import ChipError, detect_chip, roofline

    try:
        chip = detect_chip()
        peak = chip.peak("bfloat16")
    except ChipError:
        return None
    bandwidth = bandwidth_gbps * 1e9 if bandwidth_gbps is not None else chip.hbm_bandwidth
    if not peak or not bandwidth:
        return None
    return roofline(flops, traffic, peak, bandwidth)
