"""Derivatives of the operations in NumPy: what generated backward passes call as ``grads.<op>``.

``grads.<op>(cotangents, outputs, *inputs, wanted=…, **attributes)`` returns the cotangents of the inputs (of those
at the places in ``wanted`` only, where given): arrays, or None where nothing flows. With several outputs the first
two arguments are tuples. A cotangent None counts as zero.

The operations that most of the time goes to have their rule written out here. Every other one is run again on
arrays that are traced (:mod:`.tape`), and its rule follows from those of the array functions it is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose.backends import numpy_ops, philox
from capibara.compose.backends.portable.creation import at, stacked
from capibara.compose.backends.tape import pull, trace
from capibara.compose.errors import InputError

__all__ = ["given", "of_parameter", "registered", "repeat", "total"]

Array = Any


def given(cotangents: dict[str, Any], name: str, output: Array) -> Array | None:
    """The cotangent of an output as it was handed in, in the output's dtype; None if it was left out.

    Raises:
        InputError: its shape is not that of the output.
    """
    value = cotangents.get(name)
    if value is None:
        return None
    array = value if type(value) is np.ndarray else np.asarray(value)
    if array.shape != output.shape:
        raise InputError(
            f"output_gradients[{name!r}] has shape {array.shape}, expected {output.shape}, the shape of that output"
        )
    return array.astype(output.dtype)


def total(*parts: Array | None) -> Array | None:
    """The sum of what flows back from several readers of a value."""
    there = [p for p in parts if p is not None]
    if not there:
        return None
    out = there[0]
    for part in there[1:]:
        out = out + part
    return out


def of_parameter(param: Array, *parts: Array | None) -> Array:
    """The gradient of a parameter, in its shape and dtype: zeros if nothing flows to it."""
    out = parts[0] if len(parts) == 1 else total(*parts)
    if type(out) is np.ndarray:
        return out.astype(param.dtype)  # a copy: one array may flow to several parameters
    return np.zeros_like(param) if out is None else np.asarray(out).astype(param.dtype)


def _traced(
    function: Callable[..., Any],
    cotangents: Any,
    inputs: tuple[Any, ...],
    wanted: tuple[int, ...],
    attributes: dict[str, Any],
) -> tuple[Any, ...]:
    arrays = [trace(x) if i in wanted else x for i, x in enumerate(inputs)]
    out = function(*arrays, **attributes)
    rows = out if isinstance(out, tuple) else (out,)
    given = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    return tuple(pull(rows, given, [arrays[i] for i in wanted]))


def _nothing(cotangents: Any) -> bool:
    return all(c is None for c in cotangents) if isinstance(cotangents, tuple) else cotangents is None


def _fit(g: Array, like: Any) -> Array:
    from capibara.compose.backends.numpy_space import _fit

    return _fit(g, like)


def _rows(x: Array) -> Array:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _dense(g: Array, out: Array, x: Array, w: Array, accumulate: str) -> tuple[Any, Any]:
    def by_input() -> Array:
        return (g @ w.T).astype(x.dtype, copy=False)

    def by_weight() -> Array:
        return (_rows(x).T @ _rows(g)).astype(w.dtype, copy=False)

    return by_input, by_weight


RULES: dict[str, Callable[..., tuple[Callable[[], Array], ...]]] = {
    "dense": _dense,
    "add": lambda g, out, a, b: (lambda: _fit(g, a), lambda: _fit(g, b)),
    "subtract": lambda g, out, a, b: (lambda: _fit(g, a), lambda: _fit(-g, b)),
    "multiply": lambda g, out, a, b: (lambda: _fit(g * b, a), lambda: _fit(g * a, b)),
    "relu": lambda g, out, x: (lambda: g * (x > 0),),
    "tanh": lambda g, out, x: (lambda: g * (1 - out * out),),
    "sigmoid": lambda g, out, x: (lambda: g * out * (1 - out),),
    "exp": lambda g, out, x: (lambda: g * out,),
    "square": lambda g, out, x: (lambda: g * 2 * x,),
    "buffer": lambda g, out, x: (lambda: g,),
    "negate": lambda g, out, x: (lambda: -g,),
    "reshape": lambda g, out, x, shape: (lambda: g.reshape(x.shape),),
    "softmax": lambda g, out, x, axis=-1: (lambda: out * (g - np.sum(g * out, axis=axis, keepdims=True)),),
}


def _gradient(op: str) -> Callable[..., tuple[Any, ...]]:
    rule, function = RULES.get(op), getattr(numpy_ops, op)

    def run(
        cotangents: Any, outputs: Any, *inputs: Any, wanted: tuple[int, ...] | None = None, **attributes: Any
    ) -> tuple[Any, ...]:
        if rule is not None and cotangents is not None:  # of one output
            makers = rule(cotangents, outputs, *inputs, **attributes)
            return tuple([make() for make in makers] if wanted is None else [makers[i]() for i in wanted])
        places = tuple(range(len(inputs))) if wanted is None else wanted
        if _nothing(cotangents):
            return (None,) * len(places)
        return _traced(function, cotangents, inputs, places, attributes)

    run.__name__ = run.__qualname__ = op
    run.__doc__ = f"The cotangents of the inputs of ``{op}``."
    return run


def __getattr__(op: str) -> Any:
    if op.startswith("_") or op not in numpy_ops.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {op!r}")
    function = globals()[op] = _gradient(op)
    return function


def registered(
    function: Callable[..., Any],
    cotangents: Any,
    outputs: Any,
    *inputs: Any,
    wanted: tuple[int, ...] | None = None,
    **attributes: Any,
) -> tuple[Any, ...]:
    """The same for an operation of the user's own: by its ``vjp``, or else traced.

    Raises:
        InputError: the function has no ``vjp`` and calls NumPy by itself, so that it cannot be traced.
    """
    places = tuple(range(len(inputs))) if wanted is None else wanted
    if _nothing(cotangents):
        return (None,) * len(places)
    rule = getattr(function, "vjp", None)
    if rule is not None:
        row = rule(cotangents, outputs, *inputs, **attributes)
        row = row if isinstance(row, tuple | list) else (row,)
        return tuple(row[i] for i in places)
    try:
        return _traced(getattr(function, "function", function), cotangents, inputs, places, attributes)
    except TypeError as error:
        raise InputError(
            f"the registered operation {getattr(function, 'name', function)!r} cannot be differentiated ({error}): "
            "write it with the backend's methods, or register it with vjp="
        ) from None


def repeat(
    body: Callable[..., Any],
    body_gradients: Callable[..., Any],
    d_carry: Any,
    d_extra: Any,
    params: Any,
    carry: Any,
    shared: Any,
    state: Any,
    key: Any,
    train: bool,
    *,
    count: int,
) -> tuple[Any, Any, Any]:
    """The backward pass of ``ops.repeat``: the carries are computed again, then the repetitions run backwards.

    Returns:
        The cotangents of the (stacked) parameters, the first carry, and the shared inputs.
    """
    keys = [None] * count if key is None else philox.split(key, count)
    carries = [carry]
    for i in range(count - 1):
        carries.append(body(at(params, i), carries[-1], shared, at(state, i), keys[i], train)[0])
    d_params: list[Any] = [None] * count
    d_shared: tuple[Any, ...] = (None,) * len(shared)
    for i in reversed(range(count)):
        extra = tuple(None if d is None else d[i] for d in d_extra)
        d_params[i], d_carry, d_own = body_gradients(
            at(params, i), carries[i], shared, at(state, i), keys[i], train, d_carry, extra
        )
        d_shared = tuple(total(a, b) for a, b in zip(d_shared, d_own, strict=True))
    return stacked(d_params), d_carry, d_shared
