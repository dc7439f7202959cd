"""A short depthwise causal convolution along a sequence, with the state that decoding needs.

The kernel is only a few taps wide, so it is implemented as shifted multiply-adds, one per tap: XLA fuses them into
one pass over the data on every platform, while general convolutions are designed for wide kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.registry import Implementation, Op, public

__all__ = ["causal_conv1d"]


@dataclass(frozen=True)
class CausalConvProblem:
    batch: int
    length: int
    channels: int
    taps: int
    dtype: str
    implementation: str


def _prepare(
    x: Any, weight: Any, bias: Any = None, *, state: Any = None, implementation: str = "auto"
) -> tuple[CausalConvProblem, tuple[Any, ...]]:
    named = {"x": (x, 3), "weight": (weight, 2)}
    if bias is not None:
        named["bias"] = (bias, 1)
    if state is not None:
        named["state"] = (state, 3)
    for name, (array, rank) in named.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"causal_conv1d: {name} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OpTypeError(f"causal_conv1d: {name} must be floating point, got {array.dtype}")
        if len(array.shape) != rank:
            raise OpShapeError(
                f"causal_conv1d: {name} must have {rank} axes, got shape {tuple(array.shape)}. Expected "
                "x [batch, length, channels], weight [taps, channels], bias [channels], "
                "state [batch, taps - 1, channels]."
            )
    batch, length, channels = x.shape
    taps = weight.shape[0]
    if taps == 0:
        raise OpShapeError("causal_conv1d: weight must have at least one tap, got shape (0, …)")
    expected = {"weight": (taps, channels), "bias": (channels,), "state": (batch, taps - 1, channels)}
    for name, shape in expected.items():
        if name in named and tuple(named[name][0].shape) != shape:
            raise OpShapeError(
                f"causal_conv1d: {name} must have shape {shape} to go with x {tuple(x.shape)} and weight "
                f"{tuple(weight.shape)}, got {tuple(named[name][0].shape)}"
            )
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if state is None:
        state = jnp.zeros((batch, taps - 1, channels), dtype)
    problem = CausalConvProblem(batch, length, channels, taps, str(dtype), implementation)
    return problem, (x, weight, bias, state)


def _padded(problem: CausalConvProblem, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    padded = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    return padded, padded[:, problem.length :]


def _xla(
    problem: CausalConvProblem, x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded, new_state = _padded(problem, x, state)
    y = sum(
        padded[:, tap : tap + problem.length].astype(wide) * weight[tap].astype(wide)
        for tap in range(problem.taps)
    )
    y = jnp.asarray(y) if bias is None else y + bias.astype(wide)
    return y.astype(x.dtype), new_state


def _reference(
    problem: CausalConvProblem, x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded, new_state = _padded(problem, x, state)
    y = lax.conv_general_dilated(
        padded.astype(wide),
        weight.astype(wide)[:, None, :],
        window_strides=(1,),
        padding="VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=problem.channels,
        precision=lax.Precision.HIGHEST,
    )
    y = y if bias is None else y + bias.astype(wide)
    return y.astype(x.dtype), new_state


OP = Op(
    "causal_conv1d",
    _prepare,
    [Implementation("xla", {"forward": _xla}), Implementation("reference", {"forward": _reference})],
)


@public(OP)
@over_explicit_axes("x", "weight", "bias", "state", out=lambda x, *_: [x, (*x[:1], None, *x[2:])])
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    state: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution: each channel is filtered by its own taps over the past.

    ``y[:, t] = bias + sum over i of weight[i] * past[:, t + i]`` with ``past = concatenate([state, x], axis=1)``:
    the last tap applies to the current position. In plain JAX it is ``lax.conv_general_dilated`` with
    ``feature_group_count=channels`` over ``past``.

    Args:
      x: ``[batch, length, channels]``.
      weight: ``[taps, channels]``.
      bias: ``[channels]`` or ``None``.
      state: ``[batch, taps - 1, channels]``, the inputs before ``x``; zeros when ``None``.
      implementation: ``"auto"``, ``"xla"`` (shifted multiply-adds) or ``"reference"`` (XLA's convolution).

    Returns:
      ``y [batch, length, channels]`` in the dtype of ``x`` (sums in float32 or wider), and the new state: the last
      ``taps - 1`` inputs, to be passed with the next positions.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, arrays = _prepare(x, weight, bias, state=state, implementation=implementation)
    if 0 in (problem.batch, problem.length, problem.channels):
        return jnp.zeros(x.shape, x.dtype), arrays[3].astype(x.dtype)
    return OP.run("forward", problem, *arrays)
