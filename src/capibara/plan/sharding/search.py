"""Search the sharding of every array that makes the step fastest within the memory.

For each *setting* (the mesh axes that shard the batch; the others are tensor axes), arrays of one group choose
together whether tensor axes shard them, and each array individually how it is stored. Memory couples all of them:
each stored byte has a price (a Lagrange multiplier, in seconds), every array takes the cheapest option at that price,
and bisection finds the lowest price at which everything fits. Remaining memory is then spent on the upgrades that
save the most seconds per byte. The dual gives a lower bound on the time of all layouts of the setting that fit, so
that the gap is known. Finally, the memory of the result is summed again, array by array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.config.axes import AxisRules
from capibara.plan.sharding.candidates import Candidate, Setting, Work, candidates, cheapest
from capibara.plan.sharding.roles import Role
from capibara.plan.sharding.strategy import MemoryUse
from capibara.plan.sharding.tree import Leaf
from capibara.plan.validation import MeshSizes
from capibara.sharding import Links

__all__ = ["STREAMS", "Problem", "Solution", "batch_by_rules", "entries", "memory_of", "settings_of", "solve"]

Mode = tuple[str, ...]
_STEPS = 60
# Float32 numbers for each position and feature of the residual stream while a block is worked on forward and back:
# its sums and norms, and their gradients. Chosen to meet two compiled steps of the packaged decoder of 1.2 billion
# parameters on a v4 mesh of 4×8: 26.1 GiB with the batch over both axes, 29.2 with matrices cut over one. Of a third,
# which stores parameters in parts, the estimate is too much: 8.6 GiB instead of 6.8.
STREAMS = 9


@dataclass(frozen=True)
class Problem:
    """What to shard, over which mesh, for which work."""

    leaves: tuple[Leaf, ...]
    roles: tuple[Role, ...]
    links: Links
    work: Work
    rules: AxisRules | None
    embed: int
    limit: float


@dataclass(frozen=True)
class Solution:
    """One sharding of all arrays.

    Attributes:
      chosen: for each array.
      bound: lower bound in seconds for layouts of this setting that fit; None if not computed.
    """

    setting: Setting
    chosen: tuple[Candidate, ...]
    memory: MemoryUse
    bound: float | None = None

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.chosen)

    @property
    def communication(self) -> float:
        return sum(c.communication for c in self.chosen)


def settings_of(problem: Problem) -> list[Setting]:
    """All ways of sharding the batch evenly over mesh axes.

    Axes called ``data`` or ``fsdp`` shard it wherever possible, which is their purpose. With rules, the batch is
    sharded by them, like the model's own constraints.
    """
    sizes = problem.links.sizes
    wide = [a for a, n in sizes.items() if n > 1 and a != "pipeline"]
    if problem.rules is not None:
        choices = [batch_by_rules(problem, problem.rules)]
    else:
        choices = [c for k in range(len(wide) + 1) for c in itertools.combinations(wide, k)]
        choices = [c for c in choices if problem.work.batch % problem.links.ways(c) == 0]
        meant = [len({"data", "fsdp"} & set(c)) for c in choices]
        choices = [c for c, m in zip(choices, meant, strict=True) if m == max(meant)]
    return [Setting(b, tuple(a for a in wide if a not in b)) for b in choices]


def batch_by_rules(problem: Problem, rules: AxisRules) -> tuple[str, ...]:
    """The mesh axes over which rules shard the batch."""
    mesh: Any = MeshSizes(problem.links.sizes)
    (entry,) = rules.spec(("batch",), mesh, (problem.work.batch,), kind="activations")
    return entries((entry,))[0]


def entries(spec: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension of a ``PartitionSpec``."""
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)


def memory_of(problem: Problem, setting: Setting, chosen: Sequence[Candidate]) -> MemoryUse:
    """Bytes on each device: stored arrays, and an estimate of temporaries; see :class:`MemoryUse`."""
    work, tokens = problem.work, problem.work.tokens / problem.links.ways(setting.batch)
    number = work.activation_bytes
    block = logits = 0.0
    layers = 1
    for role, candidate in zip(problem.roles, chosen, strict=True):
        made = tokens * role.out_features / problem.links.ways(candidate.cut)
        if role.kind in ("head", "tied"):
            # Scores and their gradient in float32, and never both of two heads.
            logits = max(logits, made * (8 if work.training else 4))
        elif role.kind == "matrix":
            layers = max(layers, role.repeats)
            instances = role.repeats if role.stack == 0 else 1
            block += made * number / instances
    stream = tokens * problem.embed * number
    wide = STREAMS * tokens * problem.embed * 4
    if not work.training:
        activations = block + 2 * stream + logits
    elif work.remat == "full":
        # The input of every block; one block's values and their gradients.
        activations = layers * stream + 2 * (block + stream) + wide + logits
    else:
        activations = layers * (block + 2 * stream) + block + wide + logits
    return MemoryUse(
        parameters=sum(c.parameter_bytes for c in chosen),
        gradients=sum(c.gradient_bytes for c in chosen),
        optimizer=sum(c.optimizer_bytes for c in chosen),
        activations=activations,
        # One gathered while another computes.
        gathered=sum(sorted((c.working_bytes for c in chosen), reverse=True)[:2]),
    )


class _Options:
    """Candidates of every array by mode, made once for arrays that are alike."""

    def __init__(
        self, problem: Problem, setting: Setting, keep: Callable[[Role, Candidate], bool] | None
    ) -> None:
        self.problem, self.setting = problem, setting
        axes = setting.tensor
        self.modes: list[Mode] = [c for k in range(len(axes) + 1) for c in itertools.combinations(axes, k)]
        if problem.rules is not None:
            self.modes = [axes]
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, role in enumerate(problem.roles):
            groups.setdefault(role.group, []).append(i)
        self.groups = list(groups.values())
        kept: dict[object, list[Candidate]] = {}
        self.of: dict[tuple[int, Mode], list[Candidate]] = {}
        for i, (leaf, role) in enumerate(zip(problem.leaves, problem.roles, strict=True)):
            alike = (leaf.shape, leaf.itemsize, leaf.axes, role.kind, role.stack, role.embed, role.inner)
            alike += (role.forward_sums, role.backward_sums, role.sum_width)
            for mode in self.modes:
                key = (alike, mode)
                if key not in kept:
                    made = candidates(leaf, role, mode, setting, problem.links, problem.work, problem.rules)
                    wanted = made if keep is None else [c for c in made if keep(role, c)]
                    kept[key] = _undominated(wanted or made)
                self.of[i, mode] = kept[key]
        # Groups of arrays that are all alike choose alike.
        self.classes: dict[tuple[int, ...], list[list[int]]] = {}
        for members in self.groups:
            key = tuple(id(self.of[i, self.modes[-1]]) for i in members)
            self.classes.setdefault(key, []).append(members)

    def at(self, weight: float, modes: Sequence[Mode], shy: bool = False) -> tuple[list[Candidate], float]:
        """What everyone takes when a byte costs ``weight`` seconds, and the sum of seconds + weight · bytes."""
        chosen: dict[int, Candidate] = {}
        total = 0.0
        for alike in self.classes.values():
            members = alike[0]
            best: tuple[tuple[float, float], list[Candidate]] | None = None
            for mode in modes:
                picked = [cheapest(self.of[i, mode], weight, shy) for i in members]
                seconds = sum(c.seconds for c in picked)
                size = sum(c.state_bytes + 2 * shy * c.working_bytes for c in picked)
                key = (size, seconds) if math.isinf(weight) else (seconds + weight * size, size)
                if best is None or key < best[0]:
                    best = (key, picked)
            assert best is not None
            total += best[0][0] * len(alike)
            for group in alike:
                chosen.update(zip(group, best[1], strict=True))
        return [chosen[i] for i in range(len(self.problem.leaves))], total


def _undominated(options: list[Candidate]) -> list[Candidate]:
    """Without those that another one beats in bytes, seconds and what is gathered."""
    return [
        c
        for c in options
        if not any(
            o.state_bytes <= c.state_bytes
            and o.seconds <= c.seconds
            and o.working_bytes <= c.working_bytes
            and (o.state_bytes, o.seconds, o.working_bytes) != (c.state_bytes, c.seconds, c.working_bytes)
            for o in options
        )
    ]


def solve(
    problem: Problem,
    setting: Setting,
    *,
    smallest: bool = False,
    keep: Callable[[Role, Candidate], bool] | None = None,
) -> Solution:
    """The fastest layout of a setting that fits or, if none does (or with ``smallest``), the smallest.

    Args:
      keep: use only candidates that it accepts, for arrays for which it accepts any.
    """
    options = _Options(problem, setting, keep)
    policies: list[list[Mode]] = [options.modes]
    if setting.tensor:
        policies.append([options.modes[-1]])  # cut all that can be: the least activations
    found: list[Solution] = []
    for modes in policies:

        def at(weight: float, shy: bool = False, modes: list[Mode] = modes) -> tuple[Solution, float]:
            chosen, total = options.at(weight, modes, shy)
            return Solution(setting, tuple(chosen), memory_of(problem, setting, chosen)), total

        least = min((at(math.inf, shy)[0] for shy in (False, True)), key=lambda s: s.memory.total)
        if smallest or least.memory.total > problem.limit:
            found.append(least)
            continue
        free, dual = at(0.0)
        if free.memory.total <= problem.limit:
            found.append(Solution(setting, free.chosen, free.memory, dual))
            continue
        low, high, best, bound = -40.0, 10.0, least, dual
        thinnest, _ = options.at(math.inf, [options.modes[-1]])
        spare = problem.limit - memory_of(problem, setting, thinnest).activations
        for _ in range(_STEPS):
            middle = (low + high) / 2
            tried, dual = at(10.0**middle)
            bound = max(bound, dual - 10.0**middle * spare)
            if tried.memory.total <= problem.limit:
                high, best = middle, tried if tried.seconds < best.seconds else best
            else:
                low = middle
        found.append(_with_upgrades(problem, options, best, bound))
    fitting = [s for s in found if s.memory.total <= problem.limit]
    if fitting and not smallest:
        best = min(fitting, key=lambda s: (s.seconds, s.memory.total))
        # The first policy leaves every choice open, so that its bound holds for all.
        return Solution(setting, best.chosen, best.memory, found[0].bound)
    return min(found, key=lambda s: (s.memory.total, s.seconds))


def _with_upgrades(problem: Problem, options: _Options, at: Solution, bound: float) -> Solution:
    """Spend what room is left: whichever array saves the most seconds a byte first, as long as it fits."""
    chosen = list(at.chosen)
    moves = []
    for i, current in enumerate(chosen):
        for mode in options.modes:
            for other in options.of[i, mode]:
                more, saved = other.state_bytes - current.state_bytes, current.seconds - other.seconds
                if other.cut == current.cut and saved > 0:
                    moves.append((-saved / max(more, 1e-9), i, more, other))
    room = problem.limit - at.memory.total
    done: set[int] = set()
    for _, i, more, other in sorted(moves, key=lambda m: m[:3]):
        if i not in done and more <= room and other.working_bytes <= chosen[i].working_bytes:
            chosen[i] = other
            done.add(i)
            room -= more
    memory = memory_of(problem, at.setting, chosen)
    assert memory.total <= problem.limit * (1 + 1e-9)
    return Solution(at.setting, tuple(chosen), memory, bound)
