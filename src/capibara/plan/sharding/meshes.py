"""Meshes of real devices, and real arrays sharded over them.

A :class:`MeshSharding` is a ``jax.sharding.Mesh`` of chosen devices with an optimisation target. Its
:meth:`~MeshSharding.shard_model` places a model's arrays according to a strategy, by ``jax.device_put`` and
``NamedSharding``; functions called with them then run on all devices, because XLA's partitioner follows its
arguments. On a CPU, devices are emulated by starting Python with
``XLA_FLAGS=--xla_force_host_platform_device_count=32``.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.compose import CompiledModel
from capibara.config.mesh import TPUMeshConfig, create_tpu_mesh_config
from capibara.core import ModularCapibaraModel
from capibara.plan.errors import PlanError
from capibara.plan.sharding.optimize import Target, check_target, optimize_sharding_strategy
from capibara.plan.sharding.strategy import ShardingStrategy
from capibara.plan.sharding.tree import flatten

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["MeshSharding", "create_mesh_sharding", "create_training_mesh"]

_FLAG = "XLA_FLAGS=--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class MeshSharding:
    """A mesh of real devices and its objective, created by :func:`create_mesh_sharding`.

    Attributes:
      mesh: a ``jax.sharding.Mesh`` with ``Auto`` axes.
      config: its description.
      optimization_target: what :meth:`optimize` prefers: ``"throughput"``, ``"latency"`` or ``"memory"``.
    """

    mesh: Mesh
    config: TPUMeshConfig
    optimization_target: Target

    def optimize(
        self,
        model_params: Any,
        input_shape: Sequence[int],
        memory_limit_gb: float | None = None,
        **settings: Any,
    ) -> ShardingStrategy:
        """:func:`optimize_sharding_strategy` for this mesh and target."""
        return optimize_sharding_strategy(
            model_params,
            input_shape,
            self.config.mesh_shape,
            memory_limit_gb,
            axis_names=self.config.axis_names,
            optimization_target=self.optimization_target,
            **settings,
        )

    def shard_model(
        self,
        model: Any,
        strategy: ShardingStrategy | None = None,
        *,
        input_shape: Sequence[int] | None = None,
        memory_limit_gb: float | None = None,
    ) -> Any:
        """Return the same model with its arrays sharded over the mesh. The original is not changed.

        Args:
          model: one of

            * a nested dict (or other pytree) of arrays: returned with the same nesting, placed; * a
            ``ModularCapibaraModel``: an equal one on this mesh, with its parameters placed and its state replicated;
              calling it runs on all devices;
            * ``(compiled, params)`` with a ``CompiledModel``: the pair, with the parameters placed. A compiled model
              with its own mesh must have this one;
            * any other object with ``params``: a shallow copy with them placed.
          strategy: from :func:`optimize_sharding_strategy` or :meth:`optimize`.
          input_shape, memory_limit_gb: without a strategy, :meth:`optimize` computes one for them.

        Raises:
          PlanError: neither a strategy nor an input shape, a strategy for another mesh, or arrays other than those of
            the strategy (the message names the first that differs).
        """
        if strategy is None:
            if input_shape is None:
                raise PlanError(
                    "shard_model needs strategy=…, from optimize_sharding_strategy, or input_shape=… to make one for"
                )
            strategy = self.optimize(_planned(model), input_shape, memory_limit_gb)
        elif not isinstance(strategy, ShardingStrategy):
            raise PlanError(
                f"strategy={strategy!r:.80}: expected a ShardingStrategy, from optimize_sharding_strategy(…)"
            )
        strategy.check_mesh(self.mesh)
        if isinstance(model, ModularCapibaraModel):
            return self._modular(model, strategy)
        if isinstance(model, CompiledModel):
            raise PlanError(
                "model is a CompiledModel, which holds no arrays: give it with them, shard_model((compiled, params), …)"
            )
        if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], CompiledModel):
            compiled, params = model
            own = getattr(compiled.backend, "mesh", None)
            if own is not None and own != self.mesh:
                raise PlanError(
                    "model was compiled for another mesh: compile it with JaxBackend(device_mesh=mesh_sharding.mesh, "
                    "rules=strategy.axis_rules()), or without a mesh"
                )
            return compiled, self._placed(params, strategy)
        if hasattr(model, "params") and not isinstance(model, Mapping | list | tuple):
            sharded = copy.copy(model)
            try:
                sharded.params = self._placed(model.params, strategy)
            except AttributeError as error:
                raise PlanError(
                    f"model is a {type(model).__name__}, whose params cannot be set ({error}): give the params "
                    "themselves"
                ) from error
            return sharded
        return self._placed(model, strategy)

    def shard_batch(self, batch: Any, strategy: ShardingStrategy) -> Any:
        """Shard inputs over the mesh: the first dimension over the strategy's batch axes, the others replicated.

        Args:
          batch: an array or pytree of arrays, batch first.

        Raises:
          PlanError: a batch that these axes do not divide evenly, or a strategy for another mesh.
        """
        import jax
        import numpy as np

        strategy.check_mesh(self.mesh)
        ways = math.prod(strategy.axis_sizes[a] for a in strategy.batch_axes)
        for path, x in flatten(batch)[0]:
            shape = np.shape(x)
            if ways > 1 and (not shape or shape[0] % ways):
                raise PlanError(
                    f"batch{'.'.join(('', *path))} has the shape {shape}, but its first dimension is to be cut into "
                    f"{ways} equal parts over {' and '.join(strategy.batch_axes)}: give a multiple of {ways} examples"
                )
        return jax.device_put(batch, jax.sharding.NamedSharding(self.mesh, strategy.batch_spec))

    def shard_state(self, state: Any, strategy: ShardingStrategy) -> Any:
        """Shard optimiser state: subtrees nested like the parameters are sharded like them, the rest is replicated.

        Args:
          state: any pytree of arrays, such as an optax state with its two moments.

        Raises:
          PlanError: a strategy for another mesh.
        """
        import jax
        import numpy as np

        strategy.check_mesh(self.mesh)
        shapes = [a.shape for a in strategy.arrays]
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

        def like_params(x: Any) -> bool:
            same = jax.tree.structure(x) == strategy.structure
            return same and [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(x)] == shapes

        def place(x: Any) -> Any:
            return jax.device_put(x, strategy.shardings(self.mesh) if like_params(x) else whole)

        return jax.tree.map(place, state, is_leaf=like_params)

    def _modular(self, model: ModularCapibaraModel, strategy: ShardingStrategy) -> ModularCapibaraModel:
        import jax

        placed = self._placed(model.params, strategy)
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        rules = strategy.axis_rules(model.backend.rules)
        sharded = ModularCapibaraModel(model.config, mesh=self.mesh, rules=rules)
        sharded.params = placed
        sharded.state = jax.device_put(model.state, whole)
        return sharded

    def _placed(self, params: Any, strategy: ShardingStrategy) -> Any:
        import jax
        import numpy as np

        found, structure = flatten(params)
        _check_same(found, structure, strategy)
        for path, x in found:
            if not isinstance(x, jax.Array | np.ndarray | bool | int | float | complex | np.generic):
                raise PlanError(
                    f"model, {'.'.join(path)!r}: got {type(x).__name__}, expected an array: only arrays can be placed"
                )
        return jax.device_put(params, strategy.shardings(self.mesh))

    def __str__(self) -> str:
        sizes = " × ".join(
            f"{n} {a}" for n, a in zip(self.config.mesh_shape, self.config.axis_names, strict=True)
        )
        kind = self.mesh.devices.flat[0].device_kind
        return f"{sizes} on {self.mesh.size} devices ({kind}), for {self.optimization_target}"


def _planned(model: Any) -> Any:
    """What a strategy for ``model`` is made from."""
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], CompiledModel):
        return model[0]
    if isinstance(model, ModularCapibaraModel | CompiledModel | Mapping | list | tuple):
        return model
    return getattr(model, "params", model)


def _check_same(found: list[tuple[tuple[str, ...], Any]], structure: Any, strategy: ShardingStrategy) -> None:
    import numpy as np

    ours = {".".join(path) or "(the array)": tuple(np.shape(x)) for path, x in found}
    theirs = {a.path: a.shape for a in strategy.arrays}
    for path, shape in ours.items():
        if path not in theirs:
            raise PlanError(
                f"model has the array {path!r} {shape}, which the strategy does not have: make it for these arrays"
            )
        if shape != theirs[path]:
            raise PlanError(
                f"model, {path!r}: the shape is {shape}, but the strategy was made for {theirs[path]}"
            )
    for path in theirs:
        if path not in ours:
            raise PlanError(
                f"the strategy has the array {path!r} {theirs[path]}, which the model does not have"
            )
    if structure != strategy.structure:
        raise PlanError(
            f"model nests otherwise than what the strategy was made for: {structure!s:.120} instead of "
            f"{strategy.structure!s:.120}"
        )


def create_mesh_sharding(
    mesh_shape: Iterable[int],
    device_ids: Iterable[int] | None = None,
    optimization_target: Target = "throughput",
    *,
    axis_names: Sequence[str] | None = None,
) -> MeshSharding:
    """Create a mesh of the devices with the given ids.

    Equivalent JAX: ``jax.make_mesh(mesh_shape, axis_names, devices=[those of jax.devices()], axis_types=Auto)``,
    which maps neighbours in the mesh to neighbours in the machine if it knows the topology.

    Args:
      mesh_shape: devices along each axis, such as ``(4, 8)``.
      device_ids: as many ``jax.Device.id`` of ``jax.devices()`` as the mesh has places; by default the first.
      optimization_target: what :meth:`MeshSharding.optimize` prefers (and ``shard_model`` without a strategy):
        ``"throughput"`` the fastest training step that fits; ``"latency"`` the fastest forward pass, which keeps
        parameters in place and shards matrices if sums of activations cost less than reading whole matrices;
        ``"memory"`` the fewest bytes on each device, then the fastest.
      axis_names: by default ``("data",)``, ``("data", "model")`` or ``("data", "fsdp", "model")``.

    Raises:
      ConfigError: the shape or the names are invalid, or there are too few devices (the message says how to
        emulate them).
      PlanError: unknown or repeated ids, or the wrong number of ids for the mesh.
    """
    import jax

    target = check_target(optimization_target)
    kind = "inference" if target == "latency" else "training"
    config = create_tpu_mesh_config(mesh_shape, kind, axis_names=axis_names)
    by_id = {device.id: device for device in jax.devices()}
    if device_ids is None:
        return MeshSharding(config.build(), config, target)
    try:
        ids = [operator.index(i) for i in device_ids]
    except TypeError:
        raise PlanError(f"device_ids={device_ids!r}: expected integers, such as list(range(32))") from None
    if len(ids) != config.num_devices:
        raise PlanError(
            f"device_ids has {len(ids)} ids, but a mesh of {'x'.join(map(str, config.mesh_shape))} has "
            f"{config.num_devices} places: give one for each"
        )
    doubled = sorted({i for i in ids if ids.count(i) > 1})
    if doubled:
        raise PlanError(
            f"device_ids names {', '.join(map(str, doubled[:8]))} more than once: each device has one place"
        )
    missing = [i for i in ids if i not in by_id]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        raise PlanError(
            f"device_ids: there is no device {shown}; jax.devices() has {len(by_id)} ({_ranges(by_id)}, "
            f"{next(iter(by_id.values())).platform}). To try it on a CPU, start Python with {_FLAG}={max(ids) + 1}"
        )
    return MeshSharding(config.build([by_id[i] for i in ids]), config, target)


def _ranges(ids: Iterable[int]) -> str:
    """``"0 to 7"``."""
    ordered = sorted(ids)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered[:16]))


def create_training_mesh(
    total_chips: int,
    data_parallel_size: int | None = None,
    model_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    *,
    fsdp_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
    context_parallel_size: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Create the mesh of a training run, with the axes ``data``, ``model`` and ``pipeline`` (even if of size 1).

    Equivalent JAX: ``jax.make_mesh((d, m, p), ("data", "model", "pipeline"), axis_types=(AxisType.Auto,) * 3)``.

    Args:
      total_chips: number of devices of the mesh (a chip is one or two JAX devices; see :mod:`capibara.hardware`).
      data_parallel_size: parts of the batch; by default ``total_chips`` divided by the others.
      model_parallel_size: parts of each matrix.
      pipeline_parallel_size: parts of the stack of layers.
      fsdp_parallel_size: parts of the batch, and of all parameters too: the axis ``fsdp``, if given.
      expert_parallel_size: parts of the batch, and of the experts: the axis ``expert``, if given.
      context_parallel_size: parts of each sequence: the axis ``context``, if given.
      devices: by default the first of ``jax.devices()``.

    Raises:
      PlanError: the product of the sizes is not ``total_chips``; the message gives sizes for which it is.
      ConfigError: there are too few devices (the message says how to emulate them).
    """
    sizes = {
        "data_parallel_size": data_parallel_size,
        "fsdp_parallel_size": fsdp_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "model_parallel_size": model_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    optional = {name for name, size in sizes.items() if size is None}
    for name, size in {"total_chips": total_chips, **sizes}.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise PlanError(f"{name}={size!r}: expected an integer of at least 1")
    rest = math.prod(size for size in sizes.values() if size is not None)
    if data_parallel_size is None and total_chips % rest == 0:
        sizes["data_parallel_size"] = total_chips // rest
        rest = total_chips
    if sizes["data_parallel_size"] is None or rest != total_chips:
        raise PlanError(_misfit(total_chips, sizes))
    axes = {
        name.removesuffix("_parallel_size"): size
        for name, size in sizes.items()
        if name == "data_parallel_size" or name not in optional
    }
    config = create_tpu_mesh_config(tuple(axes.values()), "training", axis_names=tuple(axes))
    return config.build(devices)


def _misfit(total: int, given: dict[str, int | None]) -> str:
    """What is wrong with the sizes, and which would do if one of them were changed."""
    known = {name: size for name, size in given.items() if size is not None}
    optional = ("fsdp_parallel_size", "expert_parallel_size", "context_parallel_size")
    product = math.prod(known.values())
    would = []
    for name in (name for name in given if name in known or name not in optional):
        others = math.prod(size for other, size in known.items() if other != name)
        if total % others == 0:
            would.append(f"{name}={total // others}")
    small = [n for n in range(1, min(math.isqrt(total), 1 << 16) + 1) if total % n == 0]
    divisors = sorted({*small, *(total // n for n in small)})
    said = " × ".join(f"{name}={size}" for name, size in known.items())
    if would:
        remedy = f"With the others as they are, {' or '.join(would)} would do. "
    else:
        remedy = ""
    return (
        f"{said} makes {product} devices, but total_chips={total}. {remedy}Every size must divide {total}: "
        f"{', '.join(map(str, divisors))}"
    )
