"""``optimize_sharding_strategy``: shard every array for an input shape, a mesh and a memory limit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from capibara.config.axes import AxisRules
from capibara.config.mesh import TPUMeshConfig, create_tpu_mesh_config
from capibara.errors import did_you_mean
from capibara.hardware import Chip, get_chip
from capibara.plan.errors import DoesNotFitError, PlanError
from capibara.plan.sharding.candidates import Candidate, Setting, Work, cut_of, priced
from capibara.plan.sharding.explaining import (
    assumptions,
    does_not_fit,
    planned_assumptions,
    planned_does_not_fit,
)
from capibara.plan.sharding.layouts import Placed, Step, best_of, placed, step_of
from capibara.plan.sharding.roles import Role, assign_roles, embed_width
from capibara.plan.sharding.search import (
    Problem,
    Solution,
    batch_by_rules,
    entries,
    memory_of,
    settings_of,
    solve,
)
from capibara.plan.sharding.strategy import Alternative, ArraySharding, ShardingStrategy
from capibara.plan.sharding.tree import Tree, compiled_of, read_tree
from capibara.plan.validation import MeshSizes
from capibara.sharding import links_of

if TYPE_CHECKING:
    from capibara.compose import CompiledModel
    from capibara.core import ModularCapibaraModel

__all__ = ["Target", "check_target", "optimize_sharding_strategy"]

Target = Literal["throughput", "latency", "memory"]
# Beyond which a float does not count singly.
_MOST_POSITIONS = 1 << 53
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def check_target(target: str) -> Target:
    """Validate a target.

    Raises:
      PlanError: it is not a target; the message suggests the nearest.
    """
    for known in get_args(Target):
        if target == known:
            return known
    raise PlanError(
        f"optimization_target={target!r} must be one of {', '.join(map(repr, get_args(Target)))}."
        + did_you_mean(str(target), get_args(Target))
    )


def optimize_sharding_strategy(
    model_params: CompiledModel | ModularCapibaraModel | Any,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    memory_limit_gb: float | None = None,
    *,
    axis_names: Sequence[str] | None = None,
    optimization_target: Target = "throughput",
    chip: str | Chip = "tpu-v4",
    param_axes: Any = None,
    rules: AxisRules | None = None,
    training: bool | None = None,
    optimizer_bytes: float | None = None,
    compute_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    remat: Literal["full", "none"] | None = None,
    link_bandwidth: float | None = None,
) -> ShardingStrategy:
    """Find a ``PartitionSpec`` for every array that makes a step fastest within the memory of the devices.

    Nothing is computed, no device is used, and arrays are not copied.

    For the training of a decoder whose configuration is known (a ``ModularCapibaraModel``), the strategy is the best of
    the layouts that the mesh allows by the memory and the time that ``capibara plan`` estimates for them without a
    compiler: see :mod:`capibara.plan.sharding.layouts`, and :attr:`ShardingStrategy.layout`.

    For all else, every array is searched for. Candidates for each array are: replicated, and each dimension sharded
    over each mesh axis, or several, that divides it evenly; and for the whole model, each set of axes that may shard
    the batch. See :mod:`capibara.plan.sharding.search` for the method, and :mod:`capibara.plan.sharding.roles` for
    what is inferred from shapes if dimensions have no names. The times are estimates from peak rates, for comparing
    layouts: see ``strategy.assumptions``. A compiled plan (``capibara plan``) is exact where this estimates.

    So are forward passes (``"latency"``, ``training=False``), encoders, steps on pairs of answers
    (``finetune.objective="dpo"``), models that the mesh does not divide, other ``rules`` than the standard ones, and
    chips that plans are not made for.

    Args:
      model_params: a nested dict (or other pytree) of arrays, ``jax.ShapeDtypeStruct`` or shapes; or a
        ``CompiledModel`` or ``ModularCapibaraModel``, whose dimensions have logical names.
      input_shape: of the whole batch over all devices: ``(batch, sequence)`` of tokens, ``(batch, sequence, embed)``,
        or ``(batch, features)`` if the model has no token embeddings.
      mesh_shape: devices along each axis.
      memory_limit_gb: GiB (2**30 bytes) that each device may use; by default the memory that the compiler makes
        available to programs on ``chip``.
      axis_names: of the mesh; by default those of :func:`capibara.config.mesh.create_tpu_mesh_config`.
      optimization_target: ``"throughput"``: least time for a training step. ``"latency"``: least time for a forward
        pass, counting that parameters are read from memory. ``"memory"``: least memory, then least time.
      chip: name in the catalogue; its peak, memory and links determine the times.
      param_axes: tuples of logical axis names for each array, with the same nesting, so that nothing has to be
        inferred.
      rules: consider only layouts that these allow, with the batch sharded by them. By default those of a compiled
        model whose backend has a mesh (its own constraints follow them) or rules other than the standard ones;
        otherwise none.
      training: whether there are gradients and optimiser state; by default for all targets but ``"latency"``.
      optimizer_bytes: bytes of optimiser state per parameter; by default, if the strategy is a layout, those of the
        configuration's optimiser; if every array is searched for, 8 (Adam: two float32 moments).
      compute_dtype: of activations and gathered parameters; by default the configuration's, or bfloat16 if every array
        is searched for.
      accumulate_dtype: in which products are summed, including sums over several devices; by default the
        configuration's, or float32 if every array is searched for.
      remat: whether the backward pass recomputes each block (``"full"``) or all values are stored (``"none"``); by
        default as the configuration has it, or ``"full"`` if every array is searched for.
      link_bandwidth: bytes per second, one way, over one link, instead of the chip's.

    Raises:
      DoesNotFitError: no layout fits; the message names the largest arrays and what would help.
      PlanError: an argument is invalid. ConfigError: the mesh or the memory limit is invalid. ChipError: an unknown
        chip, or one of its figures is not known.
    """
    target = check_target(optimization_target)
    shape = _checked_input(input_shape)
    device = get_chip(chip)
    if device.usable_hbm_bytes is None and device.usable_hbm_bytes_core is not None and device.view == "chip":
        device = device.core_view()  # JAX shows its cores as devices, each with its own half
    training = target != "latency" if training is None else training
    if memory_limit_gb is None:
        usable = device.usable_hbm_bytes or device.hbm_bytes
        if usable is None:
            raise PlanError(
                f"memory_limit_gb: {device.title}'s memory is not known, so give the GiB a device may use"
            )
        memory_limit_gb = usable / 2**30
    mesh = create_tpu_mesh_config(
        mesh_shape, "training" if training else "inference", memory_limit_gb, axis_names=axis_names
    )
    tree = read_tree(model_params, param_axes)
    named = any(leaf.axes is not None for leaf in tree.leaves)
    compiled = compiled_of(model_params)
    if compiled is not None and rules is None:
        rules = _fixed_rules(model_params, compiled)
    if named:
        for leaf in tree.leaves:
            (rules or AxisRules()).check(leaf.axes or (), mesh.axis_names, leaf.name)
    elif rules is not None:
        raise PlanError("rules: the dimensions of model_params have no names for them; give param_axes too")
    for name, dtype in (("compute_dtype", compute_dtype), ("accumulate_dtype", accumulate_dtype)):
        if dtype is not None and dtype not in _BYTES:
            raise PlanError(
                f"{name}={dtype!r} must be one of {', '.join(_BYTES)}." + did_you_mean(str(dtype), _BYTES)
            )
    if remat not in ("full", "none", None):
        raise PlanError(f"remat={remat!r} must be 'full' or 'none'")
    if optimizer_bytes is not None and (
        isinstance(optimizer_bytes, bool)
        or not isinstance(optimizer_bytes, int | float)
        or not 0 <= optimizer_bytes < math.inf
    ):
        raise PlanError(
            f"optimizer_bytes={optimizer_bytes!r}: expected bytes a parameter, 0 or more (Adam: 8)"
        )
    links = links_of(device, dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)), link_bandwidth)
    embed = embed_width(tree.leaves, shape)
    roles = assign_roles(tree.leaves, shape, embed)
    work = Work(
        tokens=_tokens(roles, shape),
        batch=shape[0],
        training=training,
        activation_bytes=_BYTES[compute_dtype or "bfloat16"],
        sum_bytes=_BYTES[accumulate_dtype or "float32"],
        optimizer_bytes=8.0 if optimizer_bytes is None else float(optimizer_bytes),
        flops=device.peak(compute_dtype or "bfloat16"),
        memory_bandwidth=device.hbm_bandwidth,
        remat=remat or "full",
    )
    problem = Problem(tree.leaves, tuple(roles), links, work, rules, embed, mesh.memory_limit_bytes)
    smallest = target == "memory"
    step = None
    if param_axes is None:
        step = step_of(
            model_params,
            problem,
            shape,
            device,
            remat=remat,
            optimizer_bytes=optimizer_bytes,
            compute_dtype=compute_dtype,
            accumulate_dtype=accumulate_dtype,
            link_bandwidth=link_bandwidth,
        )
    if step is not None and (layouts := placed(step, smallest=smallest)):
        chosen = best_of(layouts, problem.limit, smallest)
        if chosen is None:
            raise DoesNotFitError(planned_does_not_fit(step, mesh, layouts))
        return _planned(step, tree, mesh, target, chosen, layouts)
    solutions = [solve(problem, setting, smallest=smallest) for setting in settings_of(problem)]
    fitting = [s for s in solutions if s.memory.total <= problem.limit]
    if not fitting:
        raise DoesNotFitError(does_not_fit(problem, mesh, solutions))

    def order(s: Solution) -> tuple[float, float]:
        return (s.memory.total, s.seconds) if smallest else (s.seconds, s.memory.total)

    best = min(fitting, key=order)
    return _strategy(problem, tree, mesh, target, device, best, solutions)


def _fixed_rules(model: Any, compiled: CompiledModel) -> AxisRules | None:
    """The rules that a compiled model's constraints are already laid by, if there are any."""
    rules = getattr(compiled.backend, "rules", None)
    has_mesh = getattr(compiled.backend, "mesh", None) is not None
    if rules is None or (rules == AxisRules() and (model is not compiled or not has_mesh)):
        return None
    return rules


def _checked_input(input_shape: Any) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(n) for n in input_shape)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise PlanError(
            f"input_shape={input_shape!r}: expected integers of at least 1, batch first, such as (32, 512) or "
            "(32, 512, 768)"
        )
    if math.prod(shape) > _MOST_POSITIONS:
        raise PlanError(
            f"input_shape has {len(shape)} dimensions of together more than {_MOST_POSITIONS} numbers"
        )
    return shape


def _tokens(roles: Sequence[Role], shape: tuple[int, ...]) -> int:
    """Positions of a batch: each is worked on by every matrix once."""
    if len(shape) == 2:
        return math.prod(shape) if any(r.kind in ("lookup", "tied", "head") for r in roles) else shape[0]
    return math.prod(shape[:-1] or shape)


def _strategy(
    problem: Problem,
    tree: Tree,
    mesh: TPUMeshConfig,
    target: Target,
    chip: Chip,
    best: Solution,
    solutions: Sequence[Solution],
) -> ShardingStrategy:
    cut = tuple(a for a in mesh.axis_names if any(a in c.cut for c in best.chosen))
    return ShardingStrategy(
        arrays=_arrays(problem, best.chosen),
        mesh_shape=mesh.mesh_shape,
        axis_names=mesh.axis_names,
        batch_axes=best.setting.batch,
        tensor_axes=cut,
        optimization_target=target,
        memory=best.memory,
        memory_limit_bytes=int(problem.limit),
        communication_seconds=best.communication,
        compute_seconds=best.seconds - best.communication,
        bound_seconds=best.seconds if best.bound is None else min(best.bound, best.seconds),
        assumptions=assumptions(problem, chip),
        alternatives=tuple(_alternatives(problem, best, solutions)),
        structure=tree.structure,
    )


def _planned(
    step: Step, tree: Tree, mesh: TPUMeshConfig, target: Target, best: Placed, layouts: Sequence[Placed]
) -> ShardingStrategy:
    """The strategy of a layout."""
    limit = step.problem.limit
    fastest = placed(step) if target == "memory" else layouts  # of each way, the number of microbatches
    alike = [one for one in fastest if one.setting.batch == best.setting.batch and one.memory.total <= limit]
    others = sorted(
        (one for one in layouts if one is not best), key=lambda one: one.order(target == "memory")
    )
    return ShardingStrategy(
        arrays=_arrays(step.problem, best.arrays(step)),
        mesh_shape=mesh.mesh_shape,
        axis_names=mesh.axis_names,
        batch_axes=best.setting.batch,
        tensor_axes=best.setting.tensor,
        optimization_target=target,
        memory=best.memory,
        memory_limit_bytes=int(limit),
        communication_seconds=best.communicating,
        compute_seconds=best.computing,
        bound_seconds=min(one.seconds for one in alike),
        assumptions=planned_assumptions(step, best),
        alternatives=tuple(
            Alternative(one.name, one.seconds, one.communicating, one.memory, one.memory.total <= limit)
            for one in others
        ),
        structure=tree.structure,
        layout=best.layout,
    )


def _arrays(problem: Problem, chosen: Sequence[Candidate]) -> tuple[ArraySharding, ...]:
    from jax.sharding import PartitionSpec

    arrays = []
    for leaf, role, c in zip(problem.leaves, problem.roles, chosen, strict=True):
        spec = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in c.layout]
        arrays.append(
            ArraySharding(
                path=leaf.name,
                shape=leaf.shape,
                dtype=leaf.dtype,
                spec=PartitionSpec(*spec),
                kind=role.kind,
                bytes_total=leaf.bytes,
                bytes_per_device=c.parameter_bytes,
                state_bytes_per_device=c.state_bytes,
                bytes_gathered=c.gathered,
                bytes_reduced=c.reduced,
                seconds=c.communication,
                compute_seconds=c.compute,
            )
        )
    return tuple(arrays)


def _alternatives(problem: Problem, best: Solution, solutions: Sequence[Solution]) -> list[Alternative]:
    found: list[tuple[str, Solution]] = []

    def stored(c: Candidate) -> bool:
        return sum(map(len, c.layout)) > len(c.cut)

    kinds: list[tuple[str, Callable[[Role, Candidate], bool]]] = [
        ("every array replicated", lambda role, c: not any(c.layout)),
        (
            "matrices cut over tensor axes, nothing stored in parts",
            lambda role, c: bool(c.cut) and not stored(c),
        ),
        ("everything stored in parts, gathered before use", lambda role, c: not c.cut and stored(c)),
    ]
    for name, keep in kinds:
        found.append((name, solve(replace(problem, limit=math.inf), best.setting, keep=keep)))
    by_rules = _by_rules(problem)
    if by_rules is not None:
        found.append(("as AxisRules lays it out", by_rules))
    for s in solutions:
        if s is not best:
            where = " and ".join(s.setting.batch) or "no axis"
            found.append((f"examples over {where}, the best of it", s))
    seen = {tuple(c.layout for c in best.chosen)} if solutions else set()
    listed = []
    for name, s in found:
        layouts = tuple(c.layout for c in s.chosen)
        if s.setting == best.setting and layouts in seen:
            continue
        if s.setting == best.setting:
            seen.add(layouts)
        listed.append(
            Alternative(name, s.seconds, s.communication, s.memory, s.memory.total <= problem.limit)
        )
    return listed


def _by_rules(problem: Problem) -> Solution | None:
    """What :class:`AxisRules` would do by itself (as ``CompiledModel.propose_shardings``), where names are known."""
    if any(leaf.axes is None for leaf in problem.leaves):
        return None
    rules = problem.rules or AxisRules()
    mesh: Any = MeshSizes(problem.links.sizes)
    wide = [a for a, n in problem.links.sizes.items() if n > 1]
    batch = batch_by_rules(problem, rules)
    setting = Setting(batch, tuple(a for a in wide if a not in batch and a != "pipeline"))
    chosen = []
    for leaf, role in zip(problem.leaves, problem.roles, strict=True):
        layout = entries(rules.spec(leaf.axes or (), mesh, leaf.shape))
        cut = cut_of(role, layout, setting)
        chosen.append(priced(leaf, role, layout, cut, setting, problem.links, problem.work))
    return Solution(setting, tuple(chosen), memory_of(problem, setting, chosen))
