"""The memory and time of a step on a TPU slice, from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.measure.sizes import size_text
from capibara.plan.errors import CompilationError, DoesNotFitError, PlanError
from capibara.plan.hbm.choice import Considered
from capibara.plan.slices import parse_slice

__all__ = ["compile_for", "limit_of"]


def limit_of(topology: str, memory_limit_gb: float | None) -> tuple[int, str]:
    """Bytes that a device of a slice may use, and who says so."""
    target = parse_slice(topology)
    if memory_limit_gb is not None and memory_limit_gb * 2**30 < target.usable_hbm_bytes:
        return int(memory_limit_gb * 2**30), f"memory_limit_gb={memory_limit_gb:g}"
    return target.usable_hbm_bytes, f"a device of {target}"


def compile_for(
    how: str,
    step: Any,
    args: tuple[Any, ...],
    donated: tuple[int, ...],
    topology: str,
    memory_limit_gb: float | None,
    bandwidth_gbps: float | None,
    planning: Mapping[str, Any],
) -> tuple[Considered, Any]:
    """Plan a step for a slice, and what its best layout needs; the plan is None where nothing fits.

    Raises:
      PlanError: the request is invalid.
    """
    from capibara.plan.compiler import ProgramCache, compile_program
    from capibara.plan.planning import plan
    from capibara.plan.program import read_program
    from capibara.plan.step import step_work

    try:
        work = step_work(step, args, donate_argnums=donated)
        made = plan(work, topology, memory_limit_gb=memory_limit_gb, **planning)
    except DoesNotFitError as error:
        return Considered(remat=how, reason=str(error).splitlines()[0]), None
    except CompilationError as error:
        return Considered(remat=how, reason=f"the compiler refuses it: {str(error).splitlines()[0]}"), None
    best = made.best
    if best.memory_source != "compiler":
        raise PlanError(
            f"{topology}: the memory of a step function is only known when it is compiled, and that was not done. "
            "Install the TPU compiler: pip install 'capibara-jax[plan]'"
        )
    limit, _ = limit_of(topology, memory_limit_gb)
    fits = best.hbm_bytes <= limit
    reason = "" if fits else f"more than {size_text(limit)}"
    # In the cache, since the plan has just compiled it.
    folder = planning.get("cache")
    program = compile_program(
        work.job(best.layout, best.target), cache=None if folder is None else ProgramCache(folder)
    )
    facts = read_program(program.text)
    seconds = best.step_seconds
    if bandwidth_gbps is not None:
        seconds = max(seconds, facts.hbm_bytes / (bandwidth_gbps * 1e9))
    one = Considered(
        remat=how,
        bytes=best.hbm_bytes,
        host_bytes=program.memory.host if program.memory else 0,
        flops=facts.flops,
        traffic=facts.hbm_bytes,
        seconds=seconds,
        fits=fits,
        reason=reason,
    )
    return one, made
