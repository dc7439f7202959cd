"""Fourier transforms, held against NumPy's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.ops import fft
from fuzz_ops.case import EPS, Arg, Family, Generator, floats, pick

__all__ = ["OPERATIONS"]


def transform(rng: Generator) -> Family:
    name = pick(rng, "auto", "matmul", "matmul", "xla", "reference")
    rank = pick(rng, 1, 2, 2, 3)
    shape = tuple(
        pick(rng, 1, 2, 4, 5, 8, 12, 17) if i == rank - 1 else pick(rng, 1, 2, 4, 3) for i in range(rank)
    )
    several = rank > 1 and rng.random() < 0.35
    axes = tuple(int(a) for a in rng.permutation(rank)[:2]) if several else (int(rng.integers(rank)),)
    inverse, real, norm = (
        bool(rng.random() < 0.4),
        bool(rng.random() < 0.4),
        pick(rng, "backward", "ortho", "forward"),
    )
    pair = bool(rng.random() < 0.4) and not (real and not inverse)
    dtype = floats(rng) if pair or rng.random() < 0.4 else pick(rng, "float32", "float32", "float64")
    complex_ = pair or (real and inverse) or (not real and rng.random() < 0.6)
    if complex_ and not pair and dtype in ("float16", "bfloat16"):
        dtype = "float32"
    if pair and real and not inverse:
        pair = False
    # A spectrum of one number has no length of its own to come from.
    need = real and inverse and shape[axes[-1]] == 1
    sizes = tuple(pick(rng, 1, 3, 6, 8, 11) for _ in axes) if need or rng.random() < 0.3 else None
    precision = pick(rng, None, None, None, "float32")
    if dtype == "float64":
        precision = None
    radices = pick(rng, None, None, (2, 3), (4, 2), (2,))
    named = tuple(a - rank if rng.random() < 0.5 else a for a in axes)
    options: dict[str, Any] = {
        "radix_factors": radices if name in ("matmul", "auto") else None,
        "precision": precision,
        "axis": named if several else named[0],
        "length": None if sizes is None else (sizes if several else sizes[0]),
        "inverse": inverse,
        "real": real,
        "norm": norm,
        "implementation": name,
    }

    def call(*parts: Any) -> Any:
        signal: Any = parts[0]
        if pair:
            signal = tuple(parts)
        elif complex_:
            signal = (
                parts[0] + jnp.asarray(1j, "complex128" if dtype == "float64" else "complex64") * parts[1]
            )
        out = fft.radix_optimized_fft(signal, **options)
        if isinstance(out, tuple) or not jnp.issubdtype(out.dtype, jnp.complexfloating):
            return out
        return out.real, out.imag

    def oracle(*parts: Any) -> list[np.ndarray]:
        signal = parts[0] + 1j * parts[1] if complex_ else parts[0]
        function = {(0, 0): np.fft.fftn, (1, 0): np.fft.ifftn, (0, 1): np.fft.rfftn, (1, 1): np.fft.irfftn}[
            int(inverse), int(real)
        ]
        out = function(signal, s=sizes, axes=axes, norm=norm)
        return [out] if real and inverse else [out.real, out.imag]

    out_dtype = dtype if pair else ("float64" if dtype == "float64" else "float32")
    inside = "bfloat16" if dtype == "bfloat16" and pair else ("float64" if dtype == "float64" else "float32")
    whole = [shape[a] if sizes is None else sizes[i] for i, a in enumerate(axes)]
    if real and inverse and sizes is None:
        whole[-1] = 2 * (whole[-1] - 1)
    scale = {"backward": 1.0 if not inverse else 1 / np.prod(whole), "ortho": np.prod(whole) ** -0.5}.get(
        norm, 1.0 if inverse else 1 / np.prod(whole)
    )
    tolerance = (2e-2 if inside == "bfloat16" else 40 * EPS[inside]) + 2 * EPS[out_dtype]
    return Family(
        f"radix_optimized_fft({dtype}{shape}, pair={pair}, complex={complex_}, {options})",
        call,
        oracle,
        (Arg(shape, dtype),) * (2 if complex_ else 1),
        moods=("normal", "normal", "zeros", "ties", "small", "large"),
        x64=dtype == "float64",
        tolerance=tolerance,
        magnitude=lambda *parts: (
            [scale * sum(np.sqrt(np.sum(p**2)) * np.sqrt(np.prod(whole)) for p in parts)] * 2
        ),
        gradient_tolerance=max(10 * tolerance, 4 * EPS[dtype]),
        differentiable=(0, 1) if complex_ else (0,),
        twice=dtype in ("float32", "float64"),
        dtypes=(out_dtype,) * (1 if real and inverse else 2),
    )


OPERATIONS = {"fft.radix_optimized_fft": transform}
