"""What is said of a sharding strategy: what it takes for granted, or why there is none and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from capibara.config.mesh import TPUMeshConfig
from capibara.hardware import Chip
from capibara.plan.sharding.search import STREAMS, Problem, Solution, settings_of, solve
from capibara.plan.sharding.strategy import bytes_text

__all__ = ["assumptions", "does_not_fit"]


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
    usable = chip.usable_hbm_bytes
    if usable is not None and problem.limit > usable:
        said.append(
            f"the limit of {bytes_text(problem.limit)} is more than the {bytes_text(usable)} that the compiler leaves "
            f"to programs on {chip.title}"
        )
    return tuple(said)


def does_not_fit(problem: Problem, mesh: TPUMeshConfig, solutions: Sequence[Solution]) -> str:
    """What a layout needs at least, which arrays take it, and which changes, worked out anew, would make it fit."""
    least = min(solutions, key=lambda s: s.memory.total)
    largest = sorted(zip(problem.leaves, least.chosen, strict=True), key=lambda pair: -pair[1].state_bytes)
    named = [f"{leaf.name} {list(leaf.shape)} {bytes_text(c.state_bytes)}" for leaf, c in largest[:3]]
    kept = "with gradient and optimiser state" if problem.work.training else "of each a device's part"
    said = (
        f"nothing fits {bytes_text(problem.limit)} a device on {mesh.num_devices} devices "
        f"({'x'.join(map(str, mesh.mesh_shape))}): the smallest layout found takes {least.memory}. The largest arrays, "
        f"{kept}: {', '.join(named)}."
    )
    helps, others, together = [], [], problem
    for steps in _remedies(problem):
        last = None
        for text, change in steps:
            size = _smallest(change(problem))
            last = (text, change, size)
            if size <= problem.limit:
                break
        if last is None:
            continue
        text, change, size = last
        together = change(together)
        if size <= problem.limit:
            helps.append(f"{text} ({bytes_text(size)})")
        elif size < 0.95 * least.memory.total:
            others.append(f"{text} ({bytes_text(size)})")
    if helps:
        return f"{said} What would make it fit: {'; '.join(helps)}."
    if others:
        size = _smallest(together)
        verb = "would fit" if size <= problem.limit else "still would not"
        return f"{said} None of these alone would do: {'; '.join(others)}. All together {verb} ({bytes_text(size)})."
    return said


def _smallest(problem: Problem) -> float:
    """Bytes a device of the smallest layout that is found."""
    return min(solve(problem, s, smallest=True).memory.total for s in settings_of(problem))


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

    recompute = [("remat='full'", in_work(remat="full"))] if work.training and work.remat == "none" else []
    factors = [n for n in (2, 4, 8, 16) if work.batch % n == 0]
    batches = [
        (f"a batch of {work.batch // n} at a time", in_work(batch=work.batch // n, tokens=work.tokens / n))
        for n in factors
    ]
    half = work.optimizer_bytes / 2
    moments = [(f"optimiser state of {half:g} bytes a parameter", in_work(optimizer_bytes=half))]
    types = [("parameters in bfloat16", narrow)] if any(leaf.itemsize > 2 for leaf in problem.leaves) else []
    axis = max(sizes, key=lambda a: (a in ("data", "fsdp"), sizes[a]))
    devices = []
    for n in (2, 4, 8, 16):
        wider = {**sizes, axis: sizes[axis] * n}
        text = f"{math.prod(wider.values())} devices as {'x'.join(map(str, wider.values()))}"
        devices.append((text, on(axis, n)))
    return [recompute, batches, moments if work.training and half else [], types, devices]
