"""The sharding of a run's arrays: the same for the step that a plan compiles and the step that a run executes.

Without a layout, training is data-parallel: the state is replicated, a batch is sharded along its rows, and XLA
inserts the sums between devices. With one device nothing is added. A :class:`~capibara.sharding.Layout` specifies
more: a mesh with several axes, parameters and moments sharded over them by the names of their dimensions
(``model.param_axes`` and the layout's :class:`~capibara.config.axes.AxisRules`), moments in the hosts' memory.

:meth:`Placement.describe_state` returns the state without arrays: shapes, dtypes and shardings. A plan lowers its
step for it; a run creates its first state and reads checkpoints with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from capibara.compose import param_shardings
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.errors import ConfigError, did_you_mean
from capibara.hardware import build_mesh
from capibara.memory.offload import HOST_MEMORY
from capibara.sharding import Layout, mesh_sizes, resized
from capibara.train import extras
from capibara.train.processes import by_process
from capibara.train.protocols import Batch, Model, Optimizer
from capibara.train.state import TrainState
from capibara.train.trainable import trained_part

__all__ = ["Placement", "check_axes", "device_counts", "equal_share", "first_state"]


@dataclass(frozen=True)
class Placement:
    """The devices of a run, and the sharding of values over them.

    Attributes:
      devices: all of them.
      mesh: the same as a mesh; None for one device.
      layout: how the state is sharded over the mesh; None: replicated.
    """

    devices: tuple[Any, ...]
    mesh: Mesh | None
    layout: Layout | None = None

    @classmethod
    def choose(cls, rows: int, devices: Sequence[Any] | None = None) -> Placement:
        """Use as many devices, of every process equally many, as divide ``rows``, the sequences of one microbatch.

        Raises:
          ConfigError: there are more processes than divide them.
        """
        groups = by_process(jax.devices() if devices is None else devices)
        least = min(map(len, groups))
        each = max((n for n in range(1, least + 1) if rows % (n * len(groups)) == 0), default=0)
        if not each:
            raise ConfigError(
                f"train.batch_size: a microbatch of {rows} sequences cannot be divided among {len(groups)} processes. "
                f"Use train.batch_size={-(-rows // len(groups)) * len(groups)} with "
                "train.gradient_accumulation_steps=1, or fewer processes"
            )
        chosen = tuple(device for group in groups for device in group[:each])
        count = len(chosen)
        return cls(chosen, build_mesh((count,), ("data",), chosen) if count > 1 else None)

    @classmethod
    def over(cls, mesh: Mesh, layout: Layout) -> Placement:
        """A layout on a mesh of real or abstract devices."""
        return cls(tuple(mesh.devices.flat), mesh, layout)

    @classmethod
    def planned(cls, layout: Layout, devices: Sequence[Any] | None = None) -> Placement:
        """The layout's mesh on the first devices that JAX finds, as compiled by the plan; of each process equally many.

        Raises:
          ConfigError: there are too few devices, they cannot be divided among the processes, or they do not support the
            layout's arrays in the hosts' memory; or one of its mesh axes shards nothing.
        """
        check_axes(layout)
        available = list(jax.devices() if devices is None else devices)
        needed = layout.num_devices
        if len(available) < needed:
            kind = available[0].platform if available else "no"
            raise ConfigError(
                f"tpu.num_chips={needed} (tpu.enabled=true) asks for more devices than there are: {len(available)} "
                f"{kind} device{'' if len(available) == 1 else 's'}. Pass tpu.enabled=false to train on these; or, to "
                f"try the mesh on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={needed} (and "
                "JAX_PLATFORMS=cpu) in the environment"
            )
        groups = by_process(available)
        each = needed // len(groups)
        if needed % len(groups) or each > min(map(len, groups)):
            raise ConfigError(
                f"tpu.num_chips={needed} (tpu.enabled=true): expected a multiple of the {len(groups)} processes, with "
                f"at most {min(map(len, groups))} devices in each. Choose another tpu.topology, or another number of "
                "processes"
            )
        chosen = [device for group in groups for device in group[:each]]
        if layout.offload != "none":
            there = {memory.kind for memory in chosen[0].addressable_memories()}
            if HOST_MEMORY not in there:
                raise ConfigError(
                    f"tpu.offload={layout.offload!r}: {chosen[0].platform} devices here cannot reach the host's memory "
                    f"({HOST_MEMORY!r} is not among {', '.join(sorted(there))}). Pass tpu.offload=none"
                )
        names, sizes = zip(*layout.mesh, strict=True)
        return cls.over(build_mesh(sizes, names, chosen), layout)

    @classmethod
    def of(
        cls, config: ModularModelConfig, devices: Sequence[Any] | None = None, *, elastic: bool = False
    ) -> Placement:
        """The placement of a run's settings: with ``tpu.enabled`` their mesh and layout, otherwise :meth:`choose`.

        Args:
          elastic: with fewer devices than the mesh has, use a smaller one (:func:`capibara.sharding.resized`).

        Raises:
          ConfigError: as :meth:`planned` and :meth:`check_rows`.
        """
        train = config.train
        rows = train.batch_size // train.gradient_accumulation_steps
        if not config.tpu.enabled:
            return cls.choose(rows, devices)
        layout = Layout.from_config(config)
        available = jax.devices() if devices is None else devices
        if (
            elastic
            and len(available) < layout.num_devices
            and (counts := device_counts(layout, rows, available))
        ):
            return cls.planned(resized(layout, rows, counts[-1]), available)
        placement = cls.planned(layout, devices)
        placement.check_rows(train.batch_size)
        return placement

    @property
    def rules(self) -> AxisRules:
        """The rules that shard parameters and activations over the mesh."""
        return _WHOLE if self.layout is None else self.layout.rules

    @property
    def replicated(self) -> Sharding:
        """Replicated on every device."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """The layout's compiler options. These are TPU flags: other compilers do not support them."""
        if self.layout is None or self.devices[0].platform != "tpu":
            return {}
        return dict(self.layout.compiler_options)

    @property
    def _data_devices(self) -> int:
        """Parts that the layout cuts rows into."""
        sizes = {} if self.layout is None else self.layout.axis_sizes
        return math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))

    def check_rows(self, batch_size: int) -> None:
        """Refuse a batch that the layout does not divide.

        Raises:
          ConfigError: the number of rows is not a multiple of microbatches × devices along the data axes.
        """
        if self.layout is None:
            return
        data, parts = self._data_devices, self.layout.microbatches
        if batch_size % (parts * data):
            raise ConfigError(
                f"train.batch_size={batch_size} must be a multiple of {parts} microbatches × {data} devices along the "
                f"data axes = {parts * data}"
            )

    def batch_sharding(self, shape: Sequence[int]) -> Sharding:
        """The sharding of tokens ``[..., rows, length]``: rows over the data axes if these divide them."""
        if self.mesh is None:
            return self.replicated
        spec = self.rules.spec(("batch",), self.mesh, (shape[-2],), kind="activations")
        if spec == PartitionSpec(None):
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*[None] * (len(shape) - 2), *spec, None))

    def put_batch(self, batch: Batch) -> dict[str, jax.Array]:
        """Move int32 tokens ``[..., rows, length]``, or a batch of such arrays, to the devices, sharded by rows if
        possible."""
        arrays = batch if isinstance(batch, dict) else {"tokens": batch}
        return {name: self._put(array, self.batch_sharding(array.shape)) for name, array in arrays.items()}

    def _put(self, array: Any, where: Sharding) -> jax.Array:
        if self._several:  # each process has the whole array and puts its part on its devices
            return jax.make_array_from_process_local_data(where, np.asarray(array), array.shape)
        return jax.device_put(array, where)

    @property
    def _several(self) -> bool:
        return len({getattr(device, "process_index", 0) for device in self.devices}) > 1

    def put_state(self, state: Any) -> Any:
        """Move a pytree of state, the same in each process, to every device, replicated."""
        if not self._several:
            return jax.device_put(state, self.replicated)

        def put(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return jax.device_put(leaf, self.replicated)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = self._put(jax.random.key_data(leaf), self.replicated)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return self._put(leaf, self.replicated)

        return jax.tree.map(put, state)

    def cut(self, batches: Sequence[_Batch], batch_size: int) -> list[_Batch]:
        """Split validation batches into microbatches as in training: a layout has no memory for more.

        Args:
          batches: of ``[rows, length]`` each; not split without a layout, or with fewer rows than devices along the
            data axes. Rows that do not fill a piece are dropped.
        """
        if self.layout is None:
            return list(batches)
        data = self._data_devices
        pieces: list[Any] = []
        for batch in batches:
            # Of a short text some rows may be left over: replicated, they would take more than training does.
            height = len(batch["tokens"] if isinstance(batch, dict) else batch)
            rows = min(batch_size // self.layout.microbatches, height // data * data)
            count = height // rows if rows else 0
            cuts = [slice(at * rows, (at + 1) * rows) for at in range(count)] or [slice(None)]
            pieces += [
                {k: v[cut] for k, v in batch.items()} if isinstance(batch, dict) else batch[cut]
                for cut in cuts
            ]
        return pieces

    def make_state(
        self, model: Model, optimizer: Optimizer, *, seed: int, params: Any = None, ema: bool = False
    ) -> TrainState:
        """The state before the first step, on the devices.

        Args:
          params: the parameters, which nothing else may use: the first step donates them. By default drawn from the
            seed.
          ema: with a moving average of the parameters, which begins with them.
        """
        make = first_state(model, optimizer, seed, ema=ema)
        if self.layout is not None:
            # Every device makes its own part: the whole state need not fit on any.
            where = jax.tree.map(lambda leaf: leaf.sharding, self.describe_state(model, optimizer, ema=ema))
            return jax.jit(make, out_shardings=where)(params)
        if params is not None:
            return self.put_state(make(params))
        # A copy: the step donates its state, and the model may still hold the arrays it was initialised with.
        return self.put_state(jax.tree.map(jnp.copy, make(None)))

    def describe_state(self, model: Model, optimizer: Optimizer, *, ema: bool = False) -> TrainState:
        """The state of a run as ``jax.ShapeDtypeStruct`` with shardings.

        Args:
          model: anything with ``init(seed)``; ``param_axes`` and ``state_axes`` (logical axis names, nested like the
            parameters and the state) are used if it has them.
          optimizer: an ``optax.GradientTransformation``.
          ema: with a moving average of the parameters, sharded as moments are.

        Raises:
          ConfigError: the layout shards parameters, but the model does not name their dimensions.
        """
        shapes = jax.eval_shape(first_state(model, optimizer, 0, ema=ema), None)
        whole = self.replicated

        def placed(leaf: Any, where: Sharding) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        if self.layout is None or self.mesh is None:
            return jax.tree.map(lambda leaf: placed(leaf, whole), shapes)
        axes = getattr(model, "param_axes", None)
        if axes is None and (self.layout.parameters, self.layout.optimizer) != (
            "replicated",
            "as parameters",
        ):
            raise ConfigError(
                f"the layout ({self.layout}) cuts parameters by the names of their dimensions, and this model has no "
                "param_axes. Give it some, or pass tpu.parameters=replicated and 'tpu.optimizer=as parameters'"
            )
        params = param_shardings(shapes.params, axes, self.mesh, self.layout.rules)
        moments = trained_part(
            model, param_shardings(shapes.params, axes, self.mesh, self.layout.optimizer_rules)
        )
        states = param_shardings(
            shapes.model_state, getattr(model, "state_axes", None), self.mesh, self.layout.rules
        )

        optax = extras.optax()

        def placed_moment(leaf: Any, where: Sharding, param: Any) -> Any:
            if isinstance(leaf, optax.MaskedNode):  # of a parameter that another method updates
                return leaf
            # Of a moment that is kept in factors these are small: sums over rows and over columns.
            return placed(leaf, where if leaf.shape == param.shape else whole)

        trained = trained_part(model, shapes.params)
        opt_state = _placed_optimizer(
            optimizer, shapes.opt_state, trained, moments, placed_moment, lambda leaf: placed(leaf, whole)
        )
        if self.layout.offload == "optimizer":
            opt_state = jax.tree.map(_in_host_memory, opt_state)
        return TrainState(
            step=placed(shapes.step, whole),
            params=jax.tree.map(placed, shapes.params, params),
            opt_state=opt_state,
            model_state=jax.tree.map(placed, shapes.model_state, states),
            key=placed(shapes.key, whole),
            ema=None if shapes.ema is None else jax.tree.map(placed, shapes.ema, moments),
        )


def _placed_optimizer(
    optimizer: Optimizer,
    state: Any,
    params: Any,
    moments: Any,
    moment: Callable[..., Any],
    other: Callable[..., Any],
) -> Any:
    """``moment(leaf, sharding, parameter)`` of what is kept of each parameter, ``other(leaf)`` of the rest.

    Optax knows which is which, by running a transformation's ``init`` on placeholders. One of another kind that looks
    at the parameters cannot be asked: there, what is nested like the parameters belongs to them.
    """
    optax = extras.optax()
    try:
        return optax.tree_utils.tree_map_params(
            optimizer,
            moment,
            state,
            moments,
            params,
            transform_non_params=other,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
    except Exception:
        nesting = jax.tree.structure(params)

        def alike(tree: Any) -> bool:
            return jax.tree.structure(tree) == nesting

        return jax.tree.map(
            lambda tree: jax.tree.map(moment, tree, moments, params) if alike(tree) else other(tree),
            state,
            is_leaf=alike,
        )


def equal_share(devices: Sequence[Any], count: int) -> list[Any]:
    """The first ``count`` devices, of each process equally many.

    Raises:
      ConfigError: there are too few, or they cannot be divided among the processes.
    """
    groups = by_process(devices)
    each = count // max(1, len(groups))
    if not count or each * len(groups) != count or each > min(map(len, groups)):
        raise ConfigError(
            f"devices: got {len(devices)} in {len(groups)} processes, expected {count}, of each process equally many"
        )
    return [device for group in groups for device in group[:each]]


def device_counts(layout: Layout | None, rows: int, devices: Sequence[Any]) -> tuple[int, ...]:
    """How many of the devices a run could use, in ascending order.

    Args:
      layout: None: replicated, as :meth:`Placement.choose` has it.
      rows: of one microbatch.
    """
    groups = by_process(devices)
    most = len(groups) * min(map(len, groups), default=0)
    plain = Layout(mesh=(("data", 1),)) if layout is None else layout
    return tuple(count for count in mesh_sizes(plain, rows, most) if count % len(groups) == 0)


def first_state(
    model: Model, optimizer: Optimizer, seed: int, *, ema: bool = False
) -> Callable[[Any], TrainState]:
    """A function of the parameters, or of ``None`` to draw them, that creates the state before the first step."""

    def make(params: Any) -> TrainState:
        if params is None:
            params, model_state = model.init(seed)
        else:
            model_state = jax.jit(lambda: model.init(seed)[1])()  # does not draw parameters
        trained = trained_part(model, params)
        # At least float32: what one step adds to it is small. A copy: the step donates both.
        average = (
            jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True), trained)
            if ema
            else None
        )
        return TrainState.create(params, model_state, optimizer.init(trained), seed=seed, ema=average)

    return make


def check_axes(layout: Layout) -> None:
    """Refuse an axis that no rule names: each of its devices would do the same work.

    Raises:
      ConfigError: it names the axis.
    """
    rules = AxisRules()
    tables = (rules.parameters, rules.activations)
    known = {
        name for table in tables for places in table.values() for place in places for name in place.split("+")
    }
    for axis, size in layout.mesh:
        if size > 1 and axis not in known:
            raise ConfigError(
                f"tpu.mesh_axes: nothing is cut along {axis!r}, so that its {size} devices would all do the same work; "
                f"expected any of {', '.join(sorted(known))}.{did_you_mean(axis, sorted(known))}"
            )


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array in the hosts' memory; scalars stay, moving them saves nothing."""
    if not leaf.shape or leaf.sharding is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind(HOST_MEMORY))


_WHOLE = Layout(mesh=(("data", 1),), parameters="replicated").rules

_Batch = TypeVar("_Batch", bound=Batch)
