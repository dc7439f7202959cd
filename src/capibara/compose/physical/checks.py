"""What is handed to a compiled model is checked against what it needs, before anything runs.

Only shapes, kinds and names are looked at, so the checks work while tracing, and cost nothing in compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from capibara.compose.dtypes import DTYPES
from capibara.compose.errors import InputError
from capibara.compose.physical.specs import ArraySpec, nest, shape_text
from capibara.errors import did_you_mean

__all__ = ["as_dicts", "check_call", "check_float64", "check_unknown", "checked_cotangents", "cotangent"]

Path = tuple[str, ...]
_DISCRETE = {"int32": "int", "bool": "bool"}
_REMEDY = {
    "params": "pass parameters as from compiled.init(key)",
    "state": "pass state as from compiled.init_state(…), or as it came back",
}


def check_call(
    inputs: Any,
    params: Any,
    state: Any | None,
    input_specs: Mapping[str, ArraySpec],
    param_specs: Mapping[Path, ArraySpec],
    state_specs: Mapping[Path, ArraySpec],
    *,
    left_out: Iterable[Path] = (),
    shapes: bool = True,
    library: str = "jax",
) -> None:
    """Check the arguments of one call of a compiled model; without ``shapes`` only names and kinds.

    Args:
        inputs, params, state: as handed in; the specs say what the model has.
        left_out: parameters that the logical model has and this one does not need; they may be there.
        shapes: compare shapes, too. library: whose arrays the model computes with: "jax", "torch" or "numpy".

    Raises:
        InputError: for missing or unknown inputs, parameters or states, wrong shapes, and integers where floats are
            needed or the other way round.
    """
    _check_keys(inputs, input_specs)
    if state is None and state_specs:
        raise InputError(
            f"the model has state ({', '.join('.'.join(p) for p in list(state_specs)[:3])}): pass "
            "state=compiled.init_state(…) and keep the state that comes back"
        )
    if not isinstance(state, Mapping | None):
        raise InputError(f"state is {type(state).__name__}, not a dict; {_REMEDY['state']}")
    sizes: dict[str, tuple[int, str]] = {}
    for key, spec in input_specs.items():
        if getattr(inputs[key], "shape", None) is None:
            raise InputError(
                f"inputs[{key!r}] is {type(inputs[key]).__name__}, not an array: make it one, as with numpy.asarray"
            )
        if shapes:
            _check_shape(f"inputs[{key!r}]", inputs[key], spec, sizes)
        _check_kind(f"inputs[{key!r}]", inputs[key], spec, library)
    for what, tree, specs in (("params", params, param_specs), ("state", state, state_specs)):
        for path, spec in specs.items():
            leaf = _leaf(what, tree, path)
            place = what + "".join(f"[{k!r}]" for k in path)
            if shapes and hasattr(leaf, "shape"):
                _check_shape(place, leaf, spec, sizes)
            if not hasattr(leaf, "dtype"):
                if spec.shape == () and isinstance(leaf, int | float):
                    continue
                raise InputError(f"{place} is {type(leaf).__name__}, not an array; {_REMEDY[what]}")
            _check_kind(place, leaf, spec, library)
    for what, tree, paths in (("params", params, (*param_specs, *left_out)), ("state", state, state_specs)):
        if tree:
            check_unknown(what, tree, nest(dict.fromkeys(paths)))


def check_unknown(what: str, tree: Any, known: Mapping[str, Any], place: str | None = None) -> None:
    """Refuse what the model would not look at: a misspelt name, or the arrays of another model.

    Args:
        what: "params" or "state". tree: what was given. known: nested dict of None by name. place: of ``tree``.

    Raises:
        InputError: there is something in ``tree`` that is not in ``known``.
    """
    place = place or what
    if not isinstance(tree, Mapping):
        given = "an array" if hasattr(tree, "dtype") else type(tree).__name__
        raise InputError(f"{what} is {given}, not a dict; {_REMEDY[what]}")
    for key, value in tree.items():
        if key not in known:
            there = list(known)
            raise InputError(
                f"{place} has {key!r}, which the model does not: it has {there[:12] or 'none'} there."
                f"{did_you_mean(str(key), there)} Leave it out, or {_REMEDY[what]}"
            )
        if known[key] is not None:
            check_unknown(what, value, known[key], f"{place}[{key!r}]")


def as_dicts(tree: Any) -> Any:
    """Nested mappings that JAX knows nothing of, such as ``types.MappingProxyType``, as dicts; all else as it is."""
    if not isinstance(tree, Mapping):
        return tree
    if type(tree) is not dict:
        import jax

        if not jax.tree_util.all_leaves([tree]):  # registered, as flax's FrozenDict is: JAX keeps its type
            return tree
    return {key: as_dicts(value) for key, value in tree.items()}


def check_float64(*trees: Any) -> None:
    """Refuse to be traced without float64: the model could enable it for itself, but not for its gradient.

    Raises:
        InputError: some array is traced while JAX's float64 is off.
    """
    import jax
    from jax.core import Tracer

    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees)):
        raise InputError(
            "this model has float64 numbers, and is traced (by jax.jit, jax.grad, jax.vmap …) while JAX's float64 is "
            "off, which would truncate its gradients to float32: call the transformed function within `with "
            "compiled.backend.scope():`, or use evaluate"
        )


def checked_cotangents(given: Any, specs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """The cotangents of a call, without those of integer and bool outputs (``float0``: they hold nothing).

    Raises:
        InputError: for keys that are not outputs, values that are not float arrays, and outputs without a gradient.
    """
    from jax.dtypes import float0

    if not isinstance(given, Mapping):
        raise InputError(
            f"output_gradients must be a dict of arrays by output, as {{{next(iter(specs))!r}: …}}, not "
            f"{type(given).__name__}"
        )
    kept: dict[str, Any] = {}
    for name, value in given.items():
        place = f"output_gradients[{name!r}]"
        if name not in specs:
            raise InputError(
                f"output_gradients names {name!r}, which is not an output; the outputs are {list(specs)}."
                f"{did_you_mean(str(name), specs)}"
            )
        if str(getattr(value, "dtype", "")).startswith("torch."):
            raise InputError(
                f"{place} is a PyTorch tensor, and this model computes with jax: pass a JAX or NumPy array"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        weak: Any = value if getattr(value, "weak_type", False) else None
        if weak is not None and weak.shape == () and weak.dtype.kind != "b":
            number = True  # what a Python number is in a trace
        dtype = getattr(value, "dtype", None)
        if not number and (dtype is None or getattr(value, "shape", None) is None):
            raise InputError(f"{place} is {type(value).__name__}, not an array of the shape of that output")
        if specs[name].dtype in _DISCRETE:
            if dtype != float0:
                raise _no_gradient(name, specs[name].dtype)
        elif not number and kind_of(value) != "float":
            raise InputError(
                f"{place} has dtype {dtype}, expected {specs[name].dtype} (or another float dtype)"
            )
        else:
            kept[name] = value
    return kept


def cotangent(name: str, output: Any, given: Any | None) -> Any:
    """The cotangent that ``jax.vjp`` takes for an output, from what :func:`checked_cotangents` left of it.

    Raises:
        InputError: its shape is not that of the output.
    """
    import jax.numpy as jnp
    import numpy as np
    from jax.dtypes import float0

    if not jnp.issubdtype(output.dtype, jnp.floating):
        if given is not None:  # an output whose kind was not known before it ran
            raise _no_gradient(name, output.dtype)
        return np.zeros(output.shape, float0)
    if given is None:
        return jnp.zeros_like(output)
    array = jnp.asarray(given)
    if array.shape != output.shape:
        raise InputError(
            f"output_gradients[{name!r}] has shape {array.shape}, expected {output.shape}, the shape of that output"
        )
    return array.astype(output.dtype)


def _no_gradient(name: str, dtype: Any) -> InputError:
    return InputError(
        f"output_gradients[{name!r}]: the output {name!r} is {dtype} and has no gradient; leave it out of "
        "output_gradients"
    )


def _check_keys(inputs: Any, specs: Mapping[str, ArraySpec]) -> None:
    if not isinstance(inputs, Mapping):
        # While JAX traces, an array has a type that the caller has never heard of.
        given = "an array" if hasattr(inputs, "dtype") else type(inputs).__name__
        raise InputError(f"inputs must be a dict of arrays with the keys {list(specs)}, not {given}")
    if inputs.keys() == specs.keys():
        return
    missing = [k for k in specs if k not in inputs]
    unknown = [k for k in inputs if k not in specs]
    hint = did_you_mean(str(unknown[0]), missing) if unknown and missing else ""
    raise InputError(
        f"inputs has the keys {list(inputs)}, the model needs {list(specs)}: "
        + "; ".join(([f"missing {missing}"] if missing else []) + ([f"unknown {unknown}"] if unknown else []))
        + hint
    )


def _leaf(what: str, tree: Any, path: Path) -> Any:
    for i, key in enumerate(path):
        if not isinstance(tree, Mapping) or key not in tree:
            there = list(tree)[:12] if isinstance(tree, Mapping) else type(tree).__name__
            at = what + "".join(f"[{k!r}]" for k in path[:i])
            raise InputError(
                f"{what} has no {'.'.join(path)!r}: {at} holds {there}, {key!r} is missing; {_REMEDY[what]}"
            )
        tree = tree[key]
    if isinstance(tree, Mapping):
        raise InputError(f"{what} has a dict at {'.'.join(path)!r}, expected an array; {_REMEDY[what]}")
    return tree


def _check_shape(place: str, value: Any, spec: ArraySpec, sizes: dict[str, tuple[int, str]]) -> None:
    """Compare a shape; a free size must be the same wherever its name stands (``sizes``: as first seen)."""
    shape = getattr(value, "shape", ())
    if spec.shape is None:
        return
    wrong = f"{place} has shape {tuple(shape)}, expected {shape_text(spec.shape)}"
    if len(shape) != len(spec.shape):
        raise InputError(wrong)
    for size, want in zip(shape, spec.shape, strict=True):
        if isinstance(want, int):
            if size != want:
                raise InputError(wrong)
        elif sizes.setdefault(want, (size, place))[0] != size:
            other, where = sizes[want]
            raise InputError(f"{wrong}: {want!r} is {other} in {where}")


def kind_of(value: Any) -> str:
    """The kind of an array's numbers: float, int or bool; else the name of its dtype."""
    kind = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(getattr(value.dtype, "kind", ""))
    if kind is not None:
        return kind
    name = str(value.dtype)
    if name.startswith("torch."):
        return next((k for k in ("float", "int", "bool") if k in name), name)
    # ml_dtypes (bfloat16, int4 …) are void to NumPy, and so are float0 and structured dtypes.
    import jax.numpy as jnp

    try:
        for name, group in (("float", jnp.floating), ("int", jnp.integer)):
            if jnp.issubdtype(value.dtype, group):
                return name
    except TypeError:  # another library's dtype
        pass
    return str(value.dtype)


def _check_kind(place: str, value: Any, spec: ArraySpec, library: str) -> None:
    if library != "torch" and str(value.dtype).startswith("torch."):
        raise InputError(
            f"{place} is a PyTorch tensor, and this model computes with {library}: pass {place}.detach().numpy(), or "
            "compile for TorchBackend()"
        )
    kind = kind_of(value)
    known = DTYPES.get(spec.dtype)
    want = "float" if known is None else known.kind
    if kind != want:
        raise InputError(f"{place} has dtype {value.dtype}, expected {spec.dtype} (or another {want} dtype)")
