"""Winograd's minimal filtering as matrix products, XLA's convolution, and the sum over taps that both must equal.

A tile of ``m`` outputs of a filter of three taps needs ``m + 2`` multiplications instead of ``3 m`` (Winograd 1980;
for convolutional layers Lavin and Gray 2016, arXiv:1509.09308). In two dimensions, with a tile ``d`` of the input, a
filter ``g`` and elementwise products ``*`` that become matrix products once they are summed over the channels::

    y = Aᵀ ( (G g Gᵀ) * (Bᵀ d B) ) A

For 4 × 4 outputs that is 36 products of matrices for 144. The transforms are additions of whole arrays, which XLA
fuses. The gradients of both operands are products of the same kind. The price is rounding, of differences of large
terms.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.ops.conv.problem import Conv2dProblem
from capibara.ops.one_device import alike

__all__ = [
    "reference",
    "reference_backward",
    "winograd",
    "winograd_backward",
    "winograd_check",
    "xla",
    "xla_backward",
]

# m → Bᵀ [m + 2, m + 2], G [m + 2, 3], Aᵀ [m, m + 2]; the interpolation points are 0, ±1 (±2) and infinity.
TRANSFORMS: dict[int, tuple[Any, Any, Any]] = {
    2: (
        ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1)),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        ((1, 1, 1, 0), (0, 1, -1, 1)),
    ),
    4: (
        (
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        (
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
    ),
}


def _combine(matrix: Any, parts: list[jax.Array]) -> list[jax.Array]:
    """The rows of ``matrix`` as sums of arrays; ones and zeros cost nothing."""
    out = []
    for row in matrix:
        terms = [
            part if w == 1 else part * np.asarray(w, part.dtype)
            for w, part in zip(row, parts, strict=True)
            if w
        ]
        out.append(sum(terms[1:], terms[0]))
    return out


def _tiles(problem: Conv2dProblem) -> tuple[int, int]:
    height, width = (-(-n // m) for n, m in zip(problem.out_size, problem.tile, strict=True))
    return height, width


def _products(problem: Conv2dProblem, x: jax.Array, w: jax.Array, turned: bool = False) -> jax.Array:
    """The convolution by Winograd's algorithm, as if every number were finite.

    With ``turned`` the filters are ``[3, 3, out_channels, in_channels]`` and turned by half a circle, which leads from
    the gradient of the outputs to that of the inputs: the products contract the other axis, nothing is moved.
    """
    (mh, mw), (th, tw) = problem.tile, _tiles(problem)
    (bh, gh, ah), (bw, gw, aw) = TRANSFORMS[mh], TRANSFORMS[mw]
    batch, channels, out_channels = problem.batch, problem.in_channels, problem.out_channels
    reach = [t * m + 2 for t, m in zip((th, tw), problem.tile, strict=True)]
    widths = [
        (low, full - low - n, 0)
        for n, (low, _), full in zip(problem.size, problem.padding, reach, strict=True)
    ]
    x = lax.pad(x.astype(problem.wide), jnp.zeros((), problem.wide), [(0, 0, 0), *widths, (0, 0, 0)])
    w = w.astype(problem.wide)

    cut = [
        lax.slice(x, (0, i, 0, 0), (batch, i + (th - 1) * mh + 1, reach[1], channels), (1, mh, 1, 1))
        for i in range(mh + 2)
    ]
    rows = _combine(bh, cut)
    order = (2, 1, 0) if turned else (0, 1, 2)
    filter_rows = _combine(gh, [w[i] for i in order])
    half = []
    for row, filter_row in zip(rows, filter_rows, strict=True):
        ends = [(batch, th, j + (tw - 1) * mw + 1, channels) for j in range(mw + 2)]
        tiles = _combine(bw, [lax.slice(row, (0, 0, j, 0), ends[j], (1, 1, mw, 1)) for j in range(mw + 2)])
        taps = _combine(gw, [filter_row[i] for i in order])
        contracted = (((1,), (1 if turned else 0,)), ((), ()))
        sums = [
            lax.dot_general(tile.reshape(-1, channels), tap, contracted, precision=problem.precision)
            for tile, tap in zip(tiles, taps, strict=True)
        ]
        half.append(_combine(aw, sums))
    whole = [_combine(ah, [part[j] for part in half]) for j in range(mw)]
    shape = (batch, th, tw, out_channels)
    y = jnp.stack(
        [jnp.stack([whole[j][i].reshape(shape) for j in range(mw)], 3) for i in range(mh)], 2
    ).reshape(batch, th * mh, tw * mw, out_channels)
    return y[:, : problem.out_size[0], : problem.out_size[1]].astype(problem.dtype)


def _plain_inputs(problem: Conv2dProblem, grad: jax.Array, w: jax.Array) -> jax.Array:
    x = jnp.zeros((problem.batch, *problem.size, problem.in_channels), problem.dtype)
    return jax.vjp(lambda x: xla(problem, x, w), alike(x, grad))[1](grad)[0]


def _plain_filters(problem: Conv2dProblem, x: jax.Array, grad: jax.Array) -> jax.Array:
    w = jnp.zeros((*problem.taps, problem.in_channels, problem.out_channels), problem.dtype)
    return jax.vjp(lambda w: xla(problem, x, w), alike(w, grad))[1](grad)[0]


def _fast_inputs(problem: Conv2dProblem, grad: jax.Array, w: jax.Array) -> jax.Array:
    sizes = zip(problem.size, problem.out_size, problem.padding, strict=True)
    turned = dataclasses.replace(
        problem,
        size=problem.out_size,
        padding=tuple((2 - low, n - m + low) for n, m, (low, _) in sizes),
        in_channels=problem.out_channels,
        out_channels=problem.in_channels,
    )
    return _products(turned, grad, w, turned=True)


def _fast_filters(problem: Conv2dProblem, x: jax.Array, grad: jax.Array) -> jax.Array:
    w = jnp.zeros((3, 3, problem.in_channels, problem.out_channels), problem.dtype)
    return jax.vjp(lambda w: _products(problem, x, w), alike(w, grad))[1](grad)[0]


def _guarded(
    fast: Any, plain: Any, fold: bool, problem: Conv2dProblem, a: jax.Array, b: jax.Array
) -> jax.Array:
    """``fast``, or ``plain`` where its result is not finite; ``fold``: the first axis of ``a`` is that of images."""

    # The transforms spread an infinity over its tile and overflow before a plain sum does. Either shows in the result,
    # and the plain convolution then says what is right.
    @jax.custom_batching.custom_vmap
    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        y = fast(problem, a, b)
        return lax.cond(jnp.all(jnp.isfinite(y)), lambda a, b: y, lambda a, b: plain(problem, a, b), a, b)

    # Under vmap the condition would become a choice between two results that are both computed.
    @one.def_vmap
    def _batched(count: int, batched: list[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        if fold and not batched[1]:
            more = dataclasses.replace(problem, batch=count * problem.batch)
            y = _guarded(fast, plain, fold, more, a.reshape(-1, *a.shape[2:]), b)
            return y.reshape(count, -1, *y.shape[1:]), True
        if all(batched):
            return lax.map(lambda both: one(*both), (a, b)), True
        return lax.map(lambda x: one(x, b) if batched[0] else one(a, x), a if batched[0] else b), True

    return one(a, b)


# The three forms of one function that is linear in images, filters and the gradient of the output: the gradients of
# each are the two others.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def winograd(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return _guarded(_products, xla, True, problem, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_inputs(problem: Conv2dProblem, grad: jax.Array, w: jax.Array) -> jax.Array:
    return _guarded(_fast_inputs, _plain_inputs, True, problem, grad, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_filters(problem: Conv2dProblem, x: jax.Array, grad: jax.Array) -> jax.Array:
    return _guarded(_fast_filters, _plain_filters, False, problem, x, grad)


def winograd_backward(problem: Conv2dProblem, x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
    return _of_inputs(problem, grad, w), _of_filters(problem, x, grad)


def _rule(function: Any, backward: Any) -> None:
    def forward(problem: Conv2dProblem, a: jax.Array, b: jax.Array) -> Any:
        return function(problem, a, b), (a, b)

    function.defvjp(forward, lambda problem, arrays, grad: backward(problem, *arrays, grad))


_rule(winograd, winograd_backward)
_rule(_of_inputs, lambda problem, grad, w, x: (winograd(problem, x, w), _of_filters(problem, x, grad)))
_rule(_of_filters, lambda problem, x, grad, w: (_of_inputs(problem, grad, w), winograd(problem, x, w)))


# Fitted to measurements of 43 sizes on two Zen 4 cores: for tiles of 2 and of 4, what one multiplication of XLA's
# convolution, one transformed number of input or output, and one of the filters cost, in multiplications of a product.
COSTS = {2: (0.81, 12.2, 11.0), 4: (0.41, 8.2, 4.2)}
LEAST_GAIN = 1.3
# Below, starting the many small products costs what they save.
LEAST_WORK = 400_000_000


def _work(problem: Conv2dProblem) -> int:
    """Multiplications of the plain convolution."""
    outputs = problem.batch * math.prod(problem.out_size) * problem.out_channels
    return outputs * math.prod(problem.taps) * problem.in_channels


def gain(problem: Conv2dProblem) -> float:
    """How many times as fast as XLA's convolution the algorithm should be on a CPU."""
    convolution, transform, of_filters = COSTS[max(problem.tile)]
    tiles = problem.batch * math.prod(_tiles(problem))
    inner, outer = problem.in_channels, problem.out_channels
    cost = tiles * inner * outer + transform * tiles * (inner + outer) + of_filters * inner * outer
    return convolution * _work(problem) / (math.prod(m + 2 for m in problem.tile) * cost)


def winograd_check(problem: Conv2dProblem) -> None:
    if problem.taps != (3, 3):
        raise NotImplementedError(f"is for filters of 3 × 3 taps, not {problem.taps[0]} × {problem.taps[1]}")
    if problem.strides != (1, 1):
        raise NotImplementedError(f"is for strides of 1, not {problem.strides[0]} and {problem.strides[1]}")
    if problem.implementation != "auto":
        return
    if _work(problem) < LEAST_WORK:
        raise NotImplementedError(
            f"is not taken for fewer than {LEAST_WORK // 10**6} million multiplications, here "
            f"{_work(problem) / 1e6:.3g}: XLA's convolution is as fast"
        )
    if gain(problem) < LEAST_GAIN:
        raise NotImplementedError(
            f"is not faster enough at these sizes: {gain(problem):.2f} times XLA's convolution by the fitted costs, "
            f"{LEAST_GAIN} is the least"
        )


def xla(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x.astype(problem.dtype),
        w.astype(problem.dtype),
        problem.strides,
        problem.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=problem.precision,
    )


def xla_backward(problem: Conv2dProblem, x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
    return jax.vjp(lambda x, w: xla(problem, x, w), x, w)[1](grad)


def reference(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    """The sum over taps of products of shifted inputs with the tap's matrix."""
    (sh, sw), (height, width) = problem.strides, problem.out_size
    padded = jnp.pad(x.astype(problem.wide), [(0, 0), *problem.padding, (0, 0)])
    y = jnp.zeros((problem.batch, height, width, problem.out_channels), problem.wide)
    for i in range(problem.taps[0]):
        for j in range(problem.taps[1]):
            part = padded[:, i : i + (height - 1) * sh + 1 : sh, j : j + (width - 1) * sw + 1 : sw]
            tap = w[i, j].astype(problem.wide)
            y += jnp.einsum("bhwc,co->bhwo", part, tap, precision=lax.Precision.HIGHEST)
    return y.astype(problem.dtype)


def reference_backward(problem: Conv2dProblem, x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
    return jax.vjp(lambda x, w: reference(problem, x, w), x, w)[1](grad)
