"""Fourier transforms by XLA, and by their definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.ops.fft.matmul import fit, join
from capibara.ops.fft.plan import dft_matrix
from capibara.ops.fft.problem import FFTProblem

__all__ = ["reference", "xla"]


def _whole(problem: FFTProblem, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """The signal in one array of a dtype that transforms take."""
    wide = jnp.dtype(problem.wide)
    if problem.form == "real":
        return arrays[0].astype(wide)
    if problem.form == "pair":
        return lax.complex(arrays[0].astype(wide), arrays[1].astype(wide))
    return arrays[0].astype("complex128" if problem.wide == "float64" else "complex64")


def _parts(problem: FFTProblem, out: jax.Array) -> tuple[jax.Array, ...]:
    if not jnp.issubdtype(out.dtype, jnp.complexfloating):
        return join(problem, out, None)
    if problem.form == "pair":
        return join(problem, out.real, out.imag)
    return (out.astype("complex128" if problem.out_dtype == "float64" else "complex64"),)


def xla(problem: FFTProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """``jax.numpy.fft``."""
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): jnp.fft.fftn,
        (False, True): jnp.fft.ifftn,
        (True, False): jnp.fft.rfftn,
        (True, True): jnp.fft.irfftn,
    }
    x = _whole(problem, arrays)
    function = kinds[problem.real, problem.inverse]
    return _parts(problem, function(x, s=problem.lengths, axes=problem.axes, norm=problem.norm))


def reference(problem: FFTProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The definition: a product with the whole matrix of roots of unity along each axis."""
    x = _whole(problem, arrays)
    for axis, size in zip(problem.axes, problem.sizes, strict=True):
        x = fit(x, axis, size)
    kind = "complex128" if problem.wide == "float64" else "complex64"
    n, last = problem.lengths[-1], problem.axes[-1]
    half = n // 2 + 1
    for axis, length in zip(problem.axes, problem.lengths, strict=True):
        c, s = dft_matrix(length)
        matrix = jnp.asarray(c + 1j * s if problem.inverse else c - 1j * s, kind)
        if problem.real and axis == last:
            matrix = matrix[:half] if problem.inverse else matrix[:, :half]
        if problem.real and problem.inverse and axis == last:
            # The other half is conjugated: each frequency counts twice, except those that are their own mirror.
            weight = np.where(np.arange(half) * 2 % n == 0, 1.0, 2.0)
            y = jnp.moveaxis(x.astype(kind), axis, -1) * jnp.asarray(weight, kind)
            out = sum(
                sign * jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
                for sign, a, b in ((1, y.real, matrix.real), (-1, y.imag, matrix.imag))
            )
            x = jnp.moveaxis(jnp.asarray(out), -1, axis)
        else:
            y = jnp.moveaxis(x.astype(kind), axis, -1)
            x = jnp.moveaxis(jnp.matmul(y, matrix, precision=lax.Precision.HIGHEST), -1, axis)
    return _parts(problem, x * jnp.asarray(problem.scale, x.real.dtype))
