"""Gradient checkpointing of any function: equal gradients, less memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.train.rematerialise import recomputed

WIDTH, DEPTH = 16, 9


def unrolled(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def scanned(params: Any, x: Any) -> Any:
    x, norms = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), jnp.sum(w**2)), x, params)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(norms)


def compiled_apart(params: Any, x: Any) -> Any:
    return jax.jit(unrolled)(params, x) + jnp.sum(params[0])


def with_own_gradient(params: Any, x: Any) -> Any:
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return jnp.sin(x)

    twice.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * x,))
    return unrolled(params, twice(x))


@pytest.mark.thin(2)
@pytest.mark.parametrize("function", [unrolled, scanned, compiled_apart, with_own_gradient])
def test_the_gradients_are_the_same_and_less_is_kept(function: Any) -> None:
    params = 0.05 * jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (256, WIDTH))
    plain, again = (jax.value_and_grad(f, argnums=(0, 1)) for f in (function, recomputed(function)))
    for got, want in zip(jax.tree.leaves(again(params, x)), jax.tree.leaves(plain(params, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert "prevent_cse" in str(jax.make_jaxpr(again)(params, x))
    assert "prevent_cse" not in str(jax.make_jaxpr(plain)(params, x))
    # What the backward pass keeps of the forward pass.
    kept = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, params, x)[1]))
        for f in (function, recomputed(function))
    ]
    assert kept[1] < 0.6 * kept[0]


def test_a_policy_keeps_more() -> None:
    params = 0.05 * jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (256, WIDTH))
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    text = str(jax.make_jaxpr(jax.grad(recomputed(scanned, policy)))(params, x))
    assert "Host" in text or "pinned_host" in text or "<host>" in text


def test_a_compiled_loop_needs_less_memory() -> None:
    params = 0.05 * jax.random.normal(jax.random.key(0), (16, 64, 64))
    x = jax.random.normal(jax.random.key(1), (1024, 64))
    temporary = []
    for function in (scanned, recomputed(scanned)):
        analysis = jax.jit(jax.grad(function)).lower(params, x).compile().memory_analysis()
        assert analysis is not None
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[1] < 0.4 * temporary[0]
