"""The layouts of a training step that a mesh allows, whatever its axes are called, priced as ``capibara plan`` does.

A :class:`~capibara.sharding.Layout` names its axes by the part they play: ``data``, ``fsdp``, ``model`` … A user's mesh
has axes of any names, and several of them may play one part: on a mesh ``data`` 4 × ``model`` 8 the batch may be
sharded over both, which is the layout ``data 32 × model 1``. So each way of giving the mesh's axes parts is a layout.
Its memory is :func:`~capibara.plan.memory.estimate_memory`, its time
:func:`~capibara.plan.search.analytic.estimate_time`; the ``PartitionSpec`` of every array follows from the layout's
rules, with the user's axes in place of the parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.hardware import Chip
from capibara.plan.gpus import COUNTS, GPUS, GpuHost
from capibara.plan.grids import DIMENSIONS
from capibara.plan.memory import MemoryEstimate, estimate_memory
from capibara.plan.memory.arguments import item_size, step_arguments, step_gradients
from capibara.plan.search.analytic import estimate_time
from capibara.plan.search.space import can_have_ring, stage_counts
from capibara.plan.sharding.candidates import Candidate, Setting, cut_of, priced
from capibara.plan.sharding.search import Problem, batch_by_rules, entries, settings_of
from capibara.plan.sharding.strategy import MemoryUse
from capibara.plan.slices import GENERATIONS, Slice, views_of
from capibara.plan.stages import can_have_stages, stage_of
from capibara.plan.targets import Target
from capibara.plan.validation import MeshSizes
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

__all__ = ["Placed", "Step", "best_of", "placed", "step_of"]

Specs = tuple[tuple[tuple[str, ...], ...], ...]
_RINGS = ("context", "sequence")


@dataclass(frozen=True)
class Step:
    """A training step whose model's configuration is known.

    Attributes:
      problem: its arrays and the mesh, of which the sizes of the axes, the batch and the rules are used here.
      config: with the rows and the dtypes of the step.
      chip: what a device is.
      remat: what the backward pass recomputes.
      optimizer_bytes: bytes of optimizer state a parameter; None: those of the configuration's optimizer.
      link_bandwidth: bytes a second, one way, over one link; None: the chip's.
    """

    problem: Problem
    config: ModularModelConfig
    chip: Chip
    remat: Any
    optimizer_bytes: float | None
    link_bandwidth: float | None

    @property
    def optimizer_share(self) -> float:
        """Bytes of optimizer state over those that the configuration's optimizer keeps."""
        if self.optimizer_bytes is None:
            return 1.0
        # The configuration's is AdamW then, with two moments in the parameters' dtype.
        return self.optimizer_bytes / (2 * item_size(self.config.precision.param_dtype))

    @property
    def target(self) -> Target | None:
        """So many devices, as plans have them; None where there are no plans for such."""
        return _target(self.chip, math.prod(self.problem.links.sizes.values()))


@dataclass(frozen=True)
class Placed:
    """A layout on the user's mesh.

    Attributes:
      layout: as a plan has it.
      setting: the mesh axes that shard the batch, and those that shard matrices.
      specs: for each array and dimension the mesh axes.
      memory: bytes on each device.
      computing, communicating: seconds of a step.
      standard: whether ``AxisRules`` itself gives this layout.
    """

    layout: Layout
    setting: Setting
    specs: Specs
    memory: MemoryUse
    computing: float
    communicating: float
    standard: bool

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.computing + self.communicating

    def order(self, smallest: bool) -> tuple[float, float]:
        """What is minimised: the time, or the memory."""
        total = self.memory.total
        return (total, self.seconds) if smallest else (self.seconds, total)

    def arrays(self, step: Step) -> list[Candidate]:
        """The cost of each array by itself, with nothing overlapped."""
        problem = step.problem
        ring = _RINGS if "context" in self.layout.axis_sizes else ()  # which shards positions
        batch = (*self.setting.batch, *(a for a in problem.links.sizes if a in ring))
        setting = Setting(batch, self.setting.tensor)
        config, layout = stage_of(step.config, self.layout)
        kept: dict[tuple[str, tuple[str, ...]], float] = {}
        for block in (*step_arguments(config, layout), *step_gradients(config, layout)):
            kept[block.kind, block.path] = kept.get((block.kind, block.path), 0.0) + block.bytes
        return [
            replace(
                priced(leaf, role, spec, cut_of(role, spec, setting), setting, problem.links, problem.work),
                gradient_bytes=kept.get(("gradients", leaf.path), 0.0),
                optimizer_bytes=kept.get(("optimizer", leaf.path), 0.0) * step.optimizer_share,
            )
            for leaf, role, spec in zip(problem.leaves, problem.roles, self.specs, strict=True)
        ]

    @property
    def name(self) -> str:
        """In words, with the user's axes."""
        if self.standard:
            return "as AxisRules lays it out"
        words = [f"examples over {' and '.join(self.setting.batch) or 'no axis'}"]
        if self.setting.tensor:
            words.append(f"matrices over {' and '.join(self.setting.tensor)}")
        stored = dict.fromkeys(
            a
            for spec in self.specs
            for axes in spec
            for a in axes
            if a not in self.setting.tensor and a != "pipeline"
        )
        words.append(
            f"parameters stored in parts over {' and '.join(stored)}" if stored else "parameters replicated"
        )
        return ", ".join(words)


def step_of(
    model: Any,
    problem: Problem,
    shape: tuple[int, ...],
    chip: Chip,
    *,
    remat: str | None,
    optimizer_bytes: float | None,
    compute_dtype: str | None,
    accumulate_dtype: str | None,
    link_bandwidth: float | None,
) -> Step | None:
    """The step, if ``capibara plan`` would have it: the training of a decoder, on devices that plans are made for.

    None settings are those of the model's configuration.
    """
    if not isinstance(model, ModularCapibaraModel) or len(shape) < 2 or not problem.work.training:
        return None
    if problem.rules is not None and problem.rules != AxisRules():
        return None  # no layout has other rules
    config = model.config
    chosen = {"compute_dtype": compute_dtype, "accumulate_dtype": accumulate_dtype}
    changes: dict[str, Any] = {
        f"precision.{name}": value for name, value in chosen.items() if value is not None
    }
    changes |= {"train.batch_size": shape[0], "train.sequence_length": shape[1]}
    changes["train.gradient_accumulation_steps"] = 1
    if config.data.packing == "auto":
        changes["data.packing"] = "windows"  # so that no file is read
    if optimizer_bytes is not None:
        changes |= {"optimizer.name": "adamw", "train.ema": 0.0, "train.validate_ema": False}
    try:
        config = TrainWork(_changed(config, changes)).config
    except ConfigError:  # an encoder, or an input that the model does not take
        return None
    remat = remat or config.model.remat
    work = replace(
        problem.work,
        activation_bytes=item_size(config.precision.compute_dtype),
        sum_bytes=item_size(config.precision.accumulate_dtype),
        remat="full" if remat == "full" else "none",
    )
    step = Step(replace(problem, work=work), config, chip, remat, optimizer_bytes, link_bandwidth)
    return None if step.target is None else step


def _changed(config: ModularModelConfig, changes: Mapping[str, Any]) -> ModularModelConfig:
    """A configuration with other settings, by dotted key."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.replace(
        **{name: getattr(config, name).replace(**given) for name, given in sections.items()}
    )


def _target(chip: Chip, devices: int) -> Target | None:
    for generation in GENERATIONS:
        for view in views_of(generation):
            rest = (1,) * (DIMENSIONS[generation] - 1)
            found = Slice(generation, (1, *rest), view)
            if chip == found.chip:
                # Estimates read the number of devices; the grid they stand on is known to the compiler alone.
                chips, left = divmod(devices, found.devices_per_chip)
                return None if left else replace(found, shape=(chips, *rest))
    for generation in GPUS:
        found = GpuHost(generation, devices)
        if chip == found.chip:
            return found if devices in COUNTS else None
    return None


def placed(step: Step, *, smallest: bool = False) -> list[Placed]:
    """Every layout of the step that the mesh allows; none where the model cannot be divided over it.

    Args:
      smallest: of several numbers of microbatches take the one with the least memory, instead of the fastest that fits.
    """
    target = step.target
    assert target is not None
    found: list[Placed] = []
    estimates = lru_cache(maxsize=None)(partial(_estimates, step, target))  # many ways are one layout
    for setting, parts, layouts in _ways(step):
        specs = [_specs(step.problem, layout, parts) for layout in layouts[:1]]
        if not specs or not _allowed(step.problem, specs[0]):
            continue
        standard = _is_standard(step.problem, setting, specs[0])
        of_counts = [
            Placed(layout, setting, specs[0], *estimates(layout), standard=standard) for layout in layouts
        ]
        best = best_of(of_counts, step.problem.limit, smallest)
        found.append(best or min(of_counts, key=lambda one: one.order(True)))
    return found


def best_of(found: Sequence[Placed], limit: float, smallest: bool) -> Placed | None:
    """The fastest (or smallest) that fits; None if none does."""
    fitting = [one for one in found if one.memory.total <= limit]
    return min(fitting, key=lambda one: one.order(smallest)) if fitting else None


def _ways(step: Step) -> Iterator[tuple[Setting, Mapping[str, tuple[str, ...]], list[Layout]]]:
    """Ways to give the mesh's axes parts, with the layouts (of several numbers of microbatches) of each."""
    sizes, config = step.problem.links.sizes, step.config
    stages = sizes.get("pipeline", 1)
    experts, heads = config.model.experts.count, config.model.num_heads
    if stages > 1 and not can_have_stages(config, stages):
        return
    for setting in settings_of(step.problem):
        rings = tuple(a for a in setting.tensor if a in _RINGS)
        tensor = tuple(a for a in setting.tensor if a not in rings)
        ways = step.problem.links.ways(tensor)
        # Over an axis called ``expert`` the model's own constraints shard experts, so that nothing else is a layout.
        if len(rings) > 1 or heads % ways or (experts and "expert" in tensor):
            continue
        if rings and not can_have_ring(config, sizes[rings[0]]):
            continue
        own = ("expert",) if experts and "expert" in setting.batch and experts % sizes["expert"] == 0 else ()
        storing = tuple(a for a in setting.batch if a not in own)
        ways_to_store = [(stored, bool(setting.batch) and not stored) for stored in _subsets(storing)]
        if own and not storing:
            ways_to_store.append(((), False))  # over ``expert`` alone
        for stored, replicated in ways_to_store:
            parts = {"expert": own, "context": rings, "model": tensor, "fsdp": (), "data": storing}
            if stored and stored != storing:
                parts |= {"fsdp": stored, "data": tuple(a for a in storing if a not in stored)}
            yield (
                Setting(setting.batch, tensor),
                {**parts, "pipeline": ("pipeline",) if stages > 1 else ()},
                list(_layouts(step, parts, stages, replicated=replicated)),
            )


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for k in range(len(axes) + 1):
        yield from itertools.combinations(axes, k)


def _layouts(
    step: Step, parts: Mapping[str, tuple[str, ...]], stages: int, *, replicated: bool
) -> Iterator[Layout]:
    target = step.target
    assert target is not None
    links = step.problem.links
    named = {part: links.ways(axes) for part, axes in parts.items()}
    mesh = [("pipeline", stages)] if stages > 1 else []
    mesh += [(part, named[part]) for part in ("data", "fsdp", "expert", "context", "model")]
    # As plans have it: those of one device are left out, but for ``data`` and ``model``.
    kept = tuple(pair for pair in mesh if pair[1] > 1 or pair[0] in ("data", "model"))
    rows = math.prod(named[part] for part in ("data", "fsdp", "expert"))
    counts = stage_counts(step.config.train.batch_size, rows, stages) if stages > 1 else [1]
    for count in counts:
        yield Layout(
            mesh=kept,
            parameters="replicated" if replicated else "sharded",
            remat=step.remat,
            microbatches=count,
            flags=target.flag_choices(kept)[0],
        )


def _specs(problem: Problem, layout: Layout, parts: Mapping[str, tuple[str, ...]]) -> Specs:
    """The mesh axes of every dimension of every array."""
    mesh: Any = MeshSizes(layout.mesh)
    return tuple(
        tuple(
            tuple(a for part in axes for a in parts[part])
            for axes in entries(layout.rules.spec(leaf.axes or (), mesh, leaf.shape))
        )
        for leaf in problem.leaves
    )


def _allowed(problem: Problem, specs: Specs) -> bool:
    """Whether the given rules have a place for each entry."""
    if problem.rules is None:
        return True
    return all(
        not axes or "+".join(axes) in problem.rules.parameters.get(str(name), (str(name),))
        for leaf, spec in zip(problem.leaves, specs, strict=True)
        for name, axes in zip(leaf.axes or (), spec, strict=True)
    )


def _is_standard(problem: Problem, setting: Setting, specs: Specs) -> bool:
    rules, sizes = problem.rules or AxisRules(), problem.links.sizes
    mesh: Any = MeshSizes(sizes)

    def wide(spec: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [tuple(a for a in axes if sizes[a] > 1) for axes in spec]

    if wide([batch_by_rules(problem, rules)]) != [setting.batch]:
        return False
    return all(
        wide(entries(rules.spec(leaf.axes or (), mesh, leaf.shape))) == list(spec)
        for leaf, spec in zip(problem.leaves, specs, strict=True)
    )


def _estimates(step: Step, target: Target, layout: Layout) -> tuple[MemoryUse, float, float]:
    """The memory of a layout, and the seconds of computing and of communicating."""
    memory = estimate_memory(step.config, layout, target)
    time = estimate_time(step.config, layout, target, link_bandwidth=step.link_bandwidth)
    return _memory_use(step, memory), time.compute + time.memory, time.communication


def _memory_use(step: Step, memory: MemoryEstimate) -> MemoryUse:
    return MemoryUse(
        parameters=memory.parameters,
        gradients=memory.gradients,
        optimizer=memory.optimizer * step.optimizer_share,
        activations=memory.activations,
        gathered=0.0,
        temporaries=memory.temporaries or 0,
        padding=memory.padding,
        inputs=memory.inputs + memory.model_state,
    )
