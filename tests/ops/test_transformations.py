"""Every public function that takes arrays, under ``jit`` and ``vmap``, and the derivatives of its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from operation_calls import CALLS, NEED_AXIS, called, functions

FUNCTIONS = functions()
# Those of a key draw, and are held against the key in tests of their own; collectives have a mesh.
DRAWN = {"attention.multihead_attention_params", "vq.initial_codebook_state"}
NAMES = sorted(set(FUNCTIONS) - NEED_AXIS - DRAWN)
# Straight-through and surrogate gradients are those of no function; a transform's numbers are complex; and the rest
# compute in float32 whatever they are given, or a decomposition of less than the matrix, which are not near enough to
# what differences tell.
SMOOTH = (
    "attention.cached_attention",
    "attention.flash_attention",
    "attention.paged_attention",
    "conv.causal_conv1d",
    "conv.conv2d",
    "conv.conv_transpose2d",
    "linalg.cholesky_update",
    "linalg.grouped_matmul",
    "linalg.optimized_gemm",
    "linalg.qr",
    "loss.cross_entropy",
    "scan.selective_scan",
    "scan.semiring_scan",
    "tropical.polyval",
)
# Those of several searches and of a scan of products, made of what the others are.
LONG = {"tropical.scan", "vq.product_quantise", "vq.residual_quantise"}
# What a function needs of its arguments, by their number.
FIT: dict[str, dict[int, Callable[[Any], Any]]] = {
    "attention.paged_attention": {4: lambda lengths: lengths + 9},
    "linalg.cholesky_update": {0: lambda x: np.tril(x) + 5 * np.eye(len(x))},
    "linalg.grouped_matmul": {2: lambda sizes: 2 * sizes + 1},
    "scan.selective_scan": {1: np.abs, 2: lambda x: -np.abs(x)},
    "tropical.closure": {0: lambda x: -np.abs(x)},
    "tropical.shortest_paths": {0: np.abs},
}


def arguments(name: str, dtype: str) -> tuple[Callable[..., list[Any]], list[Any]]:
    random = np.random.default_rng(0)
    run, shapes = called(name, FUNCTIONS[name])
    arrays = []
    for place, shape in enumerate(shapes):
        if jnp.issubdtype(shape.dtype, jnp.integer):
            x, kind = random.integers(0, 2, size=shape.shape), shape.dtype
        else:
            x, kind = random.normal(size=shape.shape), dtype
        # Of NumPy, which compiles nothing to compute with them.
        arrays.append(np.asarray(FIT.get(name, {}).get(place, lambda x: x)(x), kind))
    return run, arrays


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def test_all_are_here():
    assert set(CALLS) == set(FUNCTIONS)
    assert set(SMOOTH) <= set(NAMES)


@pytest.mark.thin(9)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMES]
)
def test_compiled_and_mapped_it_is_what_it_is_alone(name):
    run, arrays = arguments(name, "float32")
    other = [x * x.dtype.type(0.5) if is_float(x) else x for x in arrays]
    compiled = jax.jit(run)
    alone = [compiled(*arrays), compiled(*other)]
    mapped = jax.jit(jax.vmap(run))(*(np.stack(pair) for pair in zip(arrays, other, strict=True)))
    assert len(mapped) > 0
    for i, want in enumerate((run(*map(device_array, arrays)), alone[1])):
        for one, both, told in zip(alone[i], mapped, want, strict=True):
            np.testing.assert_allclose(one, told, rtol=2e-4, atol=2e-4)
            np.testing.assert_allclose(both[i], told, rtol=2e-4, atol=2e-4)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", SMOOTH)
def test_the_derivative_of_the_gradient_is_what_differences_say(name):
    with jax.enable_x64(True):
        run, arrays = arguments(name, "float64")
        random = np.random.default_rng(1)
        places = [i for i, x in enumerate(arrays) if is_float(x)]
        start = tuple(arrays[i] for i in places)
        there, along = (tuple(device_array(random.normal(size=x.shape)) for x in start) for _ in range(2))

        def loss(*floats: Any) -> Any:
            filled = dict(enumerate(arrays)) | dict(zip(places, floats, strict=True))
            return sum(jnp.sum(jnp.sin(x)) for x in run(*filled.values()) if is_float(x))

        every = tuple(range(len(start)))

        @jax.jit
        def slope(*floats: Any) -> Any:
            return sum(jnp.vdot(x, y) for x, y in zip(jax.grad(loss, every)(*floats), there, strict=True))

        bend = jax.jit(jax.grad(slope, every))(*start)
        got = sum(float(jnp.vdot(x, y)) for x, y in zip(bend, along, strict=True))
        step = 1e-5
        ahead, behind = (
            float(slope(*(x + sign * step * y for x, y in zip(start, along, strict=True))))
            for sign in (1, -1)
        )
        want = (ahead - behind) / (2 * step)
        assert want != 0
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
