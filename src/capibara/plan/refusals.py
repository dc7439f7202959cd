"""Why nothing fits, or what the compiler says against a layout, in words that tell what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping

from capibara.plan.compiler import CompiledProgram
from capibara.plan.errors import DoesNotFitError, PlanError
from capibara.plan.narrowed import Narrowed
from capibara.plan.search.best_first import Compiled, Search
from capibara.plan.sizes import limit_text, size_text
from capibara.plan.targets import Target
from capibara.plan.work import TrainWork, Work

__all__ = ["does_not_fit", "no_layout", "refusal", "require_fitting", "trains"]


def refusal(compiled: Compiled, limit: int) -> str:
    """Why a layout is not a candidate."""
    program = compiled.program
    if program.memory is None:
        return program.message
    return f"it takes {size_text(program.memory.total)}, more than {size_text(limit)}"


def require_fitting(found: Search, task: Work, target: Target, limit: int) -> None:
    if found.fitting:
        return
    if not found.compiled:
        raise no_layout(task, target)
    errors = [c for c in found.compiled if c.program.status == "error"]
    if len(errors) == len(found.compiled):
        message = errors[0].program.message
        gap = "\n" if "\n" in message else " "
        raise PlanError(f"the program could not be made or compiled:{gap}{message}")

    def size(program: CompiledProgram) -> int:
        return program.memory.total if program.memory else program.needed_bytes or 0

    least = min((c for c in found.compiled if c not in errors), key=lambda c: size(c.program) or math.inf)
    needed = size(least.program) or least.rough.hbm_bytes
    source = "by the compiler" if size(least.program) else "estimated"
    refusal = DoesNotFitError(does_not_fit(task, target, limit, needed, least.rough.memory, source))
    refusal.layout = least.layout
    raise refusal


def does_not_fit(
    task: Work, target: Target, limit: int, needed: int, kinds: Mapping[str, int], source: str
) -> str:
    largest = sorted(kinds.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
    if source != "estimated":  # the kinds are, and need not add up to the compiler's figure
        parts = f"estimated: {parts}"
    chips = math.ceil(target.num_chips * needed / limit)
    larger = target.larger(chips)
    more = f"More than {target.most}" if larger is None else f"A {target.kind} such as {larger}"
    help = (
        "a smaller train.batch_size or train.sequence_length would help; capibara plan --explain lists the largest "
        "buffers"
        if trains(task)
        else "or a smaller batch would help"
    )
    return (
        f"nothing fits: {task.title} on {target} takes at least {size_text(needed)} a device ({source}; {parts}), "
        f"and {limit_text(target, limit)}. {more}, {help}"
    )


def no_layout(task: Work, target: Target) -> PlanError:
    if not trains(task):
        return PlanError(
            f"no mesh of {target.num_devices} devices divides the work ({task.title}): the first dimension of every "
            "batch argument (batch_argnums) must be a multiple of the devices along 'data', and the longest dimension "
            f"of the others of those along 'model', together {target.num_devices}"
        )
    return PlanError(
        f"no mesh of {target.num_devices} devices divides the work ({task.title}): train.batch_size must be a multiple "
        "of the devices along 'data', model.num_heads of those along 'model', and model.num_layers of those along "
        f"'pipeline', together {target.num_devices}"
    )


def trains(work: Work) -> bool:
    """Whether it is the step of a configuration."""
    return isinstance(work.work if isinstance(work, Narrowed) else work, TrainWork)
