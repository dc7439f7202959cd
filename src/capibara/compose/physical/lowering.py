"""What a compiled model becomes on a platform or mesh, without arrays and without running: ``jax.jit(…).lower``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import CompileError, InputError
from capibara.compose.physical.explicit import automatic_mesh
from capibara.compose.physical.running import whole
from capibara.compose.physical.specs import ArraySpec, nest
from capibara.compose.physical.starting import check_sizes
from capibara.errors import did_you_mean

if TYPE_CHECKING:
    from capibara.compose.physical.compiled import CompiledModel

__all__ = ["lower"]


def lower(
    compiled: CompiledModel,
    inputs: Mapping[str, Any] | None,
    gradients: bool,
    train: bool,
    sizes: dict[str, int],
) -> Any:
    """See :meth:`CompiledModel.lower`."""
    import jax

    backend = compiled.backend
    if not compiled._in_jax:
        raise CompileError(f"lower: {backend!r} has nothing to lower to; compile the model on a JaxBackend")
    compiled._check_inference({} if gradients else None, train)
    given = dict(inputs or {})
    for key in given:
        if key not in compiled.inputs:
            raise InputError(
                f"inputs names {key!r}, which is not an input; the inputs are {compiled.input_keys}."
                f"{did_you_mean(str(key), compiled.inputs)}"
            )
    everything = {("inputs", k): s for k, s in compiled.inputs.items()} | {
        **compiled.params,
        **compiled.states,
    }
    check_sizes(everything, sizes, "model")
    mesh = automatic_mesh(backend.mesh)

    def abstract(spec: ArraySpec, place: str, kind: Any) -> Any:
        if spec.shape is None:
            raise CompileError(f"{place} has no known shape: give inputs a jax.ShapeDtypeStruct for it")
        shape, sharding = spec.sizes(sizes, place), None
        if mesh is not None:
            names = spec.axes or (None,) * len(shape)
            sharding = jax.sharding.NamedSharding(mesh, backend.rules.spec(names, mesh, shape, kind=kind))
        elif backend.device is not None:
            sharding = jax.sharding.SingleDeviceSharding(backend.device)
        return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)

    def arrays(specs: Mapping[tuple[str, ...], ArraySpec], what: str) -> dict[str, Any]:
        return nest({p: abstract(s, f"the {what} {'.'.join(p)}", "parameters") for p, s in specs.items()})

    with backend.scope():
        params, state = arrays(compiled.params, "parameter"), arrays(compiled.states, "state")
        for key, spec in compiled.inputs.items():
            if key not in given:
                given[key] = abstract(spec, f"the input {key}", "activations")
        key = jax.eval_shape(lambda: jax.random.key(0)) if train else None
        forward = whole(compiled, False, train)
        compiled._check(params, given, state, key)
        cotangents = None
        if gradients:
            outputs = jax.eval_shape(forward, params, given, state, key, None)[0]
            floats = {k: v for k, v in outputs.items() if jax.numpy.issubdtype(v.dtype, jax.numpy.floating)}
            cotangents = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in floats.items()}
        traced = jax.jit(whole(compiled, gradients, train)).trace(params, given, state, key, cotangents)
        if backend.lowers_only:
            return traced.lower(lowering_platforms=(backend.platform,))
        if isinstance(mesh, jax.sharding.AbstractMesh):
            return traced.lower(lowering_platforms=(backend._platform or jax.default_backend(),))
        return traced.lower()
