"""Operations on arrays of a mesh with explicit axes.

``jax.make_mesh`` makes axes whose shardings are part of an array's type: each primitive then has to state the
sharding of its result, and a reshape that merges two sharded dimensions is an error. The body of an operation is
better left to the compiler: :func:`automatic` runs it with automatic axes, and states the sharding of the result.
:func:`over_explicit_axes` wraps a public function in this.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["Dims", "automatic", "explicit_sharding", "join_dims", "laid_as", "over_explicit_axes"]

_F = TypeVar("_F", bound=Callable[..., Any])
Dims = tuple[Any, ...]  # for each dimension of an array the mesh axes that it is sharded over, or None


def explicit_sharding(*arrays: Any) -> NamedSharding | None:
    """The sharding of the first array with explicit mesh axes in its type; None if there is none."""
    for array in arrays:
        if isinstance(array, jax.Array):
            sharding = jax.typeof(array).sharding
            if not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types:
                return sharding
    return None


def join_dims(*several: Dims) -> Dims:
    """The sharding of a broadcast: for each dimension, that of the first array that specifies one."""
    rank = max(map(len, several))
    padded = [(None,) * (rank - len(dims)) + dims for dims in several]
    return tuple(
        next((axes for axes in each if axes is not None), None) for each in zip(*padded, strict=True)
    )


def automatic(function: Callable[..., Any], arrays: Sequence[Any], kept: int) -> Any:
    """``function(*arrays)`` with the explicit mesh axes of the arrays made automatic in it.

    Equivalent JAX: ``jax.sharding.auto_axes(function, axes=…, out_sharding=…)(*arrays)``.

    Args:
      function: Of the arrays; those that are None stay None.
      arrays: At least one has explicit axes.
      kept: The results are sharded like the first array in its first ``kept`` dimensions, and replicated in the
        others.
    """
    return _run(function, arrays, PartitionSpec(*_laid(arrays[0])[:kept]))


def laid_as(aval: Any, x: jax.Array) -> jax.Array:
    """``x`` ``[steps, …]``, with each step (size 1 where it is constant) sharded like ``aval``."""
    if not any(aval.sharding.spec):
        return x
    dims = (*aval.sharding.spec, *[None] * (len(aval.shape) - len(aval.sharding.spec)))
    spec = [None if n == 1 else axes for n, axes in zip(x.shape[1:], dims, strict=True)]
    return jax.sharding.reshard(x, NamedSharding(aval.sharding.mesh, PartitionSpec(None, *spec)))


def over_explicit_axes(
    *names: str, out: Callable[..., Any], kept: Mapping[str, Sequence[int]] | None = None
) -> Callable[[_F], _F]:
    """A function of arrays that also takes those of a mesh with explicit axes.

    Args:
      names: of its parameters that are arrays or pytrees of them.
      out: is given the :data:`Dims` of each of these (``()`` where it is missing), or pytrees of them, and says those
        of the result, or a list of those of several results. A mesh axis that is in two dimensions then stays in the
        first.
    """

    def mark(function: _F) -> _F:
        signature = inspect.signature(function)
        # The name of ``**options``, whose values may be arrays, too.
        others = next((p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD), "")

        @functools.wraps(function)
        def over(*args: Any, **options: Any) -> Any:
            if not any(map(_is_laid, jax.tree.leaves((args, options)))):
                return function(*args, **options)
            try:
                given = signature.bind(*args, **options).arguments
                laid = _specs(out(*(_laid(given.get(name)) for name in names)))
            except (AttributeError, KeyError, TypeError, ValueError):  # no arrays where they should be
                return function(*args, **options)  # says so
            layouts = _layouts(given, kept or {})
            leaves, tree = jax.tree.flatten({name: given[name] for name in names if name in given})
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
            arrays = [leaves[i] for i in places]
            if not any(map(_is_laid, arrays)):
                return function(*args, **options)
            given = {name: _free(value) if name not in names else value for name, value in given.items()}

            def inner(*traced: Any) -> Any:
                filled = list(leaves)
                for i, array in zip(places, traced, strict=True):
                    filled[i] = array
                named = {**given, **_gather(jax.tree.unflatten(tree, filled), layouts)}
                more = named.pop(others, {})
                return function(**named, **more)

            return _run(inner, arrays, laid)

        return over  # pyright: ignore[reportReturnType]

    return mark


def _gather(arrays: dict[str, Any], layouts: dict[str, PartitionSpec]) -> dict[str, Any]:
    """Arrays laid as they have to be, and their gradients too."""
    return {
        name: jax.lax.with_sharding_constraint(x, layouts[name]) if name in layouts else x
        for name, x in arrays.items()
    }


def _layouts(given: dict[str, Any], kept: Mapping[str, Sequence[int]]) -> dict[str, PartitionSpec]:
    """For each array sharded in the dimensions ``kept`` (counted from either end) alone."""
    found = {}
    for name, dims in kept.items():
        laid = _dims(given[name])
        stay = {i % len(laid) for i in dims}
        found[name] = PartitionSpec(*(axes if i in stay else None for i, axes in enumerate(laid)))
    return found


def _is_laid(array: Any) -> bool:
    """Whether an array is sharded over explicit axes; under ``jax.set_mesh`` replicated ones are on the mesh, too."""
    found = explicit_sharding(array)
    return found is not None and any(found.spec)


def _free(value: Any) -> Any:
    """An option that is a number of JAX's, as one of no mesh: it meets arrays whose axes are automatic."""
    known = isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.ndim == 0
    return np.asarray(value) if known else value


def _on(arrays: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Where no mesh is set, the one that arrays lie on: a result that depends on none of them has to know it."""
    if jax.sharding.get_abstract_mesh().empty:
        for array in arrays:
            sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                with contextlib.suppress(ValueError):  # a mesh cannot be set while a function is traced
                    return jax.set_mesh(sharding.mesh)
    return contextlib.nullcontext()


def _laid(tree: Any) -> Any:
    return () if tree is None else jax.tree.map(_dims, tree)


def _specs(laid: Any) -> Any:
    if isinstance(laid, list):
        return tuple(map(_specs, laid))
    return {name: _specs(each) for name, each in laid.items()} if isinstance(laid, dict) else _spec(laid)


def _dims(array: Any) -> Dims:
    found = explicit_sharding(array)
    spec = () if found is None else tuple(found.spec)
    return (*spec, *[None] * (np.ndim(array) - len(spec)))


def _spec(dims: Sequence[Any]) -> PartitionSpec:
    """``dims`` with no mesh axis in two dimensions."""
    seen: set[Any] = set()
    free = []
    for axes in dims:
        each = {axes} if isinstance(axes, str) else set(axes or ())
        if not all(isinstance(name, str) for name in each):
            raise TypeError(f"got {dims!r}, expected the mesh axes of each dimension of an array")
        free.append(None if each & seen else axes)
        seen |= each
    return PartitionSpec(*free)


def _run(function: Callable[..., Any], arrays: Sequence[Any], specs: Any) -> Any:
    found = explicit_sharding(*arrays)
    assert found is not None
    mesh = found.mesh
    axes = tuple(
        n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    present = [i for i, array in enumerate(arrays) if array is not None]

    def inner(*given: Any) -> Any:
        row = [None] * len(arrays)
        for place, array in zip(present, given, strict=True):
            row[place] = array
        return function(*row)

    laid = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    run: Any = jax.sharding.auto_axes(inner, axes=axes, out_sharding=laid)
    with _on(arrays):
        return run(*(arrays[i] for i in present))
