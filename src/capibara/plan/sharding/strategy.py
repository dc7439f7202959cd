"""The result of the search: a sharding of every array with its cost, as readable values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from capibara.config.axes import AxisRules
from capibara.errors import did_you_mean
from capibara.plan.errors import PlanError
from capibara.sharding import Layout

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec

__all__ = ["Alternative", "ArraySharding", "MemoryUse", "ShardingStrategy", "bytes_text", "seconds_text"]

# What tensor parallelism shards of activations.
_INNER = ("vocab", "heads", "kv_heads", "mlp", "hidden")


def bytes_text(size: float) -> str:
    """``"1.5 GiB"``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """``"12.3 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
      parameters, gradients, optimizer: of the layout, exact except for padding.
      activations: an estimate, see :attr:`ShardingStrategy.assumptions`.
      gathered: the two largest pieces that are gathered at the same time.
      temporaries: of a planned step, the working set at its memory peak, gathered parameters among it; ``gradients``
        are those that are there at the peak.
      padding: of a planned step's arrays to tiles. inputs: its tokens and model state.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    temporaries: float = 0.0
    padding: float = 0.0
    inputs: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, f.name) for f in fields(self)))

    def __str__(self) -> str:
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = [f"{kind} {bytes_text(size)}" for kind, size in sizes.items() if size]
        return f"{bytes_text(self.total)} a device: {', '.join(parts)}"


@dataclass(frozen=True)
class ArraySharding:
    """One array's sharding, and its cost per device in one step.

    Attributes:
      path: with dots.
      spec: the ``PartitionSpec``, one entry per dimension.
      kind: its inferred role: ``"matrix"``, ``"vector"``, ``"lookup"``, ``"head"`` or ``"tied"`` (lookup and head).
      bytes_total: of the whole array. bytes_per_device: of a device's part.
      state_bytes_per_device: with gradient and optimiser state.
      bytes_gathered: received to gather it. bytes_reduced: received in sums of gradients and activations.
      seconds: of that communication, by the chip's links.
      compute_seconds: of its products at the chip's peak (or of reading it, if that takes longer).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    kind: str
    bytes_total: int
    bytes_per_device: float
    state_bytes_per_device: float
    bytes_gathered: float
    bytes_reduced: float
    seconds: float
    compute_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.path} {self.dtype}{list(self.shape)} as {_spec_text(self.spec)}: "
            f"{bytes_text(self.bytes_per_device)} a device, gathers {bytes_text(self.bytes_gathered)} and sums "
            f"{bytes_text(self.bytes_reduced)} a step, {seconds_text(self.seconds)}"
        )


@dataclass(frozen=True)
class Alternative:
    """A layout that was considered and rejected.

    Attributes:
      fits: whether its memory is within the limit.
    """

    name: str
    seconds: float
    communication_seconds: float
    memory: MemoryUse
    fits: bool

    def __str__(self) -> str:
        room = "" if self.fits else ", does not fit"
        return (
            f"{self.name}: {seconds_text(self.seconds)} a step ({seconds_text(self.communication_seconds)} of it "
            f"communication), {bytes_text(self.memory.total)} a device{room}"
        )


@dataclass(frozen=True)
class ShardingStrategy:
    """A ``PartitionSpec`` for every array, and the total cost.

    ``strategy["blocks.mlp.up.weight"]`` is one array's; :attr:`specs` has the nesting of the arrays,
    :meth:`shardings` returns ``jax.sharding.NamedSharding`` for a mesh; ``print(strategy)`` shows everything.

    Attributes:
      arrays: in the order of ``jax.tree.leaves``; each one's seconds are its own, with nothing overlapped.
      mesh_shape, axis_names: the mesh it is for.
      batch_axes: axes that shard the examples. tensor_axes: axes that shard matrices.
      optimization_target: the objective.
      memory: bytes on each device. memory_limit_bytes: their limit.
      communication_seconds, compute_seconds: of a step, one after the other. Where there is a :attr:`layout`, they are
        those of ``capibara plan``, and otherwise the sums over all arrays.
      bound_seconds: a lower bound for layouts that fit and shard the batch in the same way, by the same estimate.
      assumptions: of the estimate.
      alternatives: other layouts that were considered.
      layout: for a model whose configuration is known, the strategy as ``capibara plan`` has it, with axes named by
        the parts that they play; None if every array was searched for by itself.
    """

    arrays: tuple[ArraySharding, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    batch_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    optimization_target: str
    memory: MemoryUse
    memory_limit_bytes: int
    communication_seconds: float
    compute_seconds: float
    bound_seconds: float
    assumptions: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    structure: Any = field(repr=False)
    layout: Layout | None = None

    @property
    def step_seconds(self) -> float:
        """Computation plus communication, without overlap; a program that overlaps them is faster."""
        return self.communication_seconds + self.compute_seconds

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Number of devices by mesh axis."""
        return dict(zip(self.axis_names, self.mesh_shape, strict=True))

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def specs(self) -> Any:
        """The ``PartitionSpec`` of every array, nested as the arrays are."""
        import jax

        return jax.tree_util.tree_unflatten(self.structure, [a.spec for a in self.arrays])

    @property
    def batch_spec(self) -> PartitionSpec:
        """The ``PartitionSpec`` of an input, whose first dimension is the batch."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    def axis_rules(self, base: AxisRules | None = None) -> AxisRules:
        """The strategy's sharding of activations: ``JaxBackend(device_mesh=…, rules=strategy.axis_rules())``.

        The batch is sharded over :attr:`batch_axes` (or, if these do not divide it, according to ``base``); where there
        is a :attr:`layout`, heads, the inner features of feed-forward layers and the vocabulary over
        :attr:`tensor_axes`.

        Args:
          base: rules for all other logical axes; by default ``AxisRules()``.
        """
        base = AxisRules() if base is None else base
        activations = dict(base.activations)
        over = {"batch": self.batch_axes}
        if self.layout is not None:
            over |= dict.fromkeys(_INNER, self.tensor_axes)
        for name, axes in over.items():
            if axes:
                first = "+".join(axes)
                activations[name] = (first, *(c for c in activations.get(name, ()) if c != first))
        return AxisRules(base.parameters, activations)

    def shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """The ``NamedSharding`` of every array, nested as the arrays are.

        Raises:
          PlanError: ``mesh`` has other axes than the strategy.
        """
        import jax

        self.check_mesh(mesh)
        made = [jax.sharding.NamedSharding(mesh, a.spec) for a in self.arrays]
        return jax.tree_util.tree_unflatten(self.structure, made)

    def check_mesh(self, mesh: Any) -> None:
        """Raises a PlanError if ``mesh`` has other axes than the strategy."""
        if dict(mesh.shape) != self.axis_sizes:
            raise PlanError(
                f"mesh: got {_sizes_text(dict(mesh.shape))}, but the strategy is for {_sizes_text(self.axis_sizes)}: "
                "make both with the same mesh_shape and axis_names"
            )

    def __getitem__(self, path: str) -> PartitionSpec:
        for array in self.arrays:
            if array.path == path:
                return array.spec
        names = [a.path for a in self.arrays]
        raise KeyError(
            f"no array {path!r} in the strategy.{did_you_mean(str(path), names)} There are {', '.join(names[:6])}"
            + (" …" if len(names) > 6 else "")
        )

    def __iter__(self) -> Iterator[ArraySharding]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "mesh": self.axis_sizes,
            "batch_axes": list(self.batch_axes),
            "tensor_axes": list(self.tensor_axes),
            "optimization_target": self.optimization_target,
            "layout": None if self.layout is None else self.layout.to_json(),
            "memory_bytes": {**vars(self.memory), "total": self.memory.total},
            "memory_limit_bytes": self.memory_limit_bytes,
            "communication_seconds": self.communication_seconds,
            "compute_seconds": self.compute_seconds,
            "bound_seconds": self.bound_seconds,
            "assumptions": list(self.assumptions),
            "arrays": [
                {
                    **{k: v for k, v in vars(a).items() if k != "spec"},
                    "shape": list(a.shape),
                    "spec": [list(e) if isinstance(e, tuple) else e for e in a.spec],
                }
                for a in self.arrays
            ],
            "alternatives": [
                {**{k: v for k, v in vars(a).items() if k != "memory"}, "memory_bytes": a.memory.total}
                for a in self.alternatives
            ],
        }

    def __str__(self) -> str:
        head = ("array", "shape", "spec", "a device", "gathered", "summed", "time")
        rows = [
            (
                a.path,
                "×".join(map(str, a.shape)) or "scalar",
                _spec_text(a.spec),
                bytes_text(a.bytes_per_device),
                bytes_text(a.bytes_gathered),
                bytes_text(a.bytes_reduced),
                seconds_text(a.seconds),
            )
            for a in self.arrays
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            f"{_sizes_text(self.axis_sizes)} for {self.optimization_target}; examples over "
            f"{' and '.join(self.batch_axes) or 'no axis'}",
            f"memory  {self.memory}; limit {bytes_text(self.memory_limit_bytes)}",
            f"time    {seconds_text(self.step_seconds)} a step: computing {seconds_text(self.compute_seconds)}, "
            f"communicating {seconds_text(self.communication_seconds)}",
        ]
        for row in (head, *rows):
            cells = [
                c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        if self.alternatives:
            lines += ["considered:", *(f"  {a}" for a in self.alternatives)]
        lines += ["assumed:", *(f"  {a}" for a in self.assumptions)]
        return "\n".join(lines)


def _spec_text(spec: Any) -> str:
    def entry(e: Any) -> str:
        return "-" if e is None else "+".join(e) if isinstance(e, tuple) else str(e)

    return "(" + ", ".join(entry(e) for e in spec) + ")"


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return "mesh " + " × ".join(f"{name} {n}" for name, n in sizes.items())
