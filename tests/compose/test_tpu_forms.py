"""The forms of operations for TPUs have the values and gradients of those for CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.compose.backends import jax_ops
from capibara.compose.backends.jax_tpu import on_tpu

CLOSE: dict[Any, Any] = {
    jnp.float32: {"rtol": 1e-5, "atol": 1e-5},
    jnp.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
CASES: dict[str, Any] = {
    "dense": ((2, 130, 16), (16, 24)),
    "project": ((2, 130, 16), (16, 4, 8)),
    "merge": ((2, 130, 4, 8), (4, 8, 16)),
    "rms_norm": ((2, 130, 16), (16,)),
    "layer_norm": ((2, 130, 16), (16,)),
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: Any) -> None:
    random = np.random.default_rng(0)
    arrays = [device_array(random.normal(size=shape), dtype) for shape in CASES[name]]
    options = {"epsilon": 1e-5} if "norm" in name else {}

    def both(ops: Any, x: Any, weight: Any) -> Any:
        out, pull = jax.vjp(lambda *a: getattr(ops, name)(*a, accumulate="float32", **options), x, weight)
        return out, pull(jnp.cos(jnp.arange(out.size)).astype(out.dtype).reshape(out.shape))

    found, wanted = jax.jit(lambda *a: [both(ops, *a) for ops in (on_tpu(jax_ops), jax_ops)])(*arrays)

    def check(got: jax.Array, want: jax.Array) -> None:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), **CLOSE[dtype])

    jax.tree.map(check, found, wanted)


def test_other_operations_and_calls_outside_of_a_trace_are_the_same() -> None:
    ops = on_tpu(jax_ops)
    assert isinstance(ops, SimpleNamespace)
    assert set(ops.__all__) == set(jax_ops.__all__)
    assert ops.attention is jax_ops.attention
    x = np.ones((2, 3, 4), np.float32)
    np.testing.assert_array_equal(
        ops.rms_norm(x, epsilon=1e-5, accumulate="float32"),
        jax_ops.rms_norm(jnp.asarray(x), epsilon=1e-5, accumulate="float32"),
    )
