"""What a program is compiled for: everything about a call that selects the program.

JAX compiles a function again whenever one of these changes, and does not say which. A :class:`Signature` holds them
all in one value that can be hashed and compared: the tree of the arguments; of each array its shape, dtype, weak type
(that of Python's numbers) and sharding; the static values; and the settings of JAX that affect tracing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from capibara.compilation.errors import CompilationOptionError

__all__ = [
    "Leaf",
    "Signature",
    "argument_names",
    "has_tracer",
    "settings_now",
    "signature_of",
    "static_both_ways",
]

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_numpy_dtype_promotion",
)


class Leaf(NamedTuple):
    """One array of a call.

    Attributes:
      shape, dtype: of the array.
      weak_type: whether its dtype yields to that of others: true of Python's numbers.
      sharding: where it is, if it was put there; None for arrays that JAX may move.
    """

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: Any

    def __str__(self) -> str:
        weak = ", weak" if self.weak_type else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{weak}"


@dataclass(frozen=True)
class Signature:
    """What selects a program.

    Attributes:
      tree: the structure of the arguments that are not static.
      leaves: their arrays, in the order of the tree.
      static: name, type and value of each static argument: 1, 1.0 and True are equal, and are different programs.
      settings: ``(name, value)`` of JAX's settings that affect tracing, and the mesh in use.
    """

    tree: Any
    leaves: tuple[Leaf, ...]
    static: tuple[tuple[str, type, Any], ...]
    settings: tuple[tuple[str, Any], ...]

    def paths(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Where each array is, such as ``params['layers'][0]``; ``names`` are those of the positional arguments."""
        import jax

        args, kwargs = jax.tree.unflatten(self.tree, list(range(len(self.leaves))))
        found: dict[int, str] = {}
        named = [(name, value) for name, value in zip(names, args, strict=False)]
        for name, value in [*named, *kwargs.items()]:
            for path, number in jax.tree_util.tree_flatten_with_path(value)[0]:
                found[number] = name + jax.tree_util.keystr(path)
        return tuple(found[number] for number in range(len(self.leaves)))


def argument_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names of the first ``count`` positional arguments, ``args[3]`` where a function collects them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of compiled code
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{number}]" for number in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple([*names, *(f"argument {number}" for number in range(len(names), count))][:count])


def signature_of(
    dynamic: tuple[Any, ...], kwargs: Mapping[str, Any], static: Iterable[tuple[str, type, Any]] = ()
) -> Signature:
    """The signature of a call.

    Args:
      dynamic: the positional arguments that are not static: trees of arrays or ``jax.ShapeDtypeStruct``.
      kwargs: the same by name.
      static: names, types and values of the static arguments.

    Raises:
      CompilationOptionError: a static value cannot be hashed.
      TypeError: an argument holds something that is not an array, a number or an array's description.
    """
    import jax

    leaves, tree = jax.tree.flatten((dynamic, dict(kwargs)))
    static = tuple(static)
    for name, _, value in static:
        try:
            hash(value)
        except TypeError:
            raise CompilationOptionError(
                f"{name}: got a static value of type {type(value).__name__}, which cannot be hashed. "
                "Pass arrays and trees of arrays as ordinary arguments."
            ) from None
    return Signature(tree, tuple(map(_leaf, leaves)), static, settings_now())


def settings_now() -> tuple[tuple[str, Any], ...]:
    """The settings of JAX that affect tracing, in this thread, and the mesh in use."""
    import jax

    config = jax.config
    found = tuple((name, getattr(config, name)) for name in _SETTINGS)
    return (*found, ("mesh", jax.sharding.get_abstract_mesh()))


def _leaf(value: Any) -> Leaf:
    import jax

    if isinstance(value, jax.Array):
        sharding = value.sharding if value.committed else None
        return Leaf(value.shape, value.dtype.name, bool(value.weak_type), sharding)
    if isinstance(value, jax.ShapeDtypeStruct):
        return Leaf(tuple(value.shape), value.dtype.name, bool(value.weak_type), value.sharding)
    kind = jax.typeof(value)
    return Leaf(tuple(kind.shape), kind.dtype.name, bool(getattr(kind, "weak_type", False)), None)


def has_tracer(arguments: Any) -> bool:
    """Whether a call is part of another transformation: ``jit``, ``grad``, ``vmap``."""
    import jax
    from jax.core import Tracer

    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))


def static_both_ways(
    function: Callable[..., Any], numbers: tuple[int, ...], names: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static arguments by position and by name, whichever way they were given: a call may pass them either way."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return numbers, names
    places = {
        one.name: number for number, one in enumerate(parameters) if one.kind is one.POSITIONAL_OR_KEYWORD
    }
    return (
        tuple(sorted({*numbers, *(places[name] for name in names if name in places)})),
        tuple(dict.fromkeys([*names, *(name for name, number in places.items() if number in numbers)])),
    )
