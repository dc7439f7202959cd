"""Changes to a layout that does not fit, the cheapest first by rough estimates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from capibara.config import ModularModelConfig
from capibara.data.packed import decided
from capibara.plan.errors import PlanError
from capibara.plan.grids import at_least, is_rented
from capibara.plan.memory.estimate import MemoryEstimate, estimate_memory
from capibara.plan.search.space import microbatch_counts
from capibara.plan.sizes import size_text
from capibara.plan.slices import Slice, parse_slice
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = ["Change", "changes"]

_FURTHER = {"none": ("dots", "full"), "dots": ("full",), "full": ()}


class Change:
    """A remedy: a layout and a slice, described as text, with its estimate."""

    def __init__(self, words: str, layout: Layout, target: Target, config: ModularModelConfig) -> None:
        self.words = words
        self.layout = layout
        self.target = target
        self.estimate: MemoryEstimate = estimate_memory(config, layout, target)

    def __repr__(self) -> str:
        return f"Change({self.words!r}, {size_text(self.estimate.total)})"


def changes(
    config: ModularModelConfig, layout: Layout, target: Target, limit: int | None = None
) -> tuple[Change, ...]:
    """Layouts that fit by the estimate, in order of cost, those on the same chips first.

    More rematerialisation recomputes blocks; more microbatches make products smaller; sharding and a longer ``model``
    axis add communication; moments in the hosts' memory use a slow link each step; more chips cost more. Changes are
    tried one at a time, then rematerialisation together with microbatches, then everything that the same chips allow.

    Args:
      limit: bytes that a device may use, if less than it has.
    """
    config = config.replace(data=decided(config.data))
    found: list[Change] = []
    seen = {layout}
    for words, other, where in _proposals(config, layout, target):
        if (other, where) != (layout, target) and (where != target or other not in seen):
            seen.add(other)
            try:
                change = Change(words, other, where, config)
            except PlanError:
                continue
            usable = where.usable_hbm_bytes
            if change.estimate.total <= (usable if limit is None else min(usable, limit)):
                found.append(change)
    return tuple(found)


def _proposals(
    config: ModularModelConfig, layout: Layout, target: Target
) -> Iterator[tuple[str, Layout, Target]]:
    sizes = layout.axis_sizes
    data = sizes.get("data", 1)
    if layout.parameters == "replicated" and data > 1:
        if layout.optimizer != "sharded":
            yield (
                "shard the optimizer's moments over data",
                replace(layout, optimizer="sharded"),
                target,
            )
        yield (
            "shard the parameters over data",
            replace(layout, parameters="sharded", optimizer="as parameters"),
            target,
        )
    for remat in _FURTHER[layout.remat]:
        yield f"remat {remat}", replace(layout, remat=remat), target
    for count in _counts(config, layout, data):
        yield f"{count} microbatches", replace(layout, microbatches=count), target
    sharded = replace(layout, parameters="sharded", optimizer="as parameters")
    for count in _counts(config, layout, data):
        yield (
            f"remat full and {count} microbatches",
            replace(layout, remat="full", microbatches=count),
            target,
        )
    model = sizes.get("model", 1)
    if set(sizes) <= {"data", "model"}:
        for size in (2 * model, 4 * model, 8 * model):
            if target.num_devices % size == 0 and config.model.num_heads % size == 0:
                mesh = (("data", target.num_devices // size), ("model", size))
                for count in (layout.microbatches, *_counts(config, layout, target.num_devices // size)):
                    other = replace(sharded, mesh=mesh, remat="full", microbatches=count)
                    yield f"{size} devices along model, remat full, {count} microbatches", other, target
    if layout.offload == "none" and target.plans_host_memory:
        most = [layout.microbatches, *_counts(config, layout, data)][-1]
        yield (
            "the optimizer's moments in the hosts' memory, remat full",
            replace(sharded, remat="full", microbatches=most, offload="optimizer"),
            target,
        )
    for factor in (2, 4, 8, 16, 32):
        larger = _larger(target, factor)
        rows, left = divmod(config.train.batch_size, data * factor)
        if larger is None or left:
            continue
        # More devices have fewer rows each: as many microbatches as these allow, up to those of now.
        count = max(n for n in range(1, min(layout.microbatches, rows) + 1) if rows % n == 0)
        mesh = tuple((axis, size * factor if axis == "data" else size) for axis, size in layout.mesh)
        if "data" not in sizes:
            mesh = (("data", factor), *layout.mesh)
        fewer = "" if count == layout.microbatches else f", {count} microbatches"
        yield (
            f"{larger.num_chips} {larger.unit}s ({larger.text}){fewer}",
            replace(layout, mesh=mesh, microbatches=count),
            larger,
        )
        back = "" if layout.offload == "none" else ", the optimizer's moments on the devices"
        yield (
            f"{larger.num_chips} {larger.unit}s ({larger.text}), remat full{fewer}{back}",
            replace(sharded, mesh=mesh, remat="full", microbatches=count, offload="none"),
            larger,
        )


def _counts(config: ModularModelConfig, layout: Layout, data: int) -> Iterator[int]:
    """Larger numbers of microbatches that the batch divides into."""
    counts = microbatch_counts(config.train.batch_size, data)
    yield from (count for count in counts if count > layout.microbatches)


def _larger(target: Target, factor: int) -> Target | None:
    """The target with ``factor`` times the chips; the shortest axes of a grid are made longer."""
    if not isinstance(target, Slice):
        larger = target.larger(target.num_chips * factor)
        return larger if larger is not None and larger.num_chips == target.num_chips * factor else None

    shape = list(target.shape)
    left = factor
    while left > 1:
        shortest = min(range(len(shape)), key=lambda i: (shape[i], i))
        shape[shortest] *= 2
        left //= 2
    try:
        larger = parse_slice(f"{target.generation}:{'x'.join(map(str, sorted(shape)))}", target.view)
    except PlanError:
        return None
    if is_rented(larger.generation, larger.shape):
        return larger
    grid = at_least(larger.generation, larger.num_chips)
    if grid is None or math.prod(grid) != larger.num_chips:
        return None
    return parse_slice(f"{target.generation}:{'x'.join(map(str, grid))}", target.view)
