"""The public selective scan; reference.py defines it, xla.py makes it fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.ops.explicit import Dims, join_dims, over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.scan import native, reference, specs, xla
from capibara.ops.scan.problem import alike_in_speed, prepare
from capibara.ops.tuning import Tuning

__all__ = ["selective_scan"]

OP = Op(
    "selective_scan",
    prepare,
    [
        Implementation("native", {"forward": native.scan}, ("cpu",), native.check, portable=False),
        Implementation("xla", {"forward": xla.scan}, tunables={"chunk_size": (8, 16, 32, 64, 128, 256, 512)}),
        Implementation("reference", {"forward": reference.scan}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed),
)


def _places(x: Dims, dt: Dims, a: Dims, b: Dims, c: Dims, state: Dims, starts: Dims) -> list[Dims]:
    return [x, join_dims((*x[:1], *x[2:], None), state)]


@public(OP)
@over_explicit_axes("x", "dt", "a", "b", "c", "initial_state", "starts", out=_places)
def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    starts: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """A selective state-space model's recurrence (Mamba-2), computed as matrix products over chunks.

    On CPUs, it and its gradient run as compiled loops over the positions, which need less arithmetic.

    For every batch element and head, with a state ``h [width, states]``::

        h[t] = exp(dt[t] * a) * h[t-1] + dt[t] * outer(x[t], b[t])
        y[t] = h[t] @ c[t]

    ``length == 1`` takes a path of one step, for decoding. Differentiable (forward and reverse mode) in every
    array; works under ``jit`` and ``vmap``. Sums and the state are float32 (float64 for float64 input).
    A NaN or infinity propagates to all later positions of its channel (``x``, the state), head (``dt``, ``a``) or
    group (``b``), where ``"xla"`` may return NaN for an infinity. In ``c`` it affects only its own position. Earlier
    positions are not affected. In the backward pass it propagates from ``y`` to the gradients of its own and all
    earlier positions; with ``"xla"`` also to those of later positions in the same chunk.

    Args:
      x: ``[batch, length, heads, width]``, the input.
      dt: ``[batch, length, heads]``, the step sizes, at least 0. A step of 0 leaves the state unchanged.
      a: ``[heads]``, the decay rates, at most 0. Positive rates let the state grow; they are supported, but can
        overflow.
      b: ``[batch, length, groups, states]``, the input weights of the state; ``groups`` divides ``heads`` and each
        group serves ``heads // groups`` adjacent heads.
      c: ``[batch, length, groups, states]``, the output weights of the state.
      initial_state: ``[batch, heads, width, states]``; zeros when ``None``.
      starts: ``bool [batch, length]``: where several sequences follow one another in a row, where each of them begins.
        The state before such a position is zero (whatever ``initial_state`` is). What is not finite in one sequence
        may make later ones in its row NaN.
      chunk_size: Positions per chunk; ``None``: what ``capibara tune`` has measured here, otherwise 64. It affects
        speed and memory, not the result.
      implementation: ``"auto"``, ``"native"`` (compiled loops on CPUs, without ``starts``; forward-mode and second
        derivatives are those of ``"xla"``), ``"xla"`` (chunked) or ``"reference"`` (one position at a time).

    Returns:
      ``y [batch, length, heads, width]`` in the dtype of ``x``, and the state after the last position,
      ``[batch, heads, width, states]`` in float32 (or float64).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Dao & Gu 2024, "Transformers are SSMs" (arXiv:2405.21060).
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        x,
        dt,
        a,
        b,
        c,
        initial_state=initial_state,
        starts=starts,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    if problem.length == 0:
        return jnp.zeros(x.shape, x.dtype), arrays[5].astype(problem.accumulate_dtype)
    return OP.run("forward", problem, *alike(arrays, arrays))
