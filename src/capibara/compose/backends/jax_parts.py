"""Operations that run on each device's part of a mesh, inside ``jax.shard_map``.

XLA splits a program over a mesh operation by operation, and cannot split a kernel (:mod:`capibara.ops.one_device`):
left to it, attention runs in its XLA form. But examples of a batch have nothing to do with one another, nor have heads.
So for each operation of :data:`LAYOUTS` the table of logical axes (:class:`~capibara.config.axes.AxisRules`) says which
mesh axes the batch and the heads go to; every device then computes its part by itself, with the implementation that
it would take on one device, and nothing is communicated.

Key heads (of state-space layers: groups) each serve several heads. They are split with the heads where they can be.
Where a mesh axis is larger than their number they are replicated, which takes those that its heads read.

Attention needs all positions of its rows. Where the sequence is sharded over a mesh axis (``context``), the keys go
round a ring of devices (:mod:`capibara.ops.attention.ring`).

What cannot be divided is left to XLA as a whole, as is what runs outside of a trace, or inside a
``shard_map`` already that is not a pipeline's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from capibara.compose.backends.jax_expert_parts import experts_on_parts
from capibara.compose.backends.jax_fan_out import fan_out_on_parts, product_on_parts
from capibara.compose.backends.jax_lookup_parts import lookup_on_parts
from capibara.compose.backends.jax_paged_parts import paged_on_parts
from capibara.compose.backends.jax_ring import RINGS
from capibara.compose.backends.jax_rotary_parts import rotary_on_parts
from capibara.compose.backends.meshes import free_axes
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["LAYOUTS", "Division", "Layout", "describe", "divide", "on_parts"]

_Names = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Logical axes of an operation whose examples and heads are independent.

    Attributes:
        inputs: of its arrays, in the order of its parameters. The first has the batch and the heads; the last ones may
            be missing in a call.
        outputs: of its results; one, unless it returns a tuple.
    """

    inputs: tuple[_Names, ...]
    outputs: tuple[_Names, ...]


_HEADS: _Names = ("batch", "sequence", "heads", "head_dim")
_GROUPS: _Names = ("batch", "sequence", "kv_heads", "head_dim")
_SCAN: tuple[_Names, ...] = (_HEADS, ("batch", "sequence", "heads"), ("heads",), _GROUPS, _GROUPS)
_MEMORY: _Names = ("batch", "heads", "head_dim", "state")

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "attention": Layout((_HEADS, _GROUPS, _GROUPS, ("heads",)), (_HEADS,)),
        "segment_attention": Layout((_HEADS, _GROUPS, _GROUPS, ("batch", "sequence"), ("heads",)), (_HEADS,)),
        # The key that all heads share is one key head.
        "latent_attention": Layout((_HEADS, _HEADS, _GROUPS), (_HEADS,)),
        "segment_latent_attention": Layout((_HEADS, _HEADS, _GROUPS, ("batch", "sequence")), (_HEADS,)),
        "selective_scan": Layout(_SCAN, (_HEADS,)),
        "segment_scan": Layout((*_SCAN, ("batch", "sequence")), (_HEADS,)),
        "continued_scan": Layout((*_SCAN, _MEMORY), (_HEADS, _MEMORY)),
        "ragged_continued_scan": Layout((*_SCAN, _MEMORY, ("batch", "sequence")), (_HEADS, _MEMORY)),
    }
)
"""The operations that run on parts. Convolutions, cached attention and the search for codes have no kernels that XLA
could not split, and it splits them without gathering caches or tokens."""


@dataclass(frozen=True)
class Division:
    """How an operation is divided over a mesh.

    Attributes:
        axes: the mesh axes of the batch and of the heads; of the sequence, if it is sharded.
        parts: the number of parts that the heads have.
        groups: the number of key heads that are replicated; 0 where they are split with the heads.
    """

    axes: Mapping[str, _Names]
    parts: int
    groups: int

    def spec(self, names: _Names) -> Any:
        """The ``PartitionSpec`` of an array with these logical axes."""
        from jax.sharding import PartitionSpec

        whole = () if self.groups else self.axes["heads"]
        axes = {**self.axes, "kv_heads": whole}
        return PartitionSpec(*(axes.get(name) or None for name in names))

    def __str__(self) -> str:
        said = [f"{name} over {'+'.join(axes)}" for name, axes in self.axes.items() if axes]
        if self.groups and self.groups > 1:
            said.append("key heads whole")
        return ", ".join(said)


def divide(
    layout: Layout, shapes: Sequence[Sequence[int]], mesh: Any, rules: AxisRules, *, ring: bool = False
) -> Division | str:
    """How an operation on arrays of these shapes is divided, or why it is not.

    Args:
        layout: of the operation. shapes: of its arrays; a size of 0 is taken to be divisible.
        mesh, rules: the backend's.
        ring: whether it can be computed of a sequence that is sharded.
    """
    sizes = {
        name: n
        for names, shape in zip(layout.inputs, shapes, strict=False)
        for name, n in zip(names, shape, strict=True)
    }
    first = layout.inputs[0]
    found: dict[str, _Names] = {}
    for name, entry in zip(first, rules.spec(first, mesh, shapes[0], kind="activations"), strict=True):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if axes and name not in ("batch", "heads", *(("sequence",) if ring else ())):
            return f"its {name} is sharded over {'+'.join(axes)}, and it needs all of it"
        found[name] = axes
    axes = {name: found[name] for name in ("batch", "heads")}
    if sequence := found.get("sequence"):
        axes["sequence"] = sequence
    lengths = {
        shape[names.index("sequence")]
        for names, shape in zip(layout.inputs, shapes, strict=False)
        if "sequence" in names
    }
    if sequence and len(lengths) > 1:
        return f"its sequence is sharded over {'+'.join(sequence)}, and its lengths differ"
    if not any(axes.values()):
        return f"neither its batch nor its {sizes['heads']} heads can be split"
    parts = math.prod(mesh.shape[axis] for axis in axes["heads"])
    groups = sizes["kv_heads"]
    return Division(axes, parts, 0 if groups % parts == 0 else groups)


def on_parts(ops: Any, mesh: Mesh, rules: AxisRules, *, tpu: bool = False, sums: str = "float32") -> Any:
    """The operations of a module (its ``__all__``), those of :data:`LAYOUTS` on each device's part of their arrays.

    Equivalent JAX: ``jax.shard_map(ops.attention, mesh=mesh, in_specs=…, out_specs=…)``.

    Args:
        ops: :mod:`capibara.compose.backends.jax_ops`. mesh: with automatic axes. rules: which axis goes where.
        tpu: also those that have a kernel on TPUs only.
        sums: dtype in which gradients of activations are summed over devices, if it is wider than theirs.
    """
    own = {
        name: _on_parts(getattr(ops, name), layout, mesh, rules, RINGS.get(name))
        for name, layout in LAYOUTS.items()
    }
    own["expert_mlp"] = experts_on_parts(ops.expert_mlp, mesh, rules)
    own["lookup"] = lookup_on_parts(ops.lookup, mesh, rules)
    own["fan_out"] = fan_out_on_parts(mesh, rules, sums)
    own |= {name: product_on_parts(getattr(ops, name)) for name in ("dense", "project")}
    if tpu:
        own["rotate"] = rotary_on_parts(ops.rotate, mesh, rules)
    own["paged_attention"] = paged_on_parts(ops.paged_attention, mesh, rules, pools=2)
    own["paged_codes_attention"] = paged_on_parts(ops.paged_codes_attention, mesh, rules, pools=4)
    return SimpleNamespace(**{name: getattr(ops, name) for name in ops.__all__} | own)


def _on_parts(
    op: Callable[..., Any], layout: Layout, mesh: Any, rules: AxisRules, ring: Callable[..., Any] | None
) -> Callable[..., Any]:
    import jax
    from jax.core import Tracer

    @wraps(op)
    def run(*arrays: Any, **options: Any) -> Any:
        free = free_axes(mesh) if any(isinstance(x, Tracer) for x in arrays) else None
        if free is None:
            return op(*arrays, **options)
        division = divide(layout, [x.shape for x in arrays], free, rules, ring=ring is not None)
        if isinstance(division, str):
            return op(*arrays, **options)
        own = op
        if ring is not None and "sequence" in division.axes:
            own = partial(ring, axis_name=division.axes["sequence"])
        results = [division.spec(names) for names in layout.outputs]
        part = jax.shard_map(
            partial(_part, own, layout, division, options),
            **free.options,
            in_specs=tuple(map(division.spec, layout.inputs[: len(arrays)])),
            out_specs=tuple(results) if len(results) > 1 else results[0],
        )
        # Compiled also where gradients are taken outside of `jax.jit`, and not one primitive at a time.
        return jax.jit(part, inline=True)(*arrays)

    return run


def _part(
    op: Callable[..., Any], layout: Layout, division: Division, options: dict[str, Any], *arrays: Any
) -> Any:
    """The operation on a device's part, inside of ``jax.shard_map``."""
    if division.groups:
        heads = arrays[0].shape[layout.inputs[0].index("heads")]
        arrays = tuple(
            _own_groups(x, names.index("kv_heads"), heads, division) if "kv_heads" in names else x
            for x, names in zip(arrays, layout.inputs, strict=False)
        )
    return op(*arrays, **options)


def _own_groups(x: Any, axis: int, heads: int, division: Division) -> Any:
    """Of the key heads, all of which are here, those that this device's ``heads`` read."""
    import jax.numpy as jnp
    from jax import lax

    if division.groups == 1:
        return x
    served = heads * division.parts // division.groups  # heads that read one key head
    first = lax.axis_index(division.axes["heads"]) * heads
    if served % heads == 0:
        return lax.dynamic_slice_in_dim(x, first // served, 1, axis)
    return jnp.take(x, (first + jnp.arange(heads, dtype=first.dtype)) // served, axis=axis, mode="clip")


def describe(graph: Any, mesh: Mesh, rules: AxisRules) -> tuple[str, ...]:
    """For a model over several devices one line an operation of :data:`LAYOUTS`: how it is divided, or why not.

    Sizes that the model leaves open are taken to be divisible.

    Args:
        graph: of the compiled model. mesh, rules: the backend's.
    """
    lines = []
    for node in graph.walk():
        layout = LAYOUTS.get(getattr(node.block, "op", ""))
        if layout is None or node.block.registered:
            continue
        shapes = [wire.find().shape.known for wire in node.inputs]
        if any(shape is None for shape in shapes):
            continue
        op = node.block.op
        division = divide(
            layout, [[n or 0 for n in shape] for shape in shapes], mesh, rules, ring=op in RINGS
        )
        how = f"left to XLA: {division}" if isinstance(division, str) else f"on parts: {division}"
        lines.append(f"{node.label} {how}")
    return tuple(lines)
