"""The mesh axis of each logical axis of a model: the only mapping between models and meshes.

A model names its dimensions (``batch``, ``sequence``, ``embed``, ``heads``, ``mlp``, ``vocab`` …) independently of
devices. A mesh has axes (``data``, ``model`` …) independently of models. :class:`AxisRules` maps one to the other,
separately for parameters and activations: an embedding dimension is worth sharding over ``data`` in a parameter
(fully sharded data parallel), while activations shard their batch over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from capibara.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

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
        "latent": "the short vectors that queries, keys and values are computed from in latent attention",
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
    "embed": ("fsdp+expert", "data+expert", "fsdp", "data", "expert"),
    "latent": ("fsdp+expert", "data+expert", "fsdp", "data", "expert"),
    "heads": ("model", "tensor"),
    "kv_heads": ("model", "tensor"),
    "mlp": ("model", "tensor"),
    "hidden": ("model", "tensor"),
    "experts": ("expert",),
    "layers": ("pipeline",),
}
_ACTIVATIONS = {
    "batch": ("data+fsdp+expert", "data+expert", "fsdp+expert", "data+fsdp", "data", "fsdp", "expert"),
    "sequence": ("context", "sequence"),
    "vocab": ("model", "tensor"),
    "heads": ("model", "tensor"),
    "kv_heads": ("model", "tensor"),
    "mlp": ("model", "tensor"),
    "hidden": ("model", "tensor"),
    "experts": ("expert",),
}


class _Sizes(Protocol):
    """What is read of a mesh, real or abstract: the size of each axis."""

    @property
    def shape(self) -> Any: ...  # a mapping; a cached property of JAX's classes


@dataclass(frozen=True)
class AxisRules:
    """Logical axis → mesh axes to try, in order of preference.

    For each dimension, the first candidate is used whose axes exist in the mesh, are not used by an earlier dimension
    of the same array, and whose size divides the dimension; otherwise the dimension is replicated. ``"data+fsdp"``
    shards one dimension over two mesh axes.

    Add a row to either table for your own names; ``()`` means never sharded::

        AxisRules(parameters={**AxisRules().parameters, "wavelets": ("model",), "taps": ()})

    Args:
        parameters: the table for parameters and optimiser state.
        activations: the table for inputs and intermediate values.

    Raises:
        ConfigError: a table that does not map names to sequences of mesh axes.
    """

    parameters: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(_PARAMETERS))
    activations: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(_ACTIVATIONS))

    def __post_init__(self) -> None:
        for kind in ("parameters", "activations"):
            table = getattr(self, kind)
            if not isinstance(table, Mapping):
                raise ConfigError(
                    f"{kind}={table!r} must be a dict of logical axis to mesh axes, as {{'embed': ('data',)}}"
                )
            for name, candidates in table.items():
                if not isinstance(name, str):
                    raise ConfigError(f"{kind} has the key {name!r}, expected the name of a logical axis")
                # A string is a sequence too, of letters.
                if isinstance(candidates, str) or not (
                    isinstance(candidates, Sequence) and all(isinstance(axis, str) for axis in candidates)
                ):
                    raise ConfigError(
                        f"{kind}[{name!r}]={candidates!r} must be a tuple of names of mesh axes, as ('data',), in "
                        "order of preference"
                    )

    def check(self, names: Iterable[str | None], mesh_axes: Iterable[str], place: str) -> None:
        """Refuse unknown names: a typing error would silently leave an array replicated.

        Args:
            names: the logical axis names of one array.
            mesh_axes: axes of the mesh, which may be named directly.
            place: the owner of these names, for the error; may be empty.

        Raises:
            ConfigError: a name is not a logical axis, in neither table, and not an axis of the mesh.
        """
        mesh_axes = tuple(mesh_axes)
        for name in names:
            if name is None or name in LOGICAL_AXES or self._has(name) or name in mesh_axes:
                continue
            own = [each for each in (*self.parameters, *self.activations) if each not in LOGICAL_AXES]
            logical = [*LOGICAL_AXES, *dict.fromkeys(own)]
            said = f"{place} has the axis name {name!r}, which" if place else repr(name)
            raise ConfigError(
                f"{said} is neither a logical axis ({', '.join(logical)}) nor an axis of the mesh "
                f"({', '.join(mesh_axes) or 'there is none'}).{did_you_mean(str(name), [*logical, *mesh_axes])} Add "
                f"a row for your own name to AxisRules: {{{name!r}: ('model',)}}, or () if it is never "
                "sharded."
            )

    def _has(self, name: str) -> bool:
        return name in self.parameters or name in self.activations

    def spec(
        self,
        names: Sequence[str | None],
        mesh: _Sizes,
        shape: Sequence[int] | None = None,
        kind: Literal["parameters", "activations"] = "parameters",
    ) -> PartitionSpec:
        """The ``PartitionSpec`` of an array whose dimensions have these logical names.

        Args:
            names: one per dimension; None is never sharded. The name of a mesh axis stands for that axis.
            mesh: the mesh (its axis names and sizes are all that is used).
            shape: sizes; a dimension that an axis does not divide is replicated. Without it, divisibility is not
            checked.
            kind: the table to use.

        Raises:
            ConfigError: a name that is neither a logical axis, nor in a table, nor a mesh axis, or a wrong number of
                names.
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
            else:
                self.check((name,), sizes, "")
                continue
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
