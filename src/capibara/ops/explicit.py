"""Operations on arrays of a mesh with explicit axes.

``jax.make_mesh`` makes axes whose shardings are part of an array's type: each primitive then has to say how its
result is laid out, and a reshape that merges two sharded dimensions is an error. The inside of an operation is
better left to the compiler: :func:`automatic` runs it with automatic axes, and states the layout of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["automatic", "explicit_sharding"]


def explicit_sharding(*arrays: Any) -> NamedSharding | None:
    """The sharding in the type of the first array that has explicit mesh axes in it; None if none has."""
    for array in arrays:
        if isinstance(array, jax.Array):
            sharding = jax.typeof(array).sharding
            if not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types:
                return sharding
    return None


def automatic(function: Callable[..., jax.Array], arrays: Sequence[Any], kept: int) -> jax.Array:
    """``function(*arrays)`` with the explicit mesh axes of the arrays made automatic in it.

    Equivalent JAX: ``jax.sharding.auto_axes(function, axes=…, out_sharding=…)(*arrays)``.

    Args:
      function: Of the arrays; those that are None stay None.
      arrays: At least one has explicit axes.
      kept: The result is laid out as the first array in its first ``kept`` dimensions, and whole in the others.
    """
    found = explicit_sharding(*arrays)
    assert found is not None
    mesh = found.mesh
    own = explicit_sharding(arrays[0])
    spec = PartitionSpec() if own is None else PartitionSpec(*own.spec[:kept])
    axes = tuple(
        n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    present = [i for i, array in enumerate(arrays) if array is not None]

    def inner(*given: Any) -> jax.Array:
        row = [None] * len(arrays)
        for place, array in zip(present, given, strict=True):
            row[place] = array
        return function(*row)

    run: Any = jax.sharding.auto_axes(inner, axes=axes, out_sharding=NamedSharding(mesh, spec))
    return run(*(arrays[i] for i in present))
