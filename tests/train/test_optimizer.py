"""The optimizers against NumPy ones written from the papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.train.optimizer import build_optimizer, decay_mask, learning_rate_schedule, muon_dimensions


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


def reference_linear(step: int, peak: float, warmup: int, steps: int, fraction: float) -> float:
    if step < warmup:
        return peak * step / warmup
    return peak * (1 + (fraction - 1) * min(1.0, (step - warmup) / (steps - warmup)))


@pytest.mark.parametrize("warmup", [0, 1, 4, 19])
def test_other_schedules(warmup: int) -> None:
    given = [
        f"optimizer.warmup_steps={warmup}",
        "optimizer.learning_rate=0.5",
        "optimizer.final_learning_rate_fraction=0.2",
    ]
    linear = learning_rate_schedule(config("optimizer.schedule=linear", *given))
    constant = learning_rate_schedule(config("optimizer.schedule=constant", *given))
    for step in range(25):
        np.testing.assert_allclose(linear(step), reference_linear(step, 0.5, warmup, 20, 0.2), rtol=1e-5)
        np.testing.assert_allclose(constant(step), reference_linear(step, 0.5, warmup, 20, 1.0), rtol=1e-5)


def run_steps(
    settings: ModularModelConfig, params: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]], axes: Any
) -> dict[str, np.ndarray]:
    """The parameters after steps of these gradients."""
    now = jax.tree.map(lambda leaf: device_array(leaf, jnp.float32), params)
    optimizer = build_optimizer(settings, param_axes=axes)
    state = optimizer.init(now)
    for grad in grads:
        updates, state = optimizer.update(jax.tree.map(jnp.float32, grad), state, now)
        now = jax.tree.map(jnp.add, now, updates)
    return jax.tree.map(np.asarray, now)


def drawn(shapes: dict[str, tuple[int, ...]], steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{key: rng.normal(size=shape) for key, shape in shapes.items()} for _ in range(steps)]


FLAT = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.grad_clip_norm=0.0")


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_momentum(beta: float) -> None:
    settings = config("optimizer.name=sgd", f"optimizer.beta1={beta}", "optimizer.weight_decay=0.1", *FLAT)
    rate = settings.optimizer.learning_rate
    params, *grads = drawn({"matrix": (3, 4), "scale": (4,)}, 6)
    found = run_steps(settings, params, grads, None)
    for key, value in params.items():
        sums = np.zeros_like(value)
        for grad in grads:
            sums = beta * sums + grad[key]
            value = value - rate * (sums + (0.1 * value if value.ndim > 1 else 0.0))
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6)


def test_adafactor() -> None:
    """Shazeer and Stern 2018, algorithm 4: factored second moments, clipped updates, steps relative to parameters."""
    settings = config("optimizer.name=adafactor", "optimizer.weight_decay=0.0", *FLAT)
    rate = settings.optimizer.learning_rate
    params, *grads = drawn({"matrix": (128, 160), "scale": (7,)}, 5)
    found = run_steps(settings, params, grads, None)
    for key, value in params.items():
        rows = columns = whole = 0.0
        for number, grad in enumerate(grads):
            old = 1 - (number + 1.0) ** -0.8
            squares = grad[key] ** 2 + 1e-30
            if value.ndim == 2:
                rows = old * rows + (1 - old) * squares.mean(axis=1)
                columns = old * columns + (1 - old) * squares.mean(axis=0)
                second = np.outer(rows, columns) / np.mean(rows)
            else:
                second = whole = old * whole + (1 - old) * squares
            update = grad[key] / np.sqrt(second)
            update /= max(1.0, np.sqrt(np.mean(update**2)))
            value = value - rate * max(1e-3, np.sqrt(np.mean(value**2))) * update
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the Newton-Schulz iteration (Jordan et al. 2024) in float64."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def test_muon() -> None:
    """Jordan et al. 2024 with Nesterov's momentum, scaled as Liu et al. 2025; Adam (with it too) for the rest."""
    settings = config("optimizer.name=muon", "optimizer.weight_decay=0.2", "optimizer.beta1=0.9", *FLAT)
    rate, b1, b2 = settings.optimizer.learning_rate, 0.9, settings.optimizer.beta2
    axes = {
        "heads": ("layers", "embed", "heads", "head_dim"),
        "experts": ("experts", "mlp", "embed"),
        "table": ("vocab", "embed"),
        "scale": ("layers", "embed"),
    }
    params, *grads = drawn({"heads": (2, 6, 2, 5), "experts": (3, 8, 6), "table": (9, 6), "scale": (2, 6)}, 4)
    found = run_steps(settings, params, grads, axes)
    for key, value in params.items():
        first = second = np.zeros_like(value)
        for number, grad in enumerate(grads, start=1):
            g = grad[key]
            first = b1 * first + (1 - b1) * g
            second = b2 * second + (1 - b2) * g**2
            ahead = b1 * first / (1 - b1 ** (number + 1)) + (1 - b1) * g / (1 - b1**number)
            if key in ("table", "scale"):
                direction = ahead / (np.sqrt(second / (1 - b2**number)) + 1e-8)
            else:
                # One matrix for each layer or expert: the residual stream on one side, all else on the other.
                matrices = ahead.reshape(2, 6, 10) if key == "heads" else ahead
                made = np.stack([orthogonal(one) for one in matrices]).reshape(value.shape)
                direction = made * 0.2 * np.sqrt(max(matrices.shape[1:]))
            decay = 0.0 if key == "scale" else 0.2 * value
            value = value - rate * (direction + decay)
        np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5, err_msg=key)


def test_what_muon_leaves_to_adam() -> None:
    params = {
        "conv": {"weight": jnp.ones((4, 8))},
        "plain": jnp.ones((3, 3)),
        "vector": jnp.ones(3),
        "fixed": None,
    }
    axes = {
        "conv": {"weight": ("conv", "hidden")},
        "plain": ("embed", "mlp"),
        "vector": ("embed",),
        "fixed": None,
    }
    params |= {"position_embedding": {"weight": jnp.ones((5, 8))}, "lora_a": jnp.ones((2, 3, 4, 2))}
    axes |= {
        "position_embedding": {"weight": (None, "embed")},
        "lora_a": ("layers", "heads", "head_dim", None),
    }
    found = muon_dimensions(params, axes)
    assert found["position_embedding"]["weight"] is None
    assert (found["lora_a"].reduction_axis, found["lora_a"].output_axis) == ((3,), (1, 2))
    assert found["conv"]["weight"] is None
    assert found["vector"] is None
    assert (found["plain"].reduction_axis, found["plain"].output_axis) == ((0,), (1,))
    assert muon_dimensions({"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2, 2))})["b"] is None


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    matrix: Any
    vector: Any


def test_muon_takes_parameters_of_any_kind() -> None:
    params: Any = Weights(jnp.ones((3, 4)), jnp.ones(4))
    optimizer: Any = build_optimizer(config("optimizer.name=muon"))
    state = optimizer.init(params)
    inner = state[1][0].inner_states
    assert inner["muon"].inner_state[0].mu.matrix.shape == (3, 4)
    assert inner["adam"].inner_state[0].mu.vector.shape == (4,)
    updates, _ = optimizer.update(params, state, params)
    assert updates.matrix.shape == (3, 4)


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
