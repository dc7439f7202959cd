"""What a step function is called with: arrays, and what is not one; the names of their dimensions; rules for these.

Modules of Equinox and states of Flax hold functions and other objects beside arrays. These are part of the program, as
they are for ``equinox.filter_jit``: a plan sees trees in which they are ``None``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.config.axes import AxisRules
from capibara.errors import did_you_mean
from capibara.plan.errors import PlanError

__all__ = [
    "RuleList",
    "Rules",
    "arrays_of",
    "axis_names",
    "is_array",
    "mesh_choices",
    "only_arrays",
    "preferred_axes",
    "rules_of",
]


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is an argument: an array, its description, or a number, as ``jax.jit`` takes them."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, numbers.Number)


def arrays_of(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """The arguments with ``None`` in place of what is not an array, and a function of flat arrays that fills the others
    in again."""
    import jax

    leaves, structure = jax.tree.flatten(args)
    kept = [is_array(leaf) for leaf in leaves]
    shown = jax.tree.unflatten(
        structure, [leaf if keep else None for leaf, keep in zip(leaves, kept, strict=True)]
    )

    def whole(arrays: Sequence[Any]) -> tuple[Any, ...]:
        flat = iter(arrays)
        return jax.tree.unflatten(
            structure, [next(flat) if keep else leaf for leaf, keep in zip(leaves, kept, strict=True)]
        )

    return shown, whole


def only_arrays(tree: Any) -> tuple[Any, ...]:
    """The leaves of a result that are arrays."""
    import jax

    return tuple(leaf for leaf in jax.tree.leaves(tree) if is_array(leaf))


def axis_names(axes: Any, described: Sequence[Any]) -> tuple[tuple[str | None, ...] | None, ...]:
    """Names of the dimensions of every array, in the order of the flat arguments.

    Args:
      axes: one entry an argument, a tree like it with a tuple (or ``PartitionSpec``) of names, or None, for each array.
      described: the arguments.

    Raises:
      PlanError: another number of entries, of arrays or of dimensions.
    """
    import jax

    if axes is None:
        return (None,) * len(jax.tree.leaves(list(described)))
    if not isinstance(axes, Sequence) or isinstance(axes, str):
        raise PlanError(f"axes is {type(axes).__name__}, expected one entry for each argument (or None)")
    if len(axes) != len(described):
        raise PlanError(
            f"axes has {len(axes)} entries, expected one for each of the {len(described)} arguments (or None)"
        )
    out: list[Any] = []
    for number, (given, argument) in enumerate(zip(axes, described, strict=True)):
        leaves, structure = jax.tree.flatten(argument)
        found = [None] * len(leaves) if given is None else _alike(given, structure)
        if found is None:
            found = jax.tree.leaves(given, is_leaf=_is_names)
        if len(found) != len(leaves):
            raise PlanError(f"axes[{number}] names {len(found)} arrays, but args[{number}] has {len(leaves)}")
        for leaf, names in zip(leaves, found, strict=True):
            if not _is_names(names):
                raise PlanError(
                    f"axes[{number}] has {names!r:.100} for an array of shape {tuple(leaf.shape)}, expected a tuple of "
                    "names, or None"
                )
            if names is not None:
                # A PartitionSpec may leave out the last dimensions.
                short = isinstance(names, jax.sharding.PartitionSpec)
                names = tuple(names) + (None,) * (len(leaf.shape) - len(names)) * short
                if len(names) != len(leaf.shape):
                    raise PlanError(
                        f"axes[{number}] has {names} for an array of shape {tuple(leaf.shape)}: one name a dimension"
                    )
            out.append(names)
    return tuple(out)


def _alike(given: Any, structure: Any) -> list[Any] | None:
    """The entries of a tree in the places of another tree's leaves, None if it is nested otherwise."""
    try:
        return structure.flatten_up_to(given)
    except (TypeError, ValueError):
        return None


def _is_names(value: Any) -> bool:
    import jax

    return value is None or (
        isinstance(value, tuple | list | jax.sharding.PartitionSpec)
        and all(each is None or isinstance(each, str) for each in value)
    )


@dataclass(frozen=True)
class RuleList:
    """Logical axis rules in order, as ``flax.linen.logical_to_mesh_axes`` reads them.

    An earlier rule takes its mesh axes before a later one, whichever dimensions of an array they are for. A rule whose
    axes do not divide its dimension is left out.

    Attributes:
      pairs: logical axis, and the mesh axes that shard it together.
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]

    def spec(
        self,
        names: Sequence[str | None],
        mesh: Any,
        shape: Sequence[int] | None = None,
        kind: str = "parameters",
    ) -> Any:
        """As :meth:`AxisRules.spec`; both kinds have the same rules."""
        from jax.sharding import PartitionSpec

        sizes = dict(mesh.shape)
        entries: list[Any] = [None] * len(names)
        left = {name: n for n, name in reversed(list(enumerate(names))) if name is not None}
        used: set[str] = set()
        for name, axes in self.pairs:
            inside = tuple(axis for axis in axes if axis in sizes)
            if name not in left or used & set(inside):
                continue
            if shape is not None and shape[left[name]] % math.prod(sizes[axis] for axis in inside):
                continue
            at = left.pop(name)
            if inside:
                entries[at] = inside[0] if len(inside) == 1 else inside
            used.update(inside)
        return PartitionSpec(*entries)

    def check(self, names: Iterable[str | None], mesh_axes: Iterable[str], place: str) -> None:
        """Refuse a name without a rule: a typing error would silently leave an array replicated.

        Raises:
          PlanError: there is such a name.
        """
        known = dict.fromkeys(name for name, _ in self.pairs)
        for name in names:
            if name is not None and name not in known:
                raise PlanError(
                    f"{place} has the name {name!r}, which no rule has: {', '.join(known)}."
                    f"{did_you_mean(name, known)} Add ({name!r}, None) for one that is never sharded"
                )

    def preferred(self, name: str) -> tuple[str, ...]:
        """The mesh axes of a name's first rule."""
        return next((axes for each, axes in self.pairs if each == name), ())


Rules = AxisRules | RuleList


def preferred_axes(rules: Rules, name: str) -> set[str]:
    """The mesh axes that the rules prefer for a dimension of an activation."""
    if isinstance(rules, RuleList):
        return set(rules.preferred(name))
    return {axis for place in tuple(rules.activations.get(name, ()))[:1] for axis in place.split("+")}


def rules_of(rules: Any, mesh_axes: Sequence[str] | None) -> tuple[Rules | None, tuple[str, ...]]:
    """Rules for logical axes, and the axes of the mesh that they name.

    Args:
      rules: an :class:`AxisRules`; or pairs of a logical axis and a mesh axis, several, or None, as Flax's
        ``logical_axis_rules`` and MaxText have them; or None.
      mesh_axes: the mesh axes that a plan may use, outermost first; by default all that the rules name, in that order.
        Others are taken to have one device.

    Raises:
      PlanError: it is none of these, or a mesh axis is named by no rule.
    """
    if rules is None:
        if mesh_axes is not None:
            raise PlanError("mesh_axes is for rules: without them a plan's axes are data and model")
        return None, ()
    found: Rules
    if isinstance(rules, AxisRules):
        found, tables = rules, (rules.parameters, rules.activations)
        named = [
            axis for table in tables for places in table.values() for p in places for axis in p.split("+")
        ]
    else:
        found = RuleList(tuple(_pairs(rules)))
        named = [axis for _, axes in found.pairs for axis in axes]
    axes = tuple(dict.fromkeys(named if mesh_axes is None else mesh_axes))
    for axis in axes:
        if axis not in named:
            raise PlanError(f"mesh_axes has {axis!r}, which no rule names: {', '.join(dict.fromkeys(named))}")
    if not axes:
        raise PlanError("rules name no mesh axis: there is nothing to shard over")
    return found, axes


def _pairs(rules: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(rules, Mapping):
        rules = rules.items()
    if not isinstance(rules, Iterable) or isinstance(rules, str):
        raise PlanError(f"rules is {type(rules).__name__}, expected pairs such as ('embed', 'fsdp')")
    for pair in rules:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise PlanError(f"rules has {pair!r:.100}, expected pairs such as ('embed', 'fsdp')")
        name, axes = pair
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
            raise PlanError(f"rules has {pair!r:.100}, expected a mesh axis, a tuple of them, or None")
        yield name, tuple(axes)


def mesh_choices(devices: int, axes: Sequence[str]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every mesh with so many devices along these axes together."""
    first, *rest = axes
    if not rest:
        yield ((first, devices),)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for others in mesh_choices(devices // size, rest):
                yield ((first, size), *others)
