"""A model in its form for TPUs, run on a CPU: the loss and gradients of the form for CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara.compose import JaxBackend
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel

SETTINGS: dict[str, Any] = {
    "model.vocab_size": 96,
    "model.embed_dim": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
    "model.mlp_dim": 96,
    "model.max_sequence_length": 160,
    "train.sequence_length": 160,
    "model.scan_layers": "scan",
}
BFLOAT16: dict[str, Any] = {
    **SETTINGS,
    "tpu.enabled": False,
    "precision.compute_dtype": "bfloat16",
    "model.remat": "dots",
}


def loss_and_gradients(settings: dict[str, Any], params: Any = None) -> tuple[Any, Any, Any]:
    model = ModularCapibaraModel(ModularModelConfig.from_toml("production/tpu_v4", settings))
    params = model.init(0)[0] if params is None else params
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, size=(2, 161)), jnp.int32)
    run = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {"tokens": tokens}, state={})[0]))
    return params, *run(params)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("more", "close"),
    [
        ({"precision.compute_dtype": "float32", "model.remat": "dots"}, 1e-4),
        ({"precision.compute_dtype": "bfloat16", "model.remat": "full"}, 3e-2),
    ],
)
def test_loss_and_gradients_are_those_of_the_form_for_cpus(more: Any, close: float, monkeypatch) -> None:
    settings = {**SETTINGS, "tpu.enabled": False, **more}
    params, wanted, wanted_slope = loss_and_gradients(settings)
    monkeypatch.setattr(JaxBackend, "platform", "tpu")
    _, found, slope = loss_and_gradients(settings, params)
    assert jax.tree.structure(slope) == jax.tree.structure(wanted_slope)
    np.testing.assert_allclose(found, wanted, rtol=close)
    for got, want in zip(jax.tree.leaves(slope), jax.tree.leaves(wanted_slope), strict=True):
        assert got.shape == want.shape
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=close, atol=close * scale)


def trained(settings: dict[str, Any], steps: int) -> list[float]:
    model = ModularCapibaraModel(ModularModelConfig.from_toml("production/tpu_v4", settings))
    params = model.init(0)[0]
    optimizer = optax.adamw(1e-3)
    random = np.random.default_rng(0)
    # Each token is the one before it plus a step of its text: something to learn.
    starts, strides = random.integers(0, 96, (steps, 4, 1)), random.integers(1, 4, (steps, 4, 1))
    batches = jnp.asarray((starts + strides * np.arange(161)) % 96, jnp.int32)

    @jax.jit
    def step(carry: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, slope = jax.value_and_grad(lambda p: model.loss(p, {"tokens": tokens}, state={})[0])(params)
        updates, state = optimizer.update(slope, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry, losses = (params, optimizer.init(params)), []
    for tokens in batches:
        carry, loss = step(carry, tokens)
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """Losses of the form for CPUs, as a loop over the blocks, in bfloat16."""
    return trained(BFLOAT16, 50)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_fifty_steps_of_training_stay_together(layers, wanted, monkeypatch) -> None:
    """In bfloat16: as far apart at the end as its rounding makes them."""
    monkeypatch.setattr(JaxBackend, "platform", "tpu")
    found = trained({**BFLOAT16, "model.scan_layers": layers}, 50)
    assert wanted[-1] < 0.6 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=2e-2)
