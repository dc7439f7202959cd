"""Modules of Flax and Equinox, where they are installed: their steps are those of a plain loop with optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara.train import TpuDistributedTrainer

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(16, 6)).astype("float32")
LABELS = (POINTS[:, 0] * POINTS[:, 1] > 0).astype("int32")
STEPS = 3


def trained(model: Any) -> tuple[TpuDistributedTrainer, tuple[float, ...]]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    trainer = TpuDistributedTrainer(model, mesh, optimizer=optax.adam(1e-2))
    return trainer, trainer.train([(POINTS, LABELS)], steps=STEPS).losses


def by_hand(params: Any, outputs_of: Any) -> tuple[list[float], Any]:
    optimizer = optax.adam(1e-2)
    moments = optimizer.init(params)
    losses = []

    def loss(params: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(outputs_of(params), LABELS).mean()

    for _ in range(STEPS):
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def test_an_equinox_module() -> None:
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.MLP(6, 2, 8, 1, key=jax.random.key(1))
    trainer, losses = trained(module)
    params, static = eqx.partition(module, eqx.is_inexact_array)
    want, after = by_hand(params, lambda params: jax.vmap(eqx.combine(params, static))(POINTS))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    back = trainer.trained()
    assert type(back) is type(module)
    np.testing.assert_allclose(back.layers[0].weight, after.layers[0].weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(back)(POINTS), trainer.predict(POINTS), rtol=1e-5)


def test_a_linen_module_with_running_statistics_and_dropout() -> None:
    nn = pytest.importorskip("flax.linen")

    class Module(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "mlp")))(
                x
            )
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
            return nn.Dense(2)(x)

    trainer, losses = trained(Module())
    assert losses[0] != losses[1]
    # The running mean of the first layer's outputs, from 0.
    weights = trainer.params["Dense_0"]
    assert trainer.model.param_axes["Dense_0"] == {"bias": (None,), "kernel": (None, "mlp")}
    assert weights["kernel"].shape == (6, 8)
    mean = trainer.state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert float(jnp.abs(mean).max()) > 0.01
    # Inference draws nothing and uses the statistics.
    np.testing.assert_array_equal(trainer.predict(POINTS), trainer.predict(POINTS))
    want = Module().apply({"params": trainer.params, **trainer.state.model_state}, POINTS)
    np.testing.assert_allclose(trainer.predict(POINTS), want, rtol=1e-5, atol=1e-6)


def test_a_linen_module() -> None:
    nn = pytest.importorskip("flax.linen")
    module = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(2)])
    trainer, losses = trained(module)
    first = TpuDistributedTrainer(module, trainer.mesh).init((POINTS, LABELS)).params
    want, after = by_hand(first, lambda params: module.apply({"params": params}, POINTS))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trainer.params, after)


def test_an_nnx_module(tmp_path: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Module(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a, self.b = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(self.drop(nnx.tanh(self.a(x))))

    module = Module(nnx.Rngs(0))
    trainer, losses = trained(module)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    want, after = by_hand(params, lambda params: nnx.merge(graph, params, rest)(POINTS))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    back = trainer.trained()
    np.testing.assert_allclose(
        back.a.kernel[...], nnx.merge(graph, after, rest).a.kernel[...], rtol=1e-4, atol=1e-6
    )
    trainer.save(tmp_path)
    again = TpuDistributedTrainer(Module(nnx.Rngs(1)), trainer.mesh, optimizer=optax.adam(1e-2)).restore(
        tmp_path
    )
    np.testing.assert_allclose(again.predict(POINTS), back(POINTS), rtol=1e-5)
