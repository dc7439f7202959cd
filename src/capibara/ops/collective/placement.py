"""Where a collective runs: along a bound axis, or over the shards of an array on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.ops.collective.rings import Axis
from capibara.ops.errors import OpTypeError, OpValueError

__all__ = ["bound_axis", "check_axis_name", "over_shards", "shard_axes", "split_over", "without"]


def check_axis_name(
    name: str, axis_name: object, none: str = "all axes of the jax.shard_map around the call"
) -> Axis | None:
    """Validate ``axis_name``: None (which stands for ``none``), a name, or a tuple of distinct names."""
    if axis_name is None or isinstance(axis_name, str):
        return axis_name
    if isinstance(axis_name, tuple | list) and all(isinstance(each, str) for each in axis_name):
        if not axis_name or len(set(axis_name)) < len(axis_name):
            remedy = f"{tuple(dict.fromkeys(axis_name))!r}" if axis_name else f"None, for {none}"
            raise OpValueError(
                f"{name}: axis_name must be a mesh axis name, a tuple of at least one name and each once, or None; got "
                f"{axis_name!r}. Remedy: axis_name={remedy}."
            )
        return tuple(axis_name)
    raise OpTypeError(
        f"{name}: axis_name must be a mesh axis name, a tuple of names or None, got {axis_name!r}"
    )


def bound_axis(name: str, axis_name: Axis | None, *, needed: bool) -> Axis | None:
    """The axis to communicate over, or None if none is bound and the arrays' shardings determine it.

    Without a name: all axes of the ``shard_map`` around the call.

    Raises:
      OpValueError: ``needed``, and there is none.
    """
    if axis_name is not None:
        try:
            lax.axis_size(axis_name)
        except NameError:
            if needed:
                raise OpValueError(
                    f"{name}: no axis {axis_name!r} is bound here. Remedy: call it inside "
                    f"jax.shard_map(…, mesh=…) with a mesh that has this axis."
                ) from None
            return None
        return axis_name
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else tuple(n for n in mesh.axis_names if n in mesh.manual_axes)
    if manual:
        return manual[0] if len(manual) == 1 else manual
    if needed:
        raise OpValueError(
            f"{name}: it communicates over a mesh axis, and none is bound here. Remedy: call it inside "
            f"jax.shard_map, with axis_name='…' where the mesh has several axes."
        )
    return None


def _sharding(name: str, x: Any) -> NamedSharding | None:
    """How the whole array ``x`` is sharded over a mesh; None if it lies on one device."""
    if isinstance(x, Tracer):
        found = jax.typeof(x).sharding
        if not found.mesh.empty and AxisType.Auto not in found.mesh.axis_types:
            return found
        raise OpValueError(
            f"{name}: the sharding of this traced array ({x.shape}) is not known while tracing. Remedy: call "
            f"it inside jax.shard_map, outside jax.jit, or with a mesh whose axes are explicit (jax.make_mesh)."
        )
    found = getattr(x, "sharding", None)
    if isinstance(found, NamedSharding):
        return found
    if found is None or len(found.device_set) == 1:
        return None
    raise OpTypeError(
        f"{name}: an array over several devices must have a NamedSharding, got {type(found).__name__}"
    )


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shard_axes(sharding: NamedSharding, dimension: int | None = None) -> tuple[str, ...]:
    """The mesh axes that an array (or one dimension of it) is sharded over, in the order of its shards."""
    spec = list(sharding.spec)
    if dimension is not None:
        spec = spec[dimension : dimension + 1]
    return tuple(n for entry in spec for n in _names(entry))


def split_over(
    name: str, x: Any, axis_name: Axis | None, dimension: int | None = None
) -> tuple[NamedSharding, Axis] | None:
    """The sharding of ``x`` and the axes among ``axis_name`` (None: all) that it is sharded over; None if none.

    Raises:
      OpValueError: the mesh has no axis of that name, or the sharding of ``x`` is not known.
    """
    sharding = _sharding(name, x)
    if sharding is None:
        return None
    if axis_name is not None:
        for each in _names(axis_name):
            if each not in sharding.mesh.axis_names:
                raise OpValueError(
                    f"{name}: the mesh of this array has no axis {each!r}; it has {sharding.mesh.axis_names}"
                )
    wanted = sharding.mesh.axis_names if axis_name is None else _names(axis_name)
    axes = tuple(n for n in shard_axes(sharding, dimension) if n in wanted and sharding.mesh.shape[n] > 1)
    if not axes:
        return None
    return sharding, axes[0] if len(axes) == 1 else axes


def without(sharding: NamedSharding, axes: Axis, dimension: int | None = None) -> PartitionSpec:
    """The array's partition without ``axes`` (in one dimension, or in all)."""
    gone, entries = _names(axes), []
    for i, entry in enumerate(sharding.spec):
        kept = tuple(n for n in _names(entry) if n not in gone or (dimension is not None and i != dimension))
        entries.append(kept[0] if len(kept) == 1 else (kept or None))
    return PartitionSpec(*entries)


def over_shards(
    function: Callable[..., Any], arrays: Sequence[Any], mesh: Any, in_specs: Any, out_specs: Any
) -> Any:
    """Run ``function`` on the shards, under ``jit``, on every device."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)(*arrays)
