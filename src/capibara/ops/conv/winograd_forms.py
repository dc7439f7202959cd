"""Winograd's minimal filtering as matrix products, XLA's convolution, and the sum over taps that both must equal.

A tile of ``m`` outputs of a filter of three taps needs ``m + 2`` multiplications instead of ``3 m`` (Winograd 1980;
for convolutional layers Lavin and Gray 2016, arXiv:1509.09308). In two dimensions, with a tile ``d`` of the input, a
filter ``g`` and elementwise products ``*`` that become matrix products once they are summed over the channels::

    y = Aᵀ ( (G g Gᵀ) * (Bᵀ d B) ) A

For 4 × 4 outputs that is 36 products of matrices for 144. The transforms are additions of whole arrays, which XLA
fuses. The price is rounding: differences of large terms, with 4 × 4 outputs about ten times that of 2 × 2.
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


def _products(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    """The convolution by Winograd's algorithm, as if every number were finite."""
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
    filter_rows = _combine(gh, [w[i] for i in range(3)])
    half = []
    for row, filter_row in zip(rows, filter_rows, strict=True):
        ends = [(batch, th, j + (tw - 1) * mw + 1, channels) for j in range(mw + 2)]
        tiles = _combine(bw, [lax.slice(row, (0, 0, j, 0), ends[j], (1, 1, mw, 1)) for j in range(mw + 2)])
        taps = _combine(gw, [filter_row[i] for i in range(3)])
        sums = [
            jnp.matmul(tile.reshape(-1, channels), tap, precision=problem.precision)
            for tile, tap in zip(tiles, taps, strict=True)
        ]
        half.append(_combine(aw, sums))
    whole = [_combine(ah, [part[j] for part in half]) for j in range(mw)]
    shape = (batch, th, tw, out_channels)
    y = jnp.stack(
        [jnp.stack([whole[j][i].reshape(shape) for j in range(mw)], 3) for i in range(mh)], 2
    ).reshape(batch, th * mh, tw * mw, out_channels)
    return y[:, : problem.out_size[0], : problem.out_size[1]].astype(problem.dtype)


def _guarded(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    # The transforms spread an infinity over its tile and overflow before a plain sum does. Either shows in the output,
    # and the plain convolution then says what is right.
    y = _products(problem, x, w)
    return lax.cond(jnp.all(jnp.isfinite(y)), lambda x, w: y, lambda x, w: xla(problem, x, w), x, w)


def _folded(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    # Under vmap the condition would become a choice between two results that are both computed.
    guarded = jax.custom_batching.custom_vmap(partial(_guarded, problem))

    @guarded.def_vmap
    def _batched(count: int, batched: list[bool], x: jax.Array, w: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1]:
            more = dataclasses.replace(problem, batch=count * problem.batch)
            y = _folded(more, x.reshape(-1, *x.shape[2:]), w)
            return y.reshape(count, -1, *y.shape[1:]), True
        if not batched[0]:
            return lax.map(lambda w: _folded(problem, x, w), w), True
        return lax.map(lambda both: _folded(problem, *both), (x, w)), True

    return guarded(x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _winograd(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return _folded(problem, x, w)


def winograd(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    return _winograd(problem, x, w)


def winograd_backward(problem: Conv2dProblem, x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
    """The gradient of the inputs is itself a convolution, of the turned filters; that of the filters is XLA's."""
    sizes = zip(problem.size, problem.out_size, problem.padding, strict=True)
    turned = dataclasses.replace(
        problem,
        size=problem.out_size,
        padding=tuple((2 - low, n - m + low) for n, m, (low, _) in sizes),
        in_channels=problem.out_channels,
        out_channels=problem.in_channels,
    )
    dx: Any = _winograd(turned, grad, jnp.swapaxes(w[::-1, ::-1], 2, 3))
    (dw,) = jax.vjp(lambda w: xla(problem, x, w), w)[1](grad)
    return dx.astype(x.dtype), dw


def _winograd_forward(problem: Conv2dProblem, x: jax.Array, w: jax.Array) -> Any:
    return _winograd(problem, x, w), (x, w)


def _winograd_backward(problem: Conv2dProblem, arrays: tuple[jax.Array, jax.Array], grad: jax.Array) -> Any:
    return winograd_backward(problem, *arrays, grad)


_winograd.defvjp(_winograd_forward, _winograd_backward)


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
