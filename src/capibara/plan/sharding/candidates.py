"""The ways to shard one array over a mesh, and their costs per step.

Mesh axes have three roles. Over *batch* axes the examples are sharded; parameters are replicated, with a sum of
gradients each step, or sharded for storage, with gathers before use. Over *tensor* axes the inner dimension of a
matrix may be sharded, with sums of activations; an array that is not is computed redundantly, but its storage may
still be sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from capibara.config.axes import AxisRules
from capibara.hardware import roofline
from capibara.plan.sharding.roles import Role
from capibara.plan.sharding.tree import Leaf
from capibara.sharding import Links

__all__ = ["Candidate", "Setting", "Work", "candidates", "cheapest", "cut_of", "priced"]

# Dimensions that are worked on as one: cutting them would cut inside of a head or a recurrence.
_WHOLE = {None, "head_dim", "state", "conv", "codes", "layers"}

Layout = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Work:
    """What is done with the parameters: sizes and rates that do not depend on a layout.

    Attributes:
      tokens: positions of a step, over all devices.
      training: forward, backward and update; or only forward.
      activation_bytes: bytes of one number of the compute dtype. sum_bytes: of one that devices add up.
      optimizer_bytes: bytes that the optimiser keeps for one parameter.
      flops: FLOP/s of one device. memory_bandwidth: bytes a second, or None.
    """

    tokens: float
    batch: int
    training: bool
    activation_bytes: int
    sum_bytes: int
    optimizer_bytes: float
    flops: float
    memory_bandwidth: float | None
    remat: str


@dataclass(frozen=True)
class Setting:
    """The parts that mesh axes play in one layout."""

    batch: tuple[str, ...]
    tensor: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """One layout of one array, with its cost for a step on one device.

    Attributes:
      layout: mesh axes of each dimension.
      cut: tensor axes that split the computation.
      state_bytes: what is kept: the parameter and, in training, its gradient and optimiser state.
      working_bytes: one layer of it, gathered.
      gathered, reduced: bytes that a device receives.
    """

    layout: Layout
    cut: tuple[str, ...]
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    working_bytes: float
    gathered: float
    reduced: float
    communication: float
    compute: float

    @property
    def state_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def seconds(self) -> float:
        return self.communication + self.compute


def choices(
    leaf: Leaf, role: Role, sizes: Mapping[str, int], rules: AxisRules | None
) -> list[list[tuple[str, ...]]]:
    """For each dimension the sets of mesh axes that may cut it, the empty one first; ``rules`` allow no others."""
    wide = [a for a, n in sizes.items() if n > 1]
    found = []
    for i, size in enumerate(leaf.shape):
        if leaf.axes is not None and rules is not None:
            name = leaf.axes[i]
            listed: Iterable[tuple[str, ...]] = (
                [tuple(c.split("+")) for c in rules.parameters.get(name, (name,))] if name else []
            )
            options = [axes for axes in listed if all(a in sizes for a in axes)]
        elif i < role.stack:
            options = [("pipeline",)] if "pipeline" in wide else []
        elif leaf.axes is not None and leaf.axes[i] in _WHOLE:
            options = []
        else:
            over = [a for a in wide if a != "pipeline"]
            options = [axes for k in range(1, len(over) + 1) for axes in itertools.combinations(over, k)]
        kept = [axes for axes in options if size % math.prod(sizes[a] for a in axes) == 0 and size]
        found.append([(), *dict.fromkeys(kept)])
    return found


def candidates(
    leaf: Leaf,
    role: Role,
    mode: tuple[str, ...],
    setting: Setting,
    links: Links,
    work: Work,
    rules: AxisRules | None,
) -> list[Candidate]:
    """Every layout worth having with the tensor axes ``mode`` cutting the group of this array.

    Of layouts that differ only in which dimension stores a part, the one is kept that cuts the embed dimension, or
    else the largest. A dimension is cut only into equal parts.
    """
    options = choices(leaf, role, links.sizes, rules)
    if rules is not None and mode:
        # Activations follow the rules, so that whatever these cut is cut.
        allowed = (axes for i in role.inner for axes in options[i] if axes and set(axes) <= set(mode))
        mode = next(allowed, ())
    cut_at = None
    if mode:
        cut_at = next((i for i in role.inner if any(set(mode) <= set(axes) for axes in options[i])), None)
    best: dict[frozenset[str], tuple[tuple[int, ...], Layout]] = {}
    for layout in itertools.product(*options):
        used = [a for axes in layout for a in axes]
        if len(used) != len(set(used)):
            continue
        if cut_at is not None and not set(mode) <= set(layout[cut_at]):
            continue
        storing = [len(set(axes) - set(mode if i == cut_at else ())) for i, axes in enumerate(layout)]
        # Prefer: few cut dimensions; the embed dimension; not the one that is cut for computing; the largest.
        rank = (
            sum(1 for n in storing if n),
            *(0 if i == role.embed else 2 if i == cut_at else 1 for i, n in enumerate(storing) if n),
            *(-leaf.shape[i] for i, n in enumerate(storing) if n),
        )
        key = frozenset(used)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, layout)
    cut = mode if cut_at is not None else ()
    return [priced(leaf, role, layout, cut, setting, links, work) for _, layout in best.values()]


def cut_of(role: Role, layout: Layout, setting: Setting) -> tuple[str, ...]:
    """The tensor axes that split the computation of an array with this layout."""
    return next((tuple(a for a in layout[i] if a in setting.tensor) for i in role.inner if layout[i]), ())


def priced(
    leaf: Leaf,
    role: Role,
    layout: Layout,
    cut: tuple[str, ...],
    setting: Setting,
    links: Links,
    work: Work,
) -> Candidate:
    """What a layout costs: bytes kept, bytes moved and seconds, for one device and one step."""
    stored = tuple(a for axes in layout for a in axes if a not in cut)
    ways, parts = links.ways(cut), links.ways(stored)
    layers = max(1, math.prod(leaf.shape[: role.stack]))
    held = leaf.elements / (ways * parts)
    whole = leaf.elements / ways  # what a device computes with
    tokens = work.tokens / links.ways(setting.batch)
    passes = 2 if work.training else 1
    # The inside of a block is computed again before its gradient.
    forwards = 2 if work.training and work.remat == "full" and role.kind == "matrix" else 1

    gather_bytes = whole * min(work.activation_bytes, leaf.itemsize)
    communication = passes * links.gather(gather_bytes, stored, layers)
    gathered = passes * links.moved(gather_bytes, stored) if stored else 0.0
    reduced = 0.0
    if work.training:
        scattered = tuple(a for a in stored if a in setting.batch)
        summed = tuple(a for a in setting.batch if a not in stored)
        gradient = whole * leaf.itemsize / max(1, links.ways(a for a in stored if a not in setting.batch))
        communication += links.gather(gradient, scattered, layers) + links.reduce(
            gradient / links.ways(scattered), summed
        )
        reduced += links.moved(gradient, scattered)
        reduced += 2 * links.moved(gradient / links.ways(scattered), summed)
    if cut:
        sums = forwards * role.forward_sums + (role.backward_sums if work.training else 0.0)
        size = tokens * role.sum_width * work.sum_bytes * layers
        communication += sums * links.reduce(size, cut, layers)
        reduced += sums * 2 * links.moved(size, cut)

    flops = (forwards + (2 if work.training else 0)) * role.flops * tokens / ways
    read = 0.0 if role.kind == "lookup" else passes * gather_bytes
    return Candidate(
        layout,
        cut,
        parameter_bytes=held * leaf.itemsize,
        gradient_bytes=held * leaf.itemsize if work.training else 0.0,
        optimizer_bytes=held * work.optimizer_bytes if work.training else 0.0,
        working_bytes=gather_bytes / layers if stored else 0.0,
        gathered=gathered,
        reduced=reduced,
        communication=communication,
        compute=roofline(flops, read, work.flops, work.memory_bandwidth),
    )


def cheapest(options: Sequence[Candidate], weight: float, shy: bool = False) -> Candidate:
    """The candidate with the least seconds + weight · bytes kept; of equal ones that with less bytes.

    Args:
      weight: ``math.inf`` for the least bytes. shy: with it, count what is gathered as if it were kept twice.
    """
    if not math.isinf(weight):
        return min(options, key=lambda c: (c.seconds + weight * c.state_bytes, c.state_bytes))
    return min(options, key=lambda c: (c.state_bytes + 2 * shy * c.working_bytes, c.seconds))
