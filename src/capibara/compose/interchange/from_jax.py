"""JAX functions as blocks.

The shapes of the results follow from those of the inputs by ``jax.eval_shape``, as soon as all ranks are known. Sizes
that are still open are then symbols (``jax.export.symbolic_shape``), so that the shapes are right for every size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from capibara.compose.errors import InputError, KindError, ShapeError, WiringError
from capibara.compose.initializers import Given
from capibara.compose.logical.arguments import choice, flag
from capibara.compose.logical.block import Block
from capibara.compose.logical.custom import Wrapped, ports
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import Dim, Shape, unify
from capibara.compose.logical.wires import KINDS
from capibara.errors import did_you_mean

__all__ = ["from_jax"]

_DTYPES = {"float": "float32", "int": "int32", "bool": "bool"}


def from_jax(
    function: Callable[..., Any],
    *,
    inputs: Iterable[str] | None = None,
    outputs: Iterable[str] = ("output",),
    params: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    uses_key: bool = False,
    name: str | None = None,
) -> Block:
    """A block that runs a function written in JAX, for models compiled on a ``JaxBackend``::

        model |= ml.from_jax(lambda x, y: jnp.hypot(x, y))(x="left", y="right", output="length")

    Equivalent JAX: ``length = function(left, right)``. Gradients are JAX's, also those of ``jax.custom_vjp``.

    Args:
        function: a pure function of arrays, which returns one array, a tuple in the order of ``outputs``, or a dict
            with them as keys. With ``params`` they are its first argument.
        inputs: names of its arguments; by default those of its signature that have no default.
        outputs: names of its results.
        params: arrays to train, in a possibly nested dict, with their initial values. In the model, a parameter is
            named by its path: ``{"dense": {"w": …}}`` is ``dense_w``.
        kinds: "float", "int" or "bool" by port; by default inputs are of any kind, and outputs are floats.
        uses_key: the function draws random numbers: it is called with ``key=``, its own JAX key, derived from the
            ``key`` of the model call.
        name: of the block.

    Raises:
        WiringError: the names are not valid port names. ShapeError: the function refuses its input shapes, or its
            output shapes do not match (when the model is built or compiled). CompileError: the backend is not JAX.
    """
    if not callable(function):
        raise WiringError(f"function={function!r} must be a function of JAX arrays")
    flag("uses_key", uses_key)
    leaves = _leaves(params)
    row = (
        _signature(function, 1 if params is not None else 0, uses_key)
        if inputs is None
        else ports("inputs", inputs)
    )
    made = ports("outputs", outputs)
    names = ["_".join(path) for path in leaves]
    if len(set(names)) != len(names) or set(names) & {*row, *made}:
        raise WiringError(f"params: the names {names} must differ from each other and from {[*row, *made]}")

    for key, kind in (kinds or {}).items():
        choice(f"kinds[{key!r}]", kind, KINDS)
        if key not in {*row, *made}:
            raise WiringError(
                f"kinds names {key!r}; the ports are {[*row, *made]}.{did_you_mean(str(key), [*row, *made])}"
            )

    @functools.wraps(function, updated=())
    def run(*values: Any, **drawn: Any) -> Any:
        if uses_key and drawn["key"] is None:
            raise InputError(
                f"{getattr(function, '__name__', 'a function')} draws random numbers: give the model a key="
            )
        given = values[: len(row)]
        if params is not None:
            tree: dict[str, Any] = {}
            for path, value in zip(leaves, values[len(row) :], strict=True):
                at = tree
                for key in path[:-1]:
                    at = at.setdefault(key, {})
                at[path[-1]] = value
            given = (tree, *given)
        return _in_order(function(*given, **drawn), made)

    cells: list[Any] = []  # the kinds of the block's ports, which are there when the first shapes are
    block = Wrapped(
        run,
        functools.partial(
            _follow, functools.partial(_with_key, run) if uses_key else run, [*row, *names], made, cells
        ),
        [*row, *names],
        made,
        dict(kinds or {}),
        "jax",
        uses_key=uses_key,
        name=name,
    )
    cells.extend(block.wires[key] for key in (*block._inputs, *block._outputs))
    if params is None:
        return block
    model = Model(name=name or getattr(function, "__name__", None) if _is_name(function) else name)
    block.name = None
    for path, key in zip(leaves, names, strict=True):
        value = np.asarray(leaves[path])
        model.add_parameter(key, value.shape, Given(value))
    model.add(block, "function", **{k: k for k in (*row, *names, *made)})
    model.expose(*made)
    return model


def _with_key(run: Any, *values: Any) -> Any:
    import jax

    return run(*values, key=jax.random.key(0))


def _is_name(function: Any) -> bool:
    return str(getattr(function, "__name__", "")).isidentifier()


def _signature(function: Any, skip: int, uses_key: bool) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise WiringError(
            f"the signature of {function!r} is not known: name its arguments with inputs="
        ) from None
    row = []
    for p in parameters:
        if uses_key and p.name == "key":
            continue
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            if p.kind == p.VAR_POSITIONAL:
                raise WiringError(f"{p} takes any number of arguments: name them with inputs=")
            continue
        if p.default is p.empty:
            if p.kind == p.KEYWORD_ONLY:
                raise WiringError(f"{p.name} is for keywords only: bind it first, with functools.partial")
            row.append(p.name)
    return row[skip:]


def _leaves(params: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise WiringError(
            f"params is {type(params).__name__}, expected a dict of arrays, which may be nested"
        )
    found: dict[tuple[str, ...], Any] = {}
    for key, value in params.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise WiringError(f"params: {key!r} is not a name for a parameter")
        if isinstance(value, Mapping):
            found |= _leaves(value, (*path, key))
            continue
        try:
            data = np.asarray(value)
        except (TypeError, ValueError):
            place = ".".join((*path, key))
            raise WiringError(
                f"params[{place!r}] is {type(value).__name__}, which is not an array: give dicts of arrays"
            ) from None
        if data.dtype.kind != "f" and "float" not in data.dtype.name:
            place = ".".join((*path, key))
            raise WiringError(
                f"params[{place!r}] is {data.dtype}, expected a float array; bind others to the function"
            )
        found[*path, key] = value
    return found


def _kind(dtype: Any) -> str | None:
    import jax.numpy as jnp

    groups = {"float": jnp.floating, "int": jnp.integer, "bool": jnp.bool_}
    return next((kind for kind, group in groups.items() if jnp.issubdtype(dtype, group)), None)


def _in_order(result: Any, names: list[str]) -> Any:
    """What the function returned, as generated code takes it apart.

    Raises:
        ShapeError: it is not what ``outputs`` says.
    """
    if isinstance(result, Mapping):
        if set(result) != set(names):
            raise ShapeError(
                f"the function returns {sorted(map(str, result))}, and outputs={names} says otherwise"
            )
        row = tuple(result[name] for name in names)
    else:
        row = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(row) != len(names):
        raise ShapeError(f"the function returns {len(row)} values, and outputs={names} names {len(names)}")
    for name, value in zip(names, row, strict=True):
        if not hasattr(value, "shape"):
            raise ShapeError(f"the function returns {type(value).__name__} as {name!r}, expected an array")
    return row[0] if len(row) == 1 else row


def _follow(run: Any, inputs: list[str], outputs: list[str], wires: list[Any], *shapes: Shape) -> bool:
    """The rule of shapes: outputs from inputs, as far as these are known."""
    given, results = shapes[: len(inputs)], shapes[len(inputs) :]
    rows = [shape.dims() for shape in given]
    if any(dims is None for dims in rows) or not wires:
        return False
    import jax

    known: dict[int, Dim] = {}
    for dims in rows:
        for dim in dims or ():
            root = dim.find()
            if root.size is None:
                known.setdefault(id(root), root)
    symbols: dict[str, Dim] = {f"n{i}": dim for i, dim in enumerate(known.values())}
    sizes = dict(zip(known, jax.export.symbolic_shape(", ".join(symbols)) if symbols else (), strict=True))
    structs = []
    for wire, dims in zip(wires, rows, strict=False):
        shape = tuple(
            root.size if (root := dim.find()).size is not None else sizes[id(root)] for dim in dims or ()
        )
        dtype = _DTYPES.get(wire.find().kind.find().value or "", "float32")
        structs.append(jax.ShapeDtypeStruct(shape, dtype))
    try:
        found = jax.eval_shape(run, *structs)
    except ShapeError:
        raise
    except Exception as error:
        if symbols:
            return False  # it may ask what only a size can answer
        text = ", ".join(f"{k} {s.shape}" for k, s in zip(inputs, structs, strict=True))
        raise ShapeError(f"the function refuses {text}: {type(error).__name__}: {str(error)[:600]}") from None
    row = found if isinstance(found, tuple) else (found,)
    done = True
    for name, value, wire, result in zip(outputs, row, wires[len(inputs) :], results, strict=True):
        letter = _kind(value.dtype)
        if letter is None:
            raise KindError(
                f"the function returns {value.dtype} as {name!r}, which models do not support: return its parts"
            )
        said = wire.find().kind.find().value
        if said is not None and letter != said:
            raise KindError(
                f"the function returns {value.dtype} as {name!r}, which is {said} in the model: say so with "
                f"kinds={{{name!r}: {letter!r}}}"
            )
        dims = []
        for size in value.shape:
            if isinstance(size, int):
                dims.append(Dim(size))
            elif str(size) in symbols:
                dims.append(symbols[str(size)])
            else:
                dims.append(Dim())  # an expression of open sizes: known when they are
                done = False
        unify(result, Shape(dims))
    return done and not symbols
