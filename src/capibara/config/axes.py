"""Which mesh axis each logical axis of a model is laid over: the one table between models and meshes.

A model names what its dimensions mean (``batch``, ``sequence``, ``embed``, ``heads``, ``mlp``, ``vocab`` …) and knows
nothing of devices. A mesh has axes (``data``, ``model`` …) and knows nothing of models. :class:`AxisRules` maps one
to the other, separately for parameters and for activations: an embedding dimension is worth sharding over ``data``
in a parameter (fully sharded data parallel), while the activations have their batch there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from capibara.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec

__all__ = ["LOGICAL_AXES", "AxisRules"]

LOGICAL_AXES: Mapping[str, str] = MappingProxyType(
    {
        "batch": "independent examples",
        "sequence": "positions in time",
        "embed": "the residual stream",
        "hidden": "features of a layer in general",
        "heads": "attention heads, or groups of state-space channels",
        "kv_heads": "key and value heads",
        "head_dim": "features of one head",
        "mlp": "the inner features of a feed-forward layer",
        "vocab": "tokens of the vocabulary",
        "state": "the recurrent state of a state-space layer",
        "conv": "taps of a short convolution",
        "codes": "entries of a codebook",
        "experts": "experts of a mixture",
        "layers": "repetitions of a block",
    }
)

_PARAMETERS = {
    "vocab": ("model", "tensor"),
    "embed": ("fsdp", "data"),
    "heads": ("model", "tensor"),
    "kv_heads": ("model", "tensor"),
    "mlp": ("model", "tensor"),
    "hidden": ("model", "tensor"),
    "experts": ("expert", "data"),
    "layers": ("pipeline",),
}
_ACTIVATIONS = {
    "batch": ("data+fsdp", "data", "fsdp"),
    "sequence": ("sequence",),
    "vocab": ("model", "tensor"),
    "heads": ("model", "tensor"),
    "kv_heads": ("model", "tensor"),
    "mlp": ("model", "tensor"),
    "hidden": ("model", "tensor"),
    "experts": ("expert", "data"),
}


@dataclass(frozen=True)
class AxisRules:
    """Logical axis → mesh axes to try, in order of preference.

    For each dimension the first candidate is taken whose axes the mesh has, that no earlier dimension of the same
    array uses, and whose size divides the dimension; otherwise the dimension is replicated. ``"data+fsdp"`` lays
    one dimension over two mesh axes at once.

    Args:
        parameters: the table for parameters and optimiser state.
        activations: the table for inputs and intermediate values.
    """

    parameters: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(_PARAMETERS))
    activations: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(_ACTIVATIONS))

    def spec(
        self,
        names: Sequence[str | None],
        mesh: Mesh | AbstractMesh,
        shape: Sequence[int] | None = None,
        kind: Literal["parameters", "activations"] = "parameters",
    ) -> PartitionSpec:
        """The ``PartitionSpec`` of an array whose dimensions have these logical names.

        Args:
            names: one a dimension; None is never sharded. The name of a mesh axis is taken as that axis.
            mesh: the mesh (its axis names and sizes are all that is used).
            shape: sizes; a dimension that an axis does not divide is replicated. Without it nothing is checked.
            kind: which table.

        Raises:
            ConfigError: for a name that is neither a logical axis nor a mesh axis, or a wrong number of names.
        """
        from jax.sharding import PartitionSpec

        if shape is not None and len(names) != len(shape):
            raise ConfigError(
                f"names={tuple(names)!r} names {len(names)} dimensions, but the array has {len(shape)}: "
                f"shape {tuple(shape)}. Give one name (or None) a dimension."
            )
        if kind not in ("parameters", "activations"):
            raise ConfigError(f"kind={kind!r} must be 'parameters' or 'activations'")
        table = self.parameters if kind == "parameters" else self.activations
        sizes = dict(mesh.shape)
        used: set[str] = set()
        entries: list[str | tuple[str, ...] | None] = []
        for i, name in enumerate(names):
            entries.append(None)
            if name is None:
                continue
            if name in table:
                candidates: Sequence[str] = table[name]
            elif name in sizes:
                candidates = (name,)
            elif name in LOGICAL_AXES:
                continue
            else:
                known = [*LOGICAL_AXES, *sizes]
                raise ConfigError(
                    f"{name!r} is neither a logical axis ({', '.join(LOGICAL_AXES)}) nor an axis of the mesh "
                    f"({', '.join(sizes)}).{did_you_mean(name, known)}"
                )
            for candidate in candidates:
                axes = tuple(candidate.split("+"))
                if any(a not in sizes or a in used for a in axes):
                    continue
                count = 1
                for a in axes:
                    count *= sizes[a]
                if shape is not None and shape[i] % count:
                    continue
                entries[-1] = axes if "+" in candidate else candidate
                used.update(axes)
                break
        return PartitionSpec(*entries)
