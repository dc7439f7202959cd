"""Fourier transforms as products of matrices, on real and imaginary parts.

Values are stored as ``[batch, 2, length, trailing]``: the second dimension is the real and the imaginary part. A
stage of radix ``r`` sees ``length = r · m``; its product contracts ``(2, r)`` at once with a real matrix of that many
rows, so that the parts need no products of their own, and puts the new frequency before those of earlier stages:
after the last stage the spectrum is in order (Stockham's arrangement), for any radices and without a permutation.

For a real signal, the first stage uses only the real part, and the last one computes only the requested half of the
spectrum; the inverse computes half of the signal's first frequencies, as the others are their conjugates. If radices
do not cover a length, the transform is a convolution with a chirp (Bluestein).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.ops.fft.plan import MOST, chirp, dft_matrix, padded_length, radices, roots
from capibara.ops.fft.problem import FFTProblem

__all__ = ["check", "fit", "forward", "join"]

# Twiddles of longer transforms are computed where they are used: as constants they would fill the program.
MOST_TABLE = 1 << 16
# Their exponents are 32-bit numbers, and so are those of a convolution of twice the length.
MOST_LENGTH = 1 << 28


def check(problem: FFTProblem) -> None:
    """Refuse lengths whose roots of unity would be counted past 32 bits."""
    if max(problem.lengths) > MOST_LENGTH:
        raise NotImplementedError(f"is for lengths up to {MOST_LENGTH}, not {max(problem.lengths)}")


def fit(x: jax.Array, axis: int, size: int) -> jax.Array:
    """``x`` cropped or padded with zeros to ``size`` along ``axis``."""
    if x.shape[axis] >= size:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def join(problem: FFTProblem, re: jax.Array, im: jax.Array | None) -> tuple[jax.Array, ...]:
    """Convert parts to the problem's form."""
    dtype = problem.out_dtype
    re = re.astype(dtype)
    if im is None:
        return (re,)
    im = im.astype(dtype)
    return (re, im) if problem.form == "pair" else (lax.complex(re, im),)


@dataclass(frozen=True)
class _Transform:
    """One-dimensional transforms of ``[batch, 2 or 1, length, trailing]`` along the third dimension, not scaled."""

    narrow: str
    wide: str
    factors: tuple[int, ...] | None
    inverse: bool
    most: int

    def product(self, rule: str, x: jax.Array, matrix: np.ndarray) -> jax.Array:
        return jnp.einsum(
            rule,
            x.astype(self.narrow),
            jnp.asarray(matrix, self.narrow),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=self.wide,
        )

    def matrix(self, n: int) -> np.ndarray:
        """``[2, n, 2, n]``: part and position to part and frequency."""
        c, s = dft_matrix(n)
        s = -s if self.inverse else s
        return np.stack([np.stack([c, -s], 1), np.stack([s, c], 1)])

    def turn(self, z: jax.Array, n: int) -> jax.Array:
        """``[batch, 2, m, k, trailing]`` times the root of unity to the power of ``m k``."""
        m, k = z.shape[2:4]
        if m * k <= MOST_TABLE:
            c, s = roots(np.arange(m, dtype=np.int64)[:, None] * np.arange(k), n)
            c, s = jnp.asarray(c, self.wide), jnp.asarray(s, self.wide)
        else:
            at = lax.broadcasted_iota(jnp.int32, (m, k), 0) * lax.broadcasted_iota(jnp.int32, (m, k), 1)
            c, s = roots(at, n, jnp, self.wide)
        return self.rotate(z, c[..., None], s[..., None])

    def rotate(self, z: jax.Array, c: Any, s: Any) -> jax.Array:
        """``z`` times ``c - i s``, or ``c + i s`` of an inverse transform."""
        s = -s if self.inverse else s
        re, im = z[:, 0], z[:, 1]
        return jnp.stack([re * c + im * s, im * c - re * s], 1)

    def stages(self, z: jax.Array, stages: tuple[int, ...], half: bool = False) -> jax.Array:
        """The transform along the third dimension of ``[batch, parts, n, trailing]``; ``half`` of its frequencies."""
        b, _, rest, t = z.shape
        done = 1
        for r in stages:
            m = rest // r
            z = z.reshape(b, z.shape[1], r, m, done * t)
            matrix = self.matrix(r)[: z.shape[1]]
            if half and m == 1:  # the last stage's frequencies are the largest steps of the whole
                matrix = matrix[..., : r // 2 + 1]
            z = self.product("bcrmt,crdk->bdmkt", z, matrix)
            if m > 1:
                z = self.turn(z, rest)
            rest, done = m, done * matrix.shape[-1]
        return z.reshape(b, z.shape[1], done, t)

    def plain(self, z: jax.Array) -> jax.Array:
        n = z.shape[2]
        if n == 1:
            return z if z.shape[1] == 2 else jnp.concatenate([z, jnp.zeros_like(z)], 1)
        stages = radices(n, self.factors, self.most)
        return self.bluestein(z) if stages is None else self.stages(z, stages)

    def bluestein(self, z: jax.Array) -> jax.Array:
        n = z.shape[2]
        padded = padded_length(n, self.factors)
        stages = radices(padded, self.factors, self.most)
        assert stages is not None
        wave, spectrum = (
            tuple(jnp.asarray(v[:, None], self.wide) for v in each) for each in chirp(n, padded)
        )
        if z.shape[1] == 1:
            z = jnp.concatenate([z, jnp.zeros_like(z)], 1)
        # With the other sign all is conjugated: the chirp, and the spectrum of what it is convolved with.
        z = self.stages(fit(self.rotate(z, *wave), 2, padded), stages)
        z = replace(self, inverse=not self.inverse).stages(self.rotate(z, *spectrum), stages)
        return self.rotate(z[:, :, :n], *wave) * jnp.asarray(1 / padded, self.wide)

    def of_real(self, z: jax.Array) -> jax.Array:
        """``[batch, 1, n, trailing]`` to half a spectrum, ``[batch, 2, n // 2 + 1, trailing]``."""
        n = z.shape[2]
        stages = radices(n, self.factors, self.most)
        if n == 1 or stages is None:
            return self.plain(z)[:, :, : n // 2 + 1]
        return self.stages(z, stages, half=True)[:, :, : n // 2 + 1]

    def to_real(self, z: jax.Array, n: int) -> jax.Array:
        """Half a spectrum ``[batch, 2, n // 2 + 1, trailing]`` to ``[batch, 1, n, trailing]``."""
        b, t = z.shape[0], z.shape[3]
        # What has to be real in the spectrum of a real signal counts as real.
        ends = np.ones((2, n // 2 + 1, 1))
        ends[1, 0] = 0
        if n % 2 == 0:
            ends[1, -1] = 0
        z = jnp.where(ends == 0, jnp.zeros((), z.dtype), z)
        sign = jnp.asarray([1, -1], z.dtype).reshape(2, 1, 1)
        z = jnp.concatenate([z, jnp.flip(z[:, :, 1 : (n + 1) // 2], 2) * sign], 2)
        stages = radices(n, self.factors, self.most)
        if n == 1 or stages is None:
            return self.plain(z)[:, :1]
        r, m = stages[0], n // stages[0]
        h = r // 2
        z = z.reshape(b, 2, m, r, t)[:, :, :, : h + 1]
        z = self.stages(z.reshape(b, 2, m, (h + 1) * t), stages[1:]).reshape(b, 2, m, h + 1, t)
        if m > 1:
            z = self.turn(z, n)
        weight = np.full(h + 1, 2.0)
        weight[0] = 1
        if r % 2 == 0:
            weight[-1] = 1
        matrix = self.matrix(r)[:, : h + 1, 0] * weight[:, None]
        return self.product("bdmkt,dkr->brmt", z, matrix).reshape(b, 1, n, t)


def _along(parts: list[jax.Array], axis: int, function: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """``function`` of ``[batch, parts, length, trailing]``, as a list of parts again."""
    shape = parts[0].shape
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    z = function(jnp.stack([part.reshape(before, shape[axis], after) for part in parts], 1))
    out = (*shape[:axis], z.shape[2], *shape[axis + 1 :])
    return [z[:, i].reshape(out) for i in range(z.shape[1])]


def forward(problem: FFTProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The transform of the problem, by matrix products."""
    if problem.form == "complex":
        arrays = arrays[0].real, arrays[0].imag
    parts = [x.astype(problem.wide) for x in arrays]
    for axis, size in zip(problem.axes, problem.sizes, strict=True):
        parts = [fit(part, axis, size) for part in parts]
    transform = _Transform(
        problem.precision, problem.wide, problem.radix_factors, problem.inverse, problem.most_radix or MOST
    )
    last = problem.axes[-1]
    plain = problem.axes[:-1] if problem.real else problem.axes
    if problem.real and not problem.inverse:
        parts = _along(parts, last, transform.of_real)
    # Multi-dimensional transforms start with the last axis, as those of real signals have to.
    for axis in reversed(plain):
        parts = _along(parts, axis, transform.plain)
    if problem.real and problem.inverse:
        if len(parts) == 1:
            parts.append(jnp.zeros_like(parts[0]))
        parts = _along(parts, last, lambda z: transform.to_real(z, problem.lengths[-1]))
    if problem.scale != 1:
        parts = [part * jnp.asarray(problem.scale, part.dtype) for part in parts]
    return join(problem, parts[0], parts[1] if len(parts) == 2 else None)
