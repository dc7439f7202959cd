"""What a compiled model starts from: initialisers by pattern, where arrays go, and how they are laid out."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import CompileError
from capibara.compose.initializers import Constant
from capibara.compose.physical.sharding import param_shardings
from capibara.compose.physical.specs import ArraySpec, nest
from capibara.errors import did_you_mean

if TYPE_CHECKING:
    from capibara.compose.physical.compiled import CompiledModel

__all__ = [
    "check_sizes",
    "check_start",
    "fresh",
    "on_backend",
    "own_name",
    "propose_shardings",
    "scope_of",
    "with_initialisers",
]

Path = tuple[str, ...]

_KEPT = 16  # programs that make arrays, for each compiled model


def scope_of(backend: Any) -> Callable[[], AbstractContextManager[Any]] | None:
    """What a call of a jitted function on this backend has to be in; None for nothing, the quickest."""
    others = backend.needs_x64 or backend.debug or backend.precision is not None
    if not others and backend.device is not None:
        import jax

        return partial(jax.default_device, backend.device)
    return backend.scope if others else None


def with_initialisers(specs: Mapping[Path, ArraySpec], init: Any) -> dict[Path, ArraySpec]:
    """Parameters that start otherwise than their blocks say.

    Args:
        specs: by path. init: one initialiser (or number), or a dict of them by dotted name or pattern.

    Raises:
        CompileError: a pattern fits nothing, or a value is neither a function nor a number.
    """
    table = init if isinstance(init, Mapping) else {"*": init}
    names = {".".join(path): path for path in specs}
    changed = dict(specs)
    done: set[str] = set()
    for pattern, value in table.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = Constant(float(value))
        if not callable(value):
            raise CompileError(
                f"init[{pattern!r}]={value!r} must be an initialiser such as Normal(0.02), or a number"
            )
        fitting = [n for n in names if fnmatch.fnmatchcase(n, str(pattern))]
        if not fitting:
            raise CompileError(
                f"init names {pattern!r}, which fits no parameter; they are {list(names)[:12]}."
                f"{did_you_mean(str(pattern), names)}"
            )
        for name in fitting:
            if name not in done:
                done.add(name)
                changed[names[name]] = replace(specs[names[name]], init=value)
    return changed


def check_sizes(specs: Mapping[Path, ArraySpec], sizes: Mapping[str, int], what: str) -> None:
    """Raises a CompileError for a size that is not a free size of the arrays."""
    free = {n for s in specs.values() for n in s.shape or () if isinstance(n, str)}
    for name in sizes:
        if name not in free:
            raise CompileError(
                f"{name!r} is not a free size of a {what}; the free sizes are {sorted(free)}.{did_you_mean(name, free)}"
            )


def check_start(place: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises a CompileError if what an initialiser gave has another shape than it was asked for."""
    found = getattr(value, "shape", None)
    if found is None or tuple(found) != tuple(shape):
        given = type(value).__name__ if found is None else f"shape {tuple(found)}"
        raise CompileError(
            f"the initialiser of {place} gives {given}, expected an array of shape {tuple(shape)}: it is called as "
            "init(key, shape, dtype)"
        )


def own_name(path: Path, spec: ArraySpec) -> int:
    """A number for an array's own randomness, from its path."""
    salt = getattr(spec.init, "salt", None)
    return zlib.crc32(".".join(path if salt is None else (*path[:-1], salt)).encode())


def fresh(
    compiled: CompiledModel,
    specs: Mapping[Path, ArraySpec],
    key: Any,
    sizes: Mapping[str, int],
    what: str,
) -> dict[str, Any]:
    """New arrays on JAX, sharded over the backend's mesh if it has one.

    Args:
        compiled: whose arrays they are. specs: by path. key: a JAX key. sizes: of the free sizes.
        what: "parameter" or "state", for messages.
    """
    import jax

    check_sizes(specs, sizes, what)
    backend, makers = compiled.backend, compiled._makers
    shapes = {path: spec.sizes(sizes, f"the {what} {'.'.join(path)}") for path, spec in specs.items()}

    def make(key: Any) -> dict[str, Any]:
        arrays = {}
        for path, spec in specs.items():
            own = jax.random.fold_in(key, own_name(path, spec))
            init, shape = spec.init, shapes[path]
            for count in reversed(shape[: spec.stack]):
                init = _stacked(init, count)
            arrays[path] = init(own, shape[spec.stack :], spec.dtype)
            check_start(f"the {what} {'.'.join(path)!r}", arrays[path], shape)
        return nest(arrays)

    with backend.scope():
        if not specs:
            return {}
        # Kept, because compiling random generators takes longer than running them.
        name = (what, frozenset(sizes.items()), *(spec.init for spec in specs.values()))
        try:
            run = makers.get(name)
        except TypeError:  # an initialiser that cannot be hashed
            name, run = None, None
        if run is None:
            shardings = None
            if backend.mesh is not None:
                axes = nest({path: spec.axes for path, spec in specs.items()})
                shardings = param_shardings(jax.eval_shape(make, key), axes, backend.mesh, backend.rules)
            run = jax.jit(make, out_shardings=shardings)
            if name is not None:
                while len(makers) >= _KEPT:
                    makers.pop(next(iter(makers)))
                makers[name] = run
        return run(key)


def _stacked(init: Any, count: int) -> Any:
    import jax

    def stacked(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return jax.vmap(lambda k: init(k, shape, dtype))(jax.random.split(key, count))

    return stacked


def propose_shardings(compiled: CompiledModel) -> dict[str, Any]:
    """See :meth:`CompiledModel.propose_shardings`."""
    import jax

    backend = compiled.backend
    mesh = getattr(backend, "mesh", None)
    if mesh is None:
        raise CompileError("the backend has no mesh to shard arrays over: JaxBackend(device_mesh=(2, 2))")

    def one(spec: ArraySpec, kind: Any) -> Any:
        if spec.axes is None or spec.shape is None:
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sizes = tuple(n for n in spec.shape if isinstance(n, int))
        # A free size may be any, so that only shapes that are known whole are checked for what divides them.
        shape = sizes if len(sizes) == len(spec.shape) else None
        return jax.sharding.NamedSharding(mesh, backend.rules.spec(spec.axes, mesh, shape, kind=kind))

    def nested(specs: Mapping[Path, ArraySpec], kind: Any) -> dict[str, Any]:
        return nest({path: one(spec, kind) for path, spec in specs.items()})

    return {
        "params": nested(compiled.params, "parameters"),
        "inputs": {key: one(spec, "activations") for key, spec in compiled.inputs.items()},
        "states": nested(compiled.states, "parameters"),
    }


def on_backend(compiled: CompiledModel, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Nested NumPy arrays as the backend's own, on its device or over its mesh."""
    backend = compiled.backend
    module = getattr(backend, "ops_module", "")
    if not module.endswith("jax_ops"):
        make = getattr(backend, "array", None)

        def convert(tree: Any) -> Any:
            if isinstance(tree, Mapping):
                return {k: convert(v) for k, v in tree.items()}
            return tree if make is None else make(tree, dtype=tree.dtype.name)

        return convert(arrays)
    import jax

    with backend.scope():
        if backend.mesh is not None:
            return jax.device_put(arrays, propose_shardings(compiled)["params"])
        return jax.device_put(arrays, backend.device)
