"""The sharding of a run's arrays: the same for the step that a plan compiles and the step that a run executes.

Without a layout, training is data-parallel: the state is replicated, a batch is sharded along its rows, and XLA
inserts the sums between devices. With one device nothing is added. A :class:`~capibara.plan.Layout` specifies more: a
mesh with several axes, parameters and moments sharded over them by the names of their dimensions
(``model.param_axes`` and the layout's :class:`~capibara.config.axes.AxisRules`), moments in the hosts' memory.

:meth:`Placement.describe_state` returns the state without arrays: shapes, dtypes and shardings. A plan lowers its
step for it; a run creates its first state and reads checkpoints with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from capibara.config.axes import AxisRules
from capibara.errors import ConfigError, did_you_mean
from capibara.plan.compiler.devices import arrange_devices
from capibara.plan.layout import Layout
from capibara.train import extras
from capibara.train.state import TrainState
from capibara.train.trainable import trained_part

__all__ = ["HOST_MEMORY", "Placement", "axes_shardings", "first_state"]

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host that a device reads by itself."""


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
        """Use as many of the local devices as divide ``rows``, the sequences of one microbatch."""
        available = list(jax.local_devices() if devices is None else devices)
        count = max(n for n in range(1, len(available) + 1) if rows % n == 0)
        chosen = tuple(available[:count])
        return cls(chosen, Mesh(np.asarray(chosen), ("data",)) if count > 1 else None)

    @classmethod
    def over(cls, mesh: Mesh, layout: Layout) -> Placement:
        """A layout on a mesh of real or abstract devices."""
        return cls(tuple(mesh.devices.flat), mesh, layout)

    @classmethod
    def planned(cls, layout: Layout, devices: Sequence[Any] | None = None) -> Placement:
        """The layout's mesh on the first devices that JAX finds, as compiled by the plan.

        Raises:
          ConfigError: there are too few devices, they belong to several processes, or they do not support the
            layout's arrays in the hosts' memory; or one of its mesh axes shards nothing.
        """
        if jax.process_count() > 1:
            raise ConfigError(
                f"tpu.enabled=true: the devices belong to {jax.process_count()} processes, and training runs in one. "
                "Take a slice whose chips are all attached to one host, such as v4:2x2x1 or v5e:2x4"
            )
        _check_axes(layout)
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
        chosen = available[:needed]
        if layout.offload != "none":
            there = {memory.kind for memory in chosen[0].addressable_memories()}
            if HOST_MEMORY not in there:
                raise ConfigError(
                    f"tpu.offload={layout.offload!r}: {chosen[0].platform} devices here cannot reach the host's memory "
                    f"({HOST_MEMORY!r} is not among {', '.join(sorted(there))}). Pass tpu.offload=none"
                )
        grid = arrange_devices([size for _, size in layout.mesh], chosen)
        return cls.over(Mesh(grid, tuple(axis for axis, _ in layout.mesh)), layout)

    @classmethod
    def of(cls, config: Any, devices: Sequence[Any] | None = None) -> Placement:
        """The placement of a run's settings: with ``tpu.enabled`` their mesh and layout, otherwise :meth:`choose`.

        Raises:
          ConfigError: as :meth:`planned` and :meth:`check_rows`.
        """
        train = config.train
        if not config.tpu.enabled:
            return cls.choose(train.batch_size // train.gradient_accumulation_steps, devices)
        placement = cls.planned(Layout.from_config(config), devices)
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
        return sizes.get("data", 1) * sizes.get("fsdp", 1)

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

    def put_batch(self, tokens: np.ndarray) -> dict[str, jax.Array]:
        """Move int32 tokens ``[..., rows, length]`` to the devices, sharded by rows if possible."""
        return {"tokens": jax.device_put(tokens, self.batch_sharding(tokens.shape))}

    def put_state(self, state: Any) -> Any:
        """Move a pytree of state to every device, replicated."""
        return jax.device_put(state, self.replicated)

    def cut(self, batches: Sequence[np.ndarray], batch_size: int) -> list[np.ndarray]:
        """Split validation batches into microbatches as in training: a layout has no memory for more.

        Args:
          batches: ``[rows, length]`` each; not split without a layout, or with fewer rows than devices along the data
            axes. Rows that do not fill a piece are dropped.
        """
        if self.layout is None:
            return list(batches)
        data = self._data_devices
        pieces = []
        for batch in batches:
            # Of a short text some rows may be left over: replicated, they would take more than training does.
            rows = min(batch_size // self.layout.microbatches, len(batch) // data * data)
            count = len(batch) // rows if rows else 0
            pieces += np.split(batch[: count * rows], count) if count else [batch]
        return pieces

    def make_state(self, model: Any, optimizer: Any, *, seed: int, params: Any = None) -> TrainState:
        """The state before the first step, on the devices.

        Args:
          params: the parameters, which nothing else may use: the first step donates them. By default drawn from the
            seed.
        """
        make = first_state(model, optimizer, seed)
        if self.layout is not None:
            # Every device makes its own part: the whole state need not fit on any.
            where = jax.tree.map(lambda leaf: leaf.sharding, self.describe_state(model, optimizer))
            return jax.jit(make, out_shardings=where)(params)
        if params is not None:
            return self.put_state(make(params))
        # A copy: the step donates its state, and the model may still hold the arrays it was initialised with.
        return self.put_state(jax.tree.map(jnp.copy, make(None)))

    def describe_state(self, model: Any, optimizer: Any) -> TrainState:
        """The state of a run as ``jax.ShapeDtypeStruct`` with shardings.

        Args:
          model: anything with ``init(seed)``; ``param_axes`` and ``state_axes`` (logical axis names, nested like the
            parameters and the state) are used if it has them.
          optimizer: an ``optax.GradientTransformation``.

        Raises:
          ConfigError: the layout shards parameters, but the model does not name their dimensions.
        """
        shapes = jax.eval_shape(first_state(model, optimizer, 0), None)
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
        params = axes_shardings(shapes.params, axes, self.mesh, self.layout.rules)
        moments = trained_part(
            model, axes_shardings(shapes.params, axes, self.mesh, self.layout.optimizer_rules)
        )
        states = axes_shardings(
            shapes.model_state, getattr(model, "state_axes", None), self.mesh, self.layout.rules
        )
        opt_state = extras.optax().tree_utils.tree_map_params(
            optimizer,
            placed,
            shapes.opt_state,
            moments,
            transform_non_params=lambda leaf: placed(leaf, whole),
        )
        if self.layout.offload == "optimizer":
            opt_state = jax.tree.map(_in_host_memory, opt_state)
        return TrainState(
            step=placed(shapes.step, whole),
            params=jax.tree.map(placed, shapes.params, params),
            opt_state=opt_state,
            model_state=jax.tree.map(placed, shapes.model_state, states),
            key=placed(shapes.key, whole),
        )


def first_state(model: Any, optimizer: Any, seed: int) -> Callable[[Any], TrainState]:
    """A function of the parameters, or of ``None`` to draw them, that creates the state before the first step."""

    def make(params: Any) -> TrainState:
        if params is None:
            params, model_state = model.init(seed)
        else:
            model_state = jax.jit(lambda: model.init(seed)[1])()  # does not draw parameters
        return TrainState.create(params, model_state, optimizer.init(trained_part(model, params)), seed=seed)

    return make


def axes_shardings(tree: Any, axes: Any, mesh: Mesh, rules: AxisRules) -> Any:
    """A ``NamedSharding`` for each array of a tree, by the logical names of its dimensions; default: replicated.

    Raises:
      ConfigError: an unknown name, or the wrong number of names.
    """

    def one(leaf: Any, names: Sequence[str | None] | None) -> NamedSharding:
        return NamedSharding(mesh, rules.spec(names or (None,) * leaf.ndim, mesh, leaf.shape))

    if axes is None:
        return jax.tree.map(lambda leaf: one(leaf, None), tree)
    return jax.tree.map(one, tree, axes)


def _check_axes(layout: Layout) -> None:
    """Refuse an axis that no rule names: each of its devices would do the same work."""
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
