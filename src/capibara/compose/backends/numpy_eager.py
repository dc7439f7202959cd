"""Functions of NumPy for a backend's methods, and transformations of functions by tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose.backends import numpy_space
from capibara.compose.backends.portable.creation import Maker
from capibara.compose.backends.portable.eager import *  # noqa: F403
from capibara.compose.backends.tape import pull, trace, value_of
from capibara.compose.errors import InputError

_maker = Maker(numpy_space)
draw_normal, draw_uniform, draw_integers = _maker.draw_normal, _maker.draw_uniform, _maker.draw_integers
linspace = _maker.linspace


def transform_jit(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fn


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in _leaves(v)]
    if isinstance(tree, tuple | list):
        return [leaf for v in tree for leaf in _leaves(v)]
    return [tree]


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _map(fn, v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map(fn, v) for v in tree)
    return fn(tree)


def _filled(tree: Any, rows: list[Any]) -> Any:
    left = iter(rows)
    return _map(lambda _: next(left), tree)


def _trace_outer(x: Any) -> Any:
    # A traced array inside a traced function (grad of grad) would lose its own history.
    if hasattr(x, "sources"):
        raise InputError(
            "NumPy's gradients cannot be nested: use JaxBackend or TorchBackend for second derivatives"
        )
    return trace(np.asarray(x))


def transform_vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]:
    traced = [_map(_trace_outer, p) for p in primals]
    out = fn(*traced)
    outputs, aux = out if has_aux else (out, None)
    rows = _leaves(outputs)

    def back(cotangents: Any) -> tuple[Any, ...]:
        flat = [leaf for t in traced for leaf in _leaves(t)]
        found = pull(rows, _leaves(cotangents), flat)
        full = [np.zeros_like(value_of(x)) if g is None else g for x, g in zip(flat, found, strict=True)]
        return tuple(_filled(list(primals), full))

    plain = _map(value_of, outputs)
    return (plain, back, _map(value_of, aux)) if has_aux else (plain, back)


def transform_value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Any, *rest: Any) -> Any:
        value, back = transform_vjp(lambda x: fn(x, *rest), first, has_aux=False)
        if np.shape(value) != ():
            raise InputError(
                f"grad: the function must return a scalar, not an array of shape {np.shape(value)}"
            )
        return value, back(np.ones((), np.asarray(value).dtype))[0]

    return run


def transform_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    both = transform_value_and_grad(fn)
    return lambda *args: both(*args)[1]


def transform_jacrev(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Any, *rest: Any) -> Any:
        value, back = transform_vjp(lambda x: fn(x, *rest), first, has_aux=False)
        value = np.asarray(value)
        rows = [back(row.reshape(value.shape))[0] for row in np.eye(value.size, dtype=value.dtype)]
        shape = value.shape
        stacked = [np.stack(leaves) for leaves in zip(*(_leaves(r) for r in rows), strict=True)]
        return _filled(first, [s.reshape(shape + s.shape[1:]) for s in stacked])

    return run


transform_jacfwd = transform_jacrev
