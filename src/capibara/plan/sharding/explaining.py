"""What is said of a sharding strategy: what it takes for granted, or why there is none and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from capibara.config.mesh import TPUMeshConfig
from capibara.hardware import Chip
from capibara.plan.memory.arguments import item_size
from capibara.plan.sharding.candidates import Candidate
from capibara.plan.sharding.layouts import Placed, Step, placed
from capibara.plan.sharding.search import STREAMS, Problem, Solution, settings_of, solve
from capibara.plan.sharding.strategy import MemoryUse, bytes_text

__all__ = ["assumptions", "does_not_fit", "planned_assumptions", "planned_does_not_fit"]

_Case = TypeVar("_Case")


def assumptions(problem: Problem, chip: Chip) -> tuple[str, ...]:
    work = problem.work
    said = [
        f"{work.tokens:,.0f} positions a step, residual stream {problem.embed} wide"
        + ("" if any(leaf.axes for leaf in problem.leaves) else ", dimensions understood from their sizes"),
        f"products at the peak of {chip.title} ({work.flops / 1e12:.4g} TFLOP/s), communication at "
        f"{problem.links.bandwidth / 1e9:.4g} GB/s "
        + ("through a switch" if chip.kind == "gpu" else "along a mesh axis, each a closed ring")
        + ", nothing overlapped",
        f"activations and gathered parameters of {work.activation_bytes} bytes a number, sums over devices of "
        f"{work.sum_bytes}; attention is causal and keeps no scores; work on single numbers takes no time",
    ]
    if work.training:
        kept = "the input of each block, its inside computed again" if work.remat == "full" else "every value"
        said.append(
            f"forward, backward and update; gradients in the parameters' dtype, {work.optimizer_bytes:g} bytes of "
            f"optimiser state a parameter; of activations {kept}, and {STREAMS} float32 numbers a feature of the "
            "residual stream while a block is worked on; scores of a vocabulary in float32 with their gradient"
        )
    else:
        said.append("forward only; no gradients, no optimiser, no cache of keys and values")
    if any(role.experts for role in problem.roles):
        said.append("every expert works on every position")
    return (*said, *_beyond(problem.limit, chip))


def _beyond(limit: float, chip: Chip) -> list[str]:
    """That a limit is more than programs get."""
    usable = chip.usable_hbm_bytes
    if usable is None or limit <= usable:
        return []
    return [
        f"the limit of {bytes_text(limit)} is more than the {bytes_text(usable)} that the compiler leaves to programs "
        f"on {chip.title}"
    ]


def planned_assumptions(step: Step, found: Placed) -> tuple[str, ...]:
    """As :func:`assumptions`, of a step whose configuration is known."""
    problem, p = step.problem, step.config.precision
    state = f"{step.config.optimizer.name}'s state"
    if step.optimizer_bytes is not None:
        state = f"{step.optimizer_bytes:g} bytes of optimiser state a parameter"
    return (
        f"{problem.work.tokens:,.0f} positions a step, residual stream {problem.embed} wide",
        f"memory and time of the layout {found.layout}, as capibara plan estimates them without a compiler for "
        f"{step.chip.title}",
        f"a training step: computing in {p.compute_dtype}, sums in {p.accumulate_dtype}, parameters and gradients in "
        f"{p.param_dtype}, {state}; gradients are those of the memory peak",
        f"of each array by itself: communication at {problem.links.bandwidth / 1e9:.4g} GB/s "
        + ("through a switch" if problem.links.switched else "along a mesh axis, each a closed ring")
        + ", nothing overlapped",
        *_beyond(problem.limit, step.chip),
    )


def does_not_fit(problem: Problem, mesh: TPUMeshConfig, solutions: Sequence[Solution]) -> str:
    """What a layout needs at least, which arrays take it, and which changes, worked out anew, would make it fit."""
    least = min(solutions, key=lambda s: s.memory.total)
    return _refusal(problem, mesh, least.memory, least.chosen, problem, _smallest, _remedies(problem))


def planned_does_not_fit(step: Step, mesh: TPUMeshConfig, layouts: Sequence[Placed]) -> str:
    """As :func:`does_not_fit`, for the layouts of a step whose configuration is known."""
    least = min(layouts, key=lambda one: one.memory.total)
    chosen = least.arrays(step)
    return _refusal(step.problem, mesh, least.memory, chosen, step, _smallest_layout, _remedies_of_step(step))


def _refusal(
    problem: Problem,
    mesh: TPUMeshConfig,
    least: MemoryUse,
    chosen: Sequence[Candidate],
    whole: _Case,
    smallest: Callable[[_Case], float],
    remedies: Sequence[Sequence[tuple[str, Callable[[_Case], _Case]]]],
) -> str:
    largest = sorted(zip(problem.leaves, chosen, strict=True), key=lambda pair: -pair[1].state_bytes)
    named = [f"{leaf.name} {list(leaf.shape)} {bytes_text(c.state_bytes)}" for leaf, c in largest[:3]]
    kept = "with gradient and optimiser state" if problem.work.training else "of each a device's part"
    said = (
        f"nothing fits {bytes_text(problem.limit)} a device on {mesh.num_devices} devices "
        f"({'x'.join(map(str, mesh.mesh_shape))}): the smallest layout found takes {least}. The largest arrays, "
        f"{kept}: {', '.join(named)}."
    )
    helps, others, together = [], [], whole
    for steps in remedies:
        tried = []
        for text, change in steps:
            tried.append((smallest(change(whole)), text, change))
            if tried[-1][0] <= problem.limit:
                break
        size, text, change = min(tried, key=lambda one: one[0], default=(math.inf, "", None))
        if change is None or math.isinf(size):  # fewer rows or more devices than a layout has a place for
            continue
        together = change(together)
        if size <= problem.limit:
            helps.append(f"{text} ({bytes_text(size)})")
        elif size < 0.95 * least.total:
            others.append(f"{text} ({bytes_text(size)})")
    if helps:
        return f"{said} What would make it fit: {'; '.join(helps)}."
    if others:
        said += f" None of these alone would do: {'; '.join(others)}."
        size = smallest(together)
        if math.isfinite(size):
            verb = "would fit" if size <= problem.limit else "still would not"
            said += f" All together {verb} ({bytes_text(size)})."
    return said


def _smallest(problem: Problem) -> float:
    """Bytes a device of the smallest layout that is found."""
    return min(solve(problem, s, smallest=True).memory.total for s in settings_of(problem))


def _smallest_layout(step: Step) -> float:
    """The same of a step; infinite where none is left."""
    layouts = placed(step, smallest=True) if step.target else []
    return min((one.memory.total for one in layouts), default=math.inf)


Change = Callable[[Problem], Problem]


def _remedies(problem: Problem) -> list[list[tuple[str, Change]]]:
    """What a user could change, of each kind the mildest first."""
    work, sizes = problem.work, problem.links.sizes

    def in_work(**changes: Any) -> Change:
        return lambda p: replace(p, work=replace(p.work, **changes))

    def on(axis: str, factor: int) -> Change:
        return lambda p: replace(
            p, links=replace(p.links, sizes={**p.links.sizes, axis: p.links.sizes[axis] * factor})
        )

    def narrow(p: Problem) -> Problem:
        kept = (replace(leaf, itemsize=min(leaf.itemsize, 2), dtype="bfloat16") for leaf in p.leaves)
        return replace(p, leaves=tuple(kept))

    recompute = [(_RECOMPUTE, in_work(remat="full"))] if work.training and work.remat == "none" else []
    batches = [
        (text, in_work(batch=work.batch // n, tokens=work.tokens / n)) for n, text in _smaller(work.batch)
    ]
    half = work.optimizer_bytes / 2
    moments = [(f"optimiser state of {half:g} bytes a parameter", in_work(optimizer_bytes=half))]
    types = [(_NARROW, narrow)] if any(leaf.itemsize > 2 for leaf in problem.leaves) else []
    devices = [(text, on(axis, n)) for axis, n, text in _wider(sizes)]
    return [recompute, batches, moments if work.training and half else [], types, devices]


_RECOMPUTE, _NARROW = "remat='full'", "parameters in bfloat16"


def _smaller(batch: int) -> list[tuple[int, str]]:
    """Into how many parts a batch may be divided."""
    return [(n, f"a batch of {batch // n} at a time") for n in (2, 4, 8, 16) if batch % n == 0]


def _wider(sizes: Mapping[str, int]) -> list[tuple[str, int, str]]:
    """An axis, and how many times as long it may be."""
    axis = max(sizes, key=lambda a: (a in ("data", "fsdp"), sizes[a]))
    found = []
    for n in (2, 4, 8, 16):
        wider = {**sizes, axis: sizes[axis] * n}
        text = f"{math.prod(wider.values())} devices as {'x'.join(map(str, wider.values()))}"
        found.append((axis, n, text))
    return found


def _remedies_of_step(step: Step) -> list[list[tuple[str, Callable[[Step], Step]]]]:
    """The same for a step whose configuration is known."""
    problem = step.problem

    def with_sizes(axis: str, factor: int) -> Callable[[Step], Step]:
        def change(s: Step) -> Step:
            links = s.problem.links
            sizes = {**links.sizes, axis: links.sizes[axis] * factor}
            return replace(s, problem=replace(s.problem, links=replace(links, sizes=sizes)))

        return change

    def with_batch(factor: int) -> Callable[[Step], Step]:
        def change(s: Step) -> Step:
            rows = s.problem.work.batch // factor
            train = s.config.train.replace(batch_size=rows)
            work = replace(s.problem.work, batch=rows)
            return replace(s, problem=replace(s.problem, work=work), config=s.config.replace(train=train))

        return change

    def narrow(s: Step) -> Step:
        # Moments that are stated in bytes stay as they are.
        precision = s.config.precision.replace(param_dtype="bfloat16")
        return replace(s, config=s.config.replace(precision=precision))

    recompute: list[tuple[str, Callable[[Step], Step]]] = []
    if step.remat != "full":
        recompute = [(_RECOMPUTE, lambda s: replace(s, remat="full"))]
    batches = [(text, with_batch(n)) for n, text in _smaller(problem.work.batch)]
    moments: list[tuple[str, Callable[[Step], Step]]] = []
    if half := (step.optimizer_bytes or 0.0) / 2:
        text = f"optimiser state of {half:g} bytes a parameter"
        moments = [(text, lambda s: replace(s, optimizer_bytes=half))]
    types = [(_NARROW, narrow)] if item_size(step.config.precision.param_dtype) > 2 else []
    devices = [(text, with_sizes(axis, n)) for axis, n, text in _wider(problem.links.sizes)]
    return [recompute, batches, moments, types, devices]
