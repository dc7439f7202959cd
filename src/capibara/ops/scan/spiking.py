"""Leaky integrate-and-fire neurons along a sequence, with surrogate gradients.

A neuron's potential decays and accumulates its input; when it reaches the threshold, the neuron fires and is reset.
Firing is a step function, whose derivative is zero almost everywhere; gradients use a smooth surrogate. The reset
makes the recurrence nonlinear, so it runs step by step, in segments that are recomputed for gradients.
"""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import join_dims, over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.scan.parallel import parallel_scan

__all__ = ["lif"]

SURROGATES = ("fast_sigmoid", "sigmoid", "arctan")
RESETS = ("subtract", "zero")


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _fire(excess: jax.Array, surrogate: str, slope: float) -> jax.Array:
    return (excess >= 0).astype(excess.dtype)


@_fire.defjvp
def _fire_jvp(surrogate: str, slope: float, primals: Any, tangents: Any) -> Any:
    (excess,), (tangent,) = primals, tangents
    scaled = slope * excess
    if surrogate == "fast_sigmoid":
        rate = slope / (1 + jnp.abs(scaled)) ** 2
    elif surrogate == "sigmoid":
        rate = slope * jax.nn.sigmoid(scaled) * jax.nn.sigmoid(-scaled)
    else:
        rate = slope / (1 + (jnp.pi * scaled) ** 2)
    return _fire(excess, surrogate, slope), rate * tangent


@over_explicit_axes(
    "inputs",
    "decay",
    "threshold",
    "initial_potential",
    out=lambda inputs, *steps: [join_dims(inputs, *steps), join_dims(inputs, *steps)[1:]],
)
def lif(
    inputs: jax.Array,
    *,
    decay: float | jax.Array = 0.9,
    threshold: float | jax.Array = 1.0,
    reset: str = "subtract",
    surrogate: str = "fast_sigmoid",
    slope: float = 25.0,
    initial_potential: jax.Array | None = None,
    num_segments: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Leaky integrate-and-fire: ``v = decay · v + inputs[t]``; ``spikes[t] = v ≥ threshold``; then the reset of ``v``.

    Equivalent JAX: a ``lax.scan`` of that step. The gradient of a spike with respect to the potential's excess ``u``
    over the threshold is that of the surrogate: ``slope / (1 + |slope u|)²`` (fast sigmoid), ``slope σ'(slope u)``
    (sigmoid) or ``slope / (1 + (π slope u)²)`` (arctan). It flows through the reset too.

    Args:
      inputs: ``[steps, …]``, floating point: the currents.
      decay: the fraction of the potential kept after a step, between 0 and 1; a scalar, or an array that broadcasts
        to a step.
      threshold: as ``decay``.
      reset: ``"subtract"`` the threshold, or set to ``"zero"``.
      surrogate: ``"fast_sigmoid"``, ``"sigmoid"`` or ``"arctan"``.
      slope: of the surrogate, above 0.
      initial_potential: the shape of one step; zeros if ``None``.
      num_segments: as for :func:`parallel_scan`.

    Returns:
      the spikes (0 or 1, in the shape and dtype of ``inputs``), and the last potential.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Neftci, Mostafa & Zenke 2019, "Surrogate Gradient Learning in Spiking Neural Networks" (arXiv:1901.09948).
    """
    if not hasattr(inputs, "shape") or not jnp.issubdtype(inputs.dtype, jnp.floating):
        kind = getattr(inputs, "dtype", type(inputs).__name__)
        raise OpTypeError(f"lif: inputs must be an array of floating point, got {kind}")
    if len(inputs.shape) == 0:
        raise OpShapeError("lif: inputs must have an axis of steps, got a number")
    for name, value, options in (("reset", reset, RESETS), ("surrogate", surrogate, SURROGATES)):
        if value not in options:
            hint = did_you_mean(value, options) if isinstance(value, str) else ""
            raise OpValueError(f"lif: {name} must be one of {', '.join(options)}; got {value!r}.{hint}")
    if isinstance(slope, bool) or not isinstance(slope, numbers.Real):
        raise OpTypeError(f"lif: slope must be a number, got {slope!r}")
    if not 0 < slope < math.inf:
        raise OpValueError(f"lif: slope must be finite and above 0, got {slope}")
    for name, value in (("decay", decay), ("threshold", threshold)):
        if isinstance(value, bool) or not (isinstance(value, numbers.Real) or hasattr(value, "dtype")):
            raise OpTypeError(f"lif: {name} must be a number or an array, got {value!r}")
    if isinstance(decay, numbers.Real) and not 0 <= decay <= 1:
        raise OpValueError(f"lif: decay must lie in [0, 1], got {decay}")
    if isinstance(threshold, numbers.Real) and math.isnan(threshold):
        raise OpValueError("lif: threshold must be a number that a potential can reach, got nan")
    inputs = jnp.asarray(inputs)
    dtype, shape = inputs.dtype, inputs.shape[1:]
    sized: dict[str, jax.Array] = {}
    for name, value in (("decay", decay), ("threshold", threshold)):
        array = jnp.asarray(value, dtype)
        try:
            sized[name] = jnp.broadcast_to(array, shape)
        except ValueError:
            raise OpShapeError(
                f"lif: {name} must broadcast to a step {shape} of inputs, got shape {array.shape}"
            ) from None
    first = jnp.zeros(shape, dtype) if initial_potential is None else jnp.asarray(initial_potential)
    if first.shape != shape or first.dtype != dtype:
        raise OpShapeError(
            f"lif: initial_potential must be {dtype} of shape {shape} to go with inputs {inputs.shape}, got "
            f"{first.dtype} of shape {first.shape}"
        )
    if inputs.size:
        first = alike(first, inputs, first, sized["decay"], sized["threshold"])

    def step(v: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = sized["decay"] * v + current
        spike = _fire(v - sized["threshold"], surrogate, float(slope))
        v = v - spike * sized["threshold"] if reset == "subtract" else v * (1 - spike)
        return v, spike

    last, spikes = parallel_scan(step, first, inputs, num_segments=num_segments)
    return spikes, last
