"""The public two-dimensional convolution that may run by Winograd's algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.conv import specs
from capibara.ops.conv import winograd_forms as forms
from capibara.ops.conv.problem import Conv2dProblem, alike_in_speed, prepare
from capibara.ops.errors import OpTypeError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuning

__all__ = ["winograd_conv2d"]


def _no_tiles(problem: Conv2dProblem) -> list[str]:
    if not problem.tile_given or problem.implementation != "auto":
        return []
    asked = dataclasses.replace(problem, implementation="winograd")
    remedy, reason = "implementation='winograd' takes it all the same", "it is not taken on this platform"
    for each in (problem, asked):
        try:
            forms.winograd_check(each)
        except NotImplementedError as error:
            reason = f"it {error}"
            remedy = remedy if each is problem else "leave tile_size out"
    return [
        f"tile_size={problem.tile} has no effect: XLA's convolution runs, not Winograd's form ({reason}). Remedy: "
        f"{remedy}."
    ]


OP = Op(
    "winograd_conv2d",
    prepare,
    [
        Implementation(
            "winograd",
            {"forward": forms.winograd, "backward": forms.winograd_backward},
            ("cpu",),
            forms.winograd_check,
        ),
        Implementation("xla", {"forward": forms.xla, "backward": forms.xla_backward}, remarks=_no_tiles),
        Implementation("reference", {"forward": forms.reference, "backward": forms.reference_backward}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return OP.run("forward", problem, x, w)


def _convolve_forward(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> Any:
    return _convolve(problem, x, w), (x, w)


def _convolve_backward(problem: Conv2dProblem, arrays: Any, grad: jax.Array) -> Any:
    return OP.run("backward", problem, *arrays, grad)


_convolve.defvjp(_convolve_forward, _convolve_backward)


@public(OP)
# As in `plain.py`: XLA is wrong where windows are sharded.
@over_explicit_axes(
    "inputs", "filters", out=lambda inputs, _: inputs[:1], kept={"inputs": (0,), "filters": (-1,)}
)
def winograd_conv2d(
    inputs: jax.Array,
    filters: jax.Array,
    strides: int | Sequence[int] = (1, 1),
    padding: str | Sequence[Sequence[int]] = "SAME",
    tile_size: int | Sequence[int] | None = None,
    *,
    precision: str | jax.lax.Precision | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Convolve images, by Winograd's algorithm where it applies and is faster, otherwise by XLA's convolution.

    Equivalent JAX: ``lax.conv_general_dilated(inputs, filters, strides, padding,
    dimension_numbers=("NHWC", "HWIO", "NHWC"))``. As in neural networks the filter is not flipped.

    The algorithm applies to filters of 3 × 3 taps at stride 1. ``"auto"`` chooses it on CPUs if a cost model fitted
    to measurements predicts that it is faster; otherwise ``capibara.ops.explain(winograd_conv2d, …)`` says why not.
    In float32 its errors with tiles of 2 were below those of XLA's convolution on a CPU, with tiles of 4 about ten
    times as large. If a result contains an infinity or NaN, it is computed again by XLA's convolution, so that these
    are in the right places.

    Reverse-mode differentiable, also twice; the gradients of inputs and filters run by the same algorithm. Forward mode
    (``jax.jvp``) is :func:`conv2d`'s. Works under ``jit``, ``vmap`` and inside ``jax.shard_map``.

    Args:
      inputs: ``[batch, height, width, in_channels]``, floating point.
      filters: ``[rows, columns, in_channels, out_channels]``, floating point.
      strides: steps between windows, one for both axes or one each.
      padding: ``"SAME"``, ``"VALID"``, or ``((top, bottom), (left, right))``.
      tile_size: height and width of a tile in outputs, each 2 or 4: ``(2, 2)`` is F(2×2, 3×3), ``(4, 4)`` F(4×4,
        3×3); ``None`` is ``(2, 2)``. Only Winograd's algorithm uses it.
      precision: of the products: ``None``, ``"default"``, ``"high"``, ``"highest"`` or a ``jax.lax.Precision``.
      implementation: ``"auto"``, ``"winograd"``, ``"xla"`` or ``"reference"`` (the sum over taps).

    Returns:
      ``[batch, out_height, out_width, out_channels]`` in the operands' common dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
      NoImplementationError: ``implementation="winograd"`` where it does not apply.

    Source: Lavin and Gray 2016, arXiv:1509.09308.
    """
    OP.check_name(implementation)
    problem, _ = OP.prepare(
        inputs,
        filters,
        strides=strides,
        padding=padding,
        tile_size=tile_size,
        precision=precision,
        implementation=implementation,
    )
    x, w = (jnp.asarray(array).astype(problem.dtype) for array in (inputs, filters))
    if 0 in (problem.batch, problem.in_channels, problem.out_channels, *problem.out_size):
        return forms.xla(problem, x, w)
    # Inside shard_map filters that are the same on all devices get a gradient that sums over them.
    operands = alike((x, w), x, w)
    try:
        return _convolve(problem, *operands)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise OpTypeError(
            "winograd_conv2d: forward-mode differentiation (jax.jvp, jax.jacfwd) is not defined for it. Remedy: "
            "jax.vjp or jax.jacrev, or capibara.ops.conv.conv2d, which has both modes."
        ) from error
