"""The optimizer against a NumPy AdamW and Lion written from the papers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.train.optimizer import build_optimizer, decay_mask, learning_rate_schedule


def config(*overrides: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", ["train.steps=20", "optimizer.warmup_steps=4", *overrides])


def reference_rate(step: int, peak: float, warmup: int, steps: int, fraction: float) -> float:
    if step < warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / (steps - warmup))
    return peak * (fraction + (1 - fraction) * 0.5 * (1 + np.cos(np.pi * progress)))


@pytest.mark.parametrize("warmup", [0, 1, 4, 19])
def test_the_schedule(warmup: int) -> None:
    settings = config(
        f"optimizer.warmup_steps={warmup}",
        "optimizer.learning_rate=0.5",
        "optimizer.final_learning_rate_fraction=0.2",
    )
    schedule = learning_rate_schedule(settings)
    for step in range(25):
        np.testing.assert_allclose(schedule(step), reference_rate(step, 0.5, warmup, 20, 0.2), rtol=1e-5)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps=50 must be below train\.steps=20"):
        learning_rate_schedule(config("optimizer.warmup_steps=50"))


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_ten_steps_against_numpy(name: str, clip: float) -> None:
    settings = config(
        f"optimizer.name={name}",
        f"optimizer.grad_clip_norm={clip}",
        "optimizer.weight_decay=0.3",
        "optimizer.learning_rate=0.1",
    )
    values = settings.optimizer
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "scale": (4,)}
    params = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    theirs = jax.tree.map(lambda leaf: device_array(leaf, jnp.float32), params)
    optimizer = build_optimizer(settings)
    state = optimizer.init(theirs)
    first = {key: np.zeros(shape) for key, shape in shapes.items()}
    second = {key: np.zeros(shape) for key, shape in shapes.items()}
    for step in range(10):
        grads = {key: rng.normal(size=shape) for key, shape in shapes.items()}
        updates, state = optimizer.update(jax.tree.map(jnp.float32, grads), state, theirs)
        theirs = jax.tree.map(jnp.add, theirs, updates)
        norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        scale = min(1.0, clip / norm) if clip else 1.0
        rate = reference_rate(step, values.learning_rate, 4, 20, values.final_learning_rate_fraction)
        for key, raw in grads.items():
            grad = raw * scale
            if name == "adamw":
                first[key] = values.beta1 * first[key] + (1 - values.beta1) * grad
                second[key] = values.beta2 * second[key] + (1 - values.beta2) * grad**2
                mean = first[key] / (1 - values.beta1 ** (step + 1))
                variance = second[key] / (1 - values.beta2 ** (step + 1))
                direction = mean / (np.sqrt(variance) + 1e-8)
            else:
                direction = np.sign(values.beta1 * first[key] + (1 - values.beta1) * grad)
                first[key] = values.beta2 * first[key] + (1 - values.beta2) * grad
            decay = values.weight_decay * params[key] if params[key].ndim > 1 else 0.0
            params[key] = params[key] - rate * (direction + decay)
    for key in params:
        np.testing.assert_allclose(theirs[key], params[key], rtol=2e-5, atol=1e-6)


def test_stacked_scales_are_not_decayed() -> None:
    params = {
        "norm": jnp.ones((6, 8)),
        "weight": jnp.ones((6, 8, 8)),
        "embed": jnp.ones((5, 8)),
        "bias": jnp.ones(8),
        "conv": {"bias": jnp.ones((4, 8)), "step_bias": jnp.ones((6, 4, 8))},
    }
    axes = {
        "norm": ("layers", "embed"),
        "weight": ("layers", "embed", "mlp"),
        "embed": ("vocab", "embed"),
        "bias": ("embed",),
        "conv": {"bias": ("heads", None), "step_bias": ("layers", "heads", None)},
    }
    conv = {"bias": False, "step_bias": False}
    assert decay_mask(params, axes) == {
        "norm": False,
        "weight": True,
        "embed": True,
        "bias": False,
        "conv": conv,
    }
    assert decay_mask(params) == {
        "norm": True,
        "weight": True,
        "embed": True,
        "bias": False,
        "conv": conv,
    }
