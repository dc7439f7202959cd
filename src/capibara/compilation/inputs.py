"""From ``input_shapes`` to the arguments that a function is compiled for."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.compilation.errors import CompilationOptionError

__all__ = ["Fixed", "entries", "fixed_values", "input_descriptions", "is_size"]

Fixed = Mapping[int, Any]


def input_descriptions(entry: Any, dtype: Any) -> tuple[Any, ...]:
    """One entry of ``input_shapes``: descriptions of the inputs of a call.

    Args:
      entry: a shape, an array or ``jax.ShapeDtypeStruct`` (or a tree of those) for a function of one input; a tuple
        of these for several.
      dtype: of the inputs that are given by shape.

    Raises:
      CompilationOptionError: it is none of these.
    """
    if _is_shape(entry):
        return (_describe(entry, dtype),)
    if isinstance(entry, tuple | list) and entry:
        return tuple(_describe(one, dtype) for one in entry)
    return (_describe(entry, dtype),)


def entries(function: Callable[..., Any], input_shapes: Sequence[Any], fixed: int) -> list[Any]:
    """The entries of ``input_shapes``, one for each program.

    ``[(32, 512), (32,)]`` for a function of two inputs can only be the shapes of one call; for a function of one
    input they are two calls.
    """
    found = list(input_shapes)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return found
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(one.kind in positional and one.default is one.empty for one in parameters) - fixed
    if needed > 1 and all(map(_is_shape, found)):
        if len(found) == needed:
            return [tuple(found)]
        raise CompilationOptionError(
            f"input_shapes: got {len(found)} shapes for a function of {needed} inputs, expected {needed}; or for each "
            f"program a tuple of {needed} shapes."
        )
    return found


def _describe(value: Any, dtype: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if _is_shape(value):
        return jax.ShapeDtypeStruct(tuple(map(int, value)), jnp.dtype(dtype))
    try:
        described = jax.tree.map(_abstract, value)
    except TypeError:
        described = None
    if described is None or not jax.tree.leaves(described):
        raise CompilationOptionError(
            f"input_shapes: got an entry {value!r:.100}, expected a shape such as (32, 512), an array, a "
            "jax.ShapeDtypeStruct or a tree of these; for a function of several inputs a tuple of them."
        )
    return described


def _abstract(leaf: Any) -> Any:
    import jax

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding)
    if isinstance(leaf, str | bytes):
        raise TypeError
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=getattr(kind, "weak_type", False))


def is_size(value: Any) -> bool:
    """Whether a value is an integer, of Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple | list) or not all(map(is_size, value)):
        return False
    if any(size < 0 for size in value):
        raise CompilationOptionError(
            f"input_shapes: got the shape {tuple(value)}, expected sizes of at least 0."
        )
    return True


def fixed_values(
    function: Callable[..., Any], positions: Sequence[int], given: Fixed | None
) -> dict[int, tuple[Any, bool]]:
    """The arguments that stay the same from call to call, and whether each is an array (or a tree of arrays).

    Args:
      function: whose arguments they are.
      positions: of the arguments, from 0.
      given: their values, by position. One that is missing has its default; without one it is looked for in the model
        that the function uses: the only object in its globals and closure with ``params`` and ``apply``; its
        ``params`` are the value.

    Returns:
      ``{position: (value, is_array)}``; arrays as descriptions.

    Raises:
      CompilationOptionError: a value is missing and there is no such model, or there are several.
    """
    import jax

    given = {**_defaults(function, positions), **dict(given or {})}
    if unknown := sorted(given.keys() - set(positions), key=str):
        raise CompilationOptionError(
            f"static_args: got values for the arguments {unknown}, which are not in static_argnums={list(positions)}."
        )
    found: dict[int, tuple[Any, bool]] = {}
    for position in positions:
        value = given[position] if position in given else _params_of_model(function, position)
        leaves = jax.tree.leaves(value)
        arrays = bool(leaves) and all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves)
        found[position] = (jax.tree.map(_abstract, value), True) if arrays else (value, False)
    return found


def _defaults(function: Callable[..., Any], positions: Sequence[int]) -> dict[int, Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    return {
        number: parameters[number].default
        for number in positions
        if number < len(parameters) and parameters[number].default is not inspect.Parameter.empty
    }


def _params_of_model(function: Callable[..., Any], position: int) -> Any:
    plain = inspect.unwrap(function)
    try:
        variables = inspect.getclosurevars(plain)
        used = {**variables.globals, **variables.nonlocals}
    except TypeError:  # not a Python function
        used = {}
    models = {name: one for name, one in used.items() if _has(one, "params") and _has(one, "apply")}
    if len({id(one) for one in models.values()}) == 1:
        return next(iter(models.values())).params
    what = f"several models ({', '.join(models)})" if models else "no model with params and apply"
    raise CompilationOptionError(
        f"static_argnums: the argument {position} has no value, and {getattr(plain, '__name__', 'the function')} uses "
        f"{what}. Give its value, or arrays of its shapes: compile(…, static_args={{{position}: params}})."
    )


def _has(value: Any, name: str) -> bool:
    """Whether an object has an attribute, which is not read: a property may compute it."""
    return not isinstance(value, type) and (
        hasattr(type(value), name) or name in getattr(value, "__dict__", {})
    )
