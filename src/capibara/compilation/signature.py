"""What a program is compiled for: everything about a call that selects the program.

JAX compiles a function again whenever one of these changes, and does not say which. A :class:`Signature` holds them
all in one value that can be hashed and compared: the tree of the arguments; of each array its shape, dtype, weak type
(that of Python's numbers) and sharding; the static values; and the settings of JAX that affect tracing.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from capibara.compilation.errors import CompilationOptionError
from capibara.jax_versions import trace_context

__all__ = [
    "OTHER_SETTINGS",
    "Leaf",
    "Signature",
    "argument_names",
    "checked_names",
    "checked_numbers",
    "has_tracer",
    "names_at",
    "settings_now",
    "signature_of",
    "static_both_ways",
]

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
)
OTHER_SETTINGS = "other settings of JAX"


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
    mesh = jax.sharding.get_abstract_mesh()
    # Meshes of equal shape over other devices are one abstract mesh.
    devices = () if mesh.empty else _devices_of_mesh()
    return (*found, ("mesh", mesh), ("devices of the mesh", devices), (OTHER_SETTINGS, trace_context()))


def _devices_of_mesh() -> tuple[Any, ...]:
    import jax

    try:
        return tuple(jax.sharding.get_mesh().devices.flat)
    except ValueError:  # inside a transformation, or of a mesh without devices
        return ()


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
    if (parameters := _parameters(function)) is None:
        return numbers, names
    places = {
        one.name: number for number, one in enumerate(parameters) if one.kind is one.POSITIONAL_OR_KEYWORD
    }
    return (
        tuple(sorted({*numbers, *(places[name] for name in names if name in places)})),
        tuple(dict.fromkeys([*names, *(name for name, number in places.items() if number in numbers)])),
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of compiled code
        return None


def checked_numbers(function: Callable[..., Any], argument: str, given: Any) -> tuple[int, ...]:
    """Positions of arguments as integers from 0; negative ones count from the last argument.

    Raises:
      CompilationOptionError: one is not an integer, or the function has no such argument.
    """
    try:
        numbers = tuple(map(operator.index, (given,) if hasattr(given, "__index__") else given))
    except TypeError:
        raise CompilationOptionError(
            f"{argument}: got {given!r:.100}, expected an integer or several of them."
        ) from None
    parameters = _parameters(function)
    positional = [
        one for one in parameters or () if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    endless = parameters is None or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    count = len(positional)
    for number in numbers:
        if number < 0 if endless else not -count <= number < count:
            have = "any number of arguments" if endless else f"{count} positional arguments"
            least = 0 if endless else -count
            most = "" if endless else f" to {count - 1}"
            raise CompilationOptionError(
                f"{argument}: got {number} for a function of {have}, expected integers from {least}{most}."
            )
    return tuple(sorted({number % count if number < 0 else number for number in numbers}))


def checked_names(function: Callable[..., Any], argument: str, given: Any) -> tuple[str, ...]:
    """Names of arguments.

    Raises:
      CompilationOptionError: one is not a string, or the function has no such argument.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    parameters = _parameters(function)
    known = None
    if parameters is not None and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name in names:
        if not isinstance(name, str) or (known is not None and name not in known):
            expected = "names of arguments" if known is None else f"some of {', '.join(known) or 'none'}"
            raise CompilationOptionError(f"{argument}: got {name!r:.80}, expected {expected}.")
    return names


def names_at(function: Callable[..., Any], numbers: tuple[int, ...]) -> tuple[str, ...]:
    """The names by which the arguments at these positions may be passed, too."""
    return tuple(
        one.name
        for number, one in enumerate(_parameters(function) or ())
        if number in numbers and one.kind is one.POSITIONAL_OR_KEYWORD
    )
