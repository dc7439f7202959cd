"""Models written as Python functions of their connections."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.connections import Connection, IOKey, Placement, Port
from capibara.compose.logical.expressions import gather
from capibara.compose.logical.model import Model
from capibara.errors import did_you_mean

__all__ = ["functional"]


def functional(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Turn a function of connections into a model; also a decorator::

        @functional
        def scores(x, table):
            return Linear(8)(x) @ table.T

        model |= scores(x="input", table="table", output="scores")

    The function's positional parameters are the model's inputs (defaults are their values); its results are the
    outputs: a connection is ``output``, a tuple or list ``output_0``, ``output_1`` …, a dict has names. The function
    runs once, immediately; a model can be part of only one other model, so call ``functional(function)`` again for
    each copy.

    Args:
        function: the function.
        settings: values of its keyword-only parameters, which are not connections: ``functional(mlp, width=8)``.

    Returns:
        The :class:`Model`, or a decorator if only settings are given.

    Raises:
        WiringError: the function's parameters or results are not valid for a model, or there is no such setting.
    """
    if function is None:
        return lambda function: functional(function, **settings)
    if not callable(function):
        raise WiringError(f"functional: {function!r} is not a function")
    name = getattr(function, "__name__", type(function).__name__)
    keys: dict[str, IOKey] = {}
    left = dict(settings)
    given: dict[str, Any] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise WiringError(f"functional: {name} takes *{key}: a model's inputs have names, each its own")
        if parameter.kind is parameter.KEYWORD_ONLY:
            if key in left:
                given[key] = left.pop(key)
            elif parameter.default is parameter.empty:
                raise WiringError(f"functional: {name} needs the setting {key}=")
        elif parameter.default is parameter.empty:
            keys[key] = IOKey(key)
        else:
            keys[key] = IOKey(key, value=parameter.default)
    if left:
        known, other = [*given], next(iter(left))
        raise WiringError(
            f"functional: {name} has no keyword-only parameter {other!r}.{did_you_mean(other, known)}"
        )
    model = Model()
    for place in keys.values():  # in the function's order, those too that it does not use
        model._resolve(place)
    results = function(*keys.values(), **given)
    model = gather(model, _outputs(results, name))
    vars(model)["title"] = name  # what title_of() reads
    return model


def _outputs(results: Any, name: str) -> dict[str, Any]:
    if isinstance(results, Mapping):
        for key in results:
            if not isinstance(key, str):
                raise WiringError(
                    f"functional: {name} returns a dict with the key {key!r}, which is not a name"
                )
        return dict(results)
    if isinstance(results, tuple | list):
        return {f"output_{i}": value for i, value in enumerate(results)}
    if isinstance(results, Connection | IOKey | Port | Placement):
        return {"output": results}
    raise WiringError(
        f"functional: {name} returns {results!r} ({type(results).__name__}): return a connection, a tuple or a "
        "dict of them"
    )
