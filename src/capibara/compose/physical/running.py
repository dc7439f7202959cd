"""The functions of JAX that a compiled model calls: forward, and with gradients of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.compose.physical.checks import checked_cotangents, cotangent
from capibara.compose.physical.explicit import automatic_mesh, refuse_explicit
from capibara.compose.physical.sharding import param_shardings
from capibara.compose.physical.starting import scope_of

if TYPE_CHECKING:
    from capibara.compose.physical.compiled import CompiledModel

__all__ = ["direct", "whole"]


def direct(compiled: CompiledModel) -> tuple[Any, Any]:
    """Jitted functions for calls without state and randomness, or None where those need more around them.

    They check their arguments while they are traced: JAX traces again for every new structure, shape or dtype,
    so that what was seen before is not looked at twice, and a call costs what a call of ``jax.jit`` costs.
    """
    backend = compiled.backend
    # With float64, tracing from outside without it has to be seen before the scope is entered.
    if not compiled._in_jax or not compiled.jit or compiled.states or backend.needs_x64:
        return None, None
    if backend.lowers_only:
        return None, None
    import jax

    def forward(params: Any, inputs: Any) -> Any:
        refuse_explicit(params, inputs)
        compiled._check(params, inputs, None, None)
        return compiled._run(params, inputs, {}, None, False)[0]

    def backward(params: Any, inputs: Any, cotangents: Any) -> Any:
        refuse_explicit(params, inputs, cotangents)
        compiled._check(params, inputs, None, None)
        given = checked_cotangents(cotangents, compiled.outputs)
        outputs, pull = jax.vjp(lambda p: compiled._run(p, inputs, {}, None, False)[0], params)
        gradients = pull({k: cotangent(k, v, given.get(k)) for k, v in outputs.items()})[0]
        return outputs, _as_parameters(compiled, gradients)

    discrete = any(spec.dtype in ("int32", "bool") for spec in compiled.outputs.values())
    functions = [jax.jit(forward), None if compiled.inference or discrete else jax.jit(backward)]
    scope = scope_of(backend)
    if scope is not None:
        functions = [f and _within(scope, f) for f in functions]
    return functions[0], functions[1]


def whole(compiled: CompiledModel, with_gradients: bool, train: bool) -> Any:
    """The function of (parameters, inputs, state, key, cotangents) that :meth:`.CompiledModel.evaluate` calls."""
    import jax

    def run(params: Any, inputs: Any, state: Any, key: Any, cotangents: Any) -> Any:
        if not with_gradients:
            outputs, after = compiled._run(params, inputs, state, key, train)
            return outputs, after, None
        outputs, pull, after = jax.vjp(
            lambda p: compiled._run(p, inputs, state, key, train), params, has_aux=True
        )
        given = {k: cotangent(k, v, cotangents.get(k)) for k, v in outputs.items()}
        return outputs, after, _as_parameters(compiled, pull(given)[0])

    return run


def _as_parameters(compiled: CompiledModel, gradients: Any) -> Any:
    """Gradients laid over the backend's mesh as their parameters are."""
    mesh = automatic_mesh(compiled.backend.mesh)
    if mesh is None:
        return gradients
    import jax

    shardings = param_shardings(gradients, compiled.param_axes, mesh, compiled.backend.rules)
    return jax.lax.with_sharding_constraint(gradients, shardings)


def _within(scope: Any, function: Any) -> Any:
    def run(*args: Any) -> Any:
        with scope():
            return function(*args)

    return run
