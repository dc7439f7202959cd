"""Estimate the memory of a training step, to prune the search before compiling.

A device always holds the arguments (known exactly, including padding, see :mod:`capibara.plan.memory.arguments`) and,
in addition, the memory peak of the step (modelled, see :mod:`capibara.plan.memory.working_set`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan.errors import PlanError
from capibara.plan.memory.arguments import Block, step_arguments
from capibara.plan.memory.widths import Widths, widths
from capibara.plan.memory.working_set import working_set
from capibara.plan.sizes import size_text
from capibara.plan.stages import kept_inputs, stage_of
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = ["MemoryEstimate", "estimate_memory", "estimate_memory_of"]

# Keys whose scores attention round a ring computes at once (capibara.ops.attention.ring), and of such scores those that
# are live together.
_RING_KEYS, _RING_SCORES = 1024, 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory (HBM) that one device needs for a step, by kind.

    Attributes:
      parameters, optimizer, inputs: arguments, without padding; optimizer moments on the device only.
      gradients: the sums over microbatches, and the gradients that the backward pass has stacked.
      activations: saved for the backward pass.
      temporaries: the largest working set besides them; None if it is not known before compiling.
      padding: of the arguments to tiles.
      model_state: arrays that are not trained (codebooks).
      moment: ``"loss"``, ``"backward"`` or ``"update"``, the memory peak; ``""`` if only the arguments are known.
      exact: kinds that are exact, not modelled.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int | None
    padding: int
    inputs: int
    model_state: int = 0
    moment: str = ""
    exact: tuple[str, ...] = ("parameters", "optimizer", "inputs", "padding", "model_state")

    @property
    def arguments(self) -> int:
        """All inputs as stored in memory: exact."""
        return self.parameters + self.optimizer + self.inputs + self.model_state + self.padding

    @property
    def total(self) -> int:
        """All kinds together; only the arguments if the temporaries are not known."""
        return self.arguments + self.gradients + self.activations + (self.temporaries or 0)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind; they add up to :attr:`total`."""
        kinds = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "temporaries": self.temporaries or 0,
            "padding": self.padding,
            "inputs": self.inputs,
        }
        return kinds | ({"model state": self.model_state} if self.model_state else {})

    def fits(self, target: Target) -> bool | None:
        """Whether a device of the slice has enough memory; None if only the arguments are known and those fit."""
        if self.total > target.usable_hbm_bytes:
            return False
        return None if self.temporaries is None else True

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "bytes": self.kinds,
            "total": self.total,
            "moment": self.moment,
            "exact": list(self.exact),
            "temporaries_known": self.temporaries is not None,
        }

    def __str__(self) -> str:
        parts = [f"{name} {size_text(size)}" for name, size in self.kinds.items() if size]
        unknown = "" if self.temporaries is not None else " and temporaries, which only the compiler knows"
        return f"{size_text(self.total)} a device ({', '.join(parts)}){unknown}"


def estimate_memory(config: ModularModelConfig, layout: Layout, target: Target) -> MemoryEstimate:
    """Estimate the memory of a configuration's training step in a given layout.

    Arithmetic on shapes: no device is used and nothing is compiled. The first call for a model builds its graph (a
    fraction of a second), later ones take a millisecond.

    Args:
      config: as for training; rematerialisation and microbatches are the layout's.
      layout: how the step is sharded over the devices.
      target: the slice; its number of devices must be the mesh's.

    Raises:
      PlanError: the mesh has another number of devices than the slice, or the batch does not divide.
    """
    if layout.num_devices != target.num_devices:
        raise PlanError(
            f"layout: the mesh {dict(layout.mesh)} has {layout.num_devices} devices, but {target} has "
            f"{target.num_devices}"
        )
    inputs = kept_inputs(layout)
    config, layout = stage_of(config, layout)
    rows, left = divmod(config.train.batch_size, layout.microbatches)
    if left:
        raise PlanError(
            f"train.batch_size={config.train.batch_size} does not divide into {layout.microbatches} microbatches"
        )
    arguments = step_arguments(config, layout)
    w = widths(config, layout, rows)
    need = working_set(config, layout, target, w, arguments)
    moment, gradients, activations, temporaries = need.fullest
    by_kind = _by_kind(arguments, padded=target.pads_to_tiles)
    return MemoryEstimate(
        parameters=by_kind["parameters"],
        optimizer=by_kind["optimizer"],
        gradients=gradients,
        activations=activations + inputs * w.values(w.stream),
        temporaries=temporaries + _scores_of_ring(config, layout, w),
        padding=by_kind["padding"],
        inputs=by_kind["inputs"],
        model_state=by_kind["model state"],
        moment=moment,
    )


def _scores_of_ring(config: ModularModelConfig, layout: Layout, w: Widths) -> int:
    """Bytes of the scores of attention round a ``context`` axis: of all queries here with some of a visitor's keys."""
    parts = layout.axis_sizes.get("context", 1)
    if parts == 1:
        return 0
    keys = min(config.train.sequence_length // parts, _RING_KEYS)
    return int(_RING_SCORES * w.tokens * w.queries // w.head * keys * w.accumulate)


def estimate_memory_of(
    trees: Mapping[str, Any], mesh: Any | None = None, *, specs: Mapping[str, Any] | None = None
) -> MemoryEstimate:
    """The memory of any step that is known before it is compiled: exactly that of its arguments.

    The rest depends on the program, not on the arguments: ``temporaries`` is None, and :attr:`MemoryEstimate.total` a
    lower bound.

    Args:
      trees: pytrees of abstract arrays (``jax.ShapeDtypeStruct``) or arrays by kind: ``"parameters"``,
        ``"optimizer"``, ``"model state"``; any other name counts as inputs.
      mesh: axis names and sizes, ``{"data": 4}``; for ``specs``.
      specs: pytrees of ``PartitionSpec`` of the same structure, for arrays without their own sharding.

    Raises:
      PlanError: a specification names an axis that is not in the mesh, or does not divide its array.
    """
    import jax

    totals = {"parameters": 0, "optimizer": 0, "inputs": 0, "model state": 0, "padding": 0}
    for kind, tree in trees.items():
        leaves, treedef = jax.tree.flatten(tree)
        given = [None] * len(leaves)
        if specs is not None and kind in specs:
            given = treedef.flatten_up_to(specs[kind])
        for leaf, spec in zip(leaves, given, strict=True):
            sharding = getattr(leaf, "sharding", None)
            if sharding is not None and sharding.memory_kind not in (None, "device"):
                continue
            shape = tuple(leaf.shape)
            if spec is not None:
                shape = _part_by_spec(shape, spec, dict(mesh or {}))
            elif sharding is not None:
                shape = tuple(sharding.shard_shape(shape))
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                shape, width = (*shape, 2), 4
            else:
                width = leaf.dtype.itemsize
            held = Block(kind, (), shape, width)
            totals[kind if kind in totals and kind != "padding" else "inputs"] += held.bytes
            totals["padding"] += held.padded - held.bytes
    return MemoryEstimate(
        parameters=totals["parameters"],
        optimizer=totals["optimizer"],
        gradients=0,
        activations=0,
        temporaries=None,
        padding=totals["padding"],
        inputs=totals["inputs"],
        model_state=totals["model state"],
    )


def _part_by_spec(shape: tuple[int, ...], spec: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    part = list(shape)
    for i, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else tuple(entry or ()):
            if axis not in sizes:
                raise PlanError(
                    f"specs: {spec} names the axis {axis!r}; the mesh has {', '.join(sizes) or 'none'}"
                )
            if i >= len(part) or part[i] % sizes[axis]:
                raise PlanError(f"specs: {spec} does not divide an array of shape {shape} over {sizes}")
            part[i] //= sizes[axis]
    return tuple(part)


def _by_kind(arguments: tuple[Block, ...], *, padded: bool) -> dict[str, int]:
    totals: dict[str, int] = dict.fromkeys(("parameters", "optimizer", "inputs", "model state", "padding"), 0)
    for block in arguments:
        if not block.on_host:
            totals[block.kind] += block.bytes
            totals["padding"] += block.padded - block.bytes if padded else 0
    return totals
