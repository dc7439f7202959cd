"""The compiled step: accumulation, state, randomness, several devices."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emulation import emulated
from tiny_model import TinyModel
from tiny_run import python, tiny_config

from capibara.errors import ConfigError
from capibara.train.batches import BatchSampler
from capibara.train.placement import Placement
from capibara.train.state import TrainState
from capibara.train.step import make_eval_step, make_train_step, microbatch


def start(model: TinyModel, optimizer: optax.GradientTransformation) -> TrainState:
    params, model_state = model.init(1)
    return TrainState.create(params, model_state, optimizer.init(params), seed=5)


def batch(rows: int = 8, length: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, length + 1)).astype(np.int32)


def test_one_step_is_gradient_descent(tmp_path: Path) -> None:
    model = TinyModel(tiny_config(tmp_path))
    optimizer = optax.sgd(0.5)
    state, tokens = start(model, optimizer), batch()
    expected_loss, grads = jax.value_and_grad(
        lambda params: model.loss(params, {"tokens": tokens}, state=state.model_state)[0]
    )(state.params)
    expected = jax.tree.map(lambda param, grad: param - 0.5 * grad, state.params, grads)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(grads)))
    new, metrics = make_train_step(model, optimizer, schedule=lambda step: 0.5)(
        state, {"tokens": tokens[None]}
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), new.params, expected)
    assert int(new.step) == 1
    assert int(new.model_state["calls"]) == 1
    np.testing.assert_allclose(metrics["loss"], expected_loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5)


@pytest.mark.parametrize("parts", [2, 8])
def test_accumulation_equals_the_whole_batch(tmp_path: Path, parts: int) -> None:
    model = TinyModel(tiny_config(tmp_path))
    optimizer = optax.adam(0.01)
    step = make_train_step(model, optimizer)
    whole, whole_metrics = step(start(model, optimizer), {"tokens": batch()[None]})
    cut, cut_metrics = step(start(model, optimizer), {"tokens": microbatch(batch(), parts)})
    np.testing.assert_allclose(cut_metrics["loss"], whole_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(cut_metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-4)
    # Adam's first step is a sign where gradients vanish, so compare what is well above rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), cut.params, whole.params)
    assert int(cut.model_state["calls"]) == parts
    assert int(cut.step) == 1


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=8 must be a multiple of .*steps=3"):
        microbatch(batch(), 3)


def test_dropout_follows_from_key_and_step(tmp_path: Path) -> None:
    model = TinyModel(tiny_config(tmp_path, "model.dropout_rate=0.5"))
    optimizer = optax.sgd(0.0)
    step = make_train_step(model, optimizer)

    def losses() -> list[float]:
        state, found = start(model, optimizer), []
        for _ in range(3):
            state, metrics = step(state, {"tokens": batch()[None]})
            found.append(float(metrics["loss"]))
        return found

    first = losses()
    assert len(set(first)) == 3
    assert first == losses()


def test_the_state_is_donated(tmp_path: Path) -> None:
    model, optimizer = TinyModel(tiny_config(tmp_path)), optax.sgd(0.1)
    state = jax.tree.map(jnp.copy, start(model, optimizer))
    make_train_step(model, optimizer)(state, {"tokens": batch()[None]})
    assert state.params["embed"].is_deleted()


def test_evaluation_changes_nothing_and_is_the_plain_cross_entropy(tmp_path: Path) -> None:
    model = TinyModel(tiny_config(tmp_path))
    params, state = model.init(0)
    tokens = batch()
    value = make_eval_step(model)(params, state, {"tokens": tokens})
    logits = np.asarray(model.apply(params, tokens[:, :-1]), np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probability, tokens[:, 1:, None], -1).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert int(state["calls"]) == 0


def test_placement_takes_as_many_devices_as_divide_the_rows() -> None:
    class Device:
        platform = "cpu"

    one = Placement.choose(5, [jax.devices()[0]])
    assert one.mesh is None
    assert len(one.devices) == 1
    assert [len(Placement.choose(rows, [Device()]).devices) for rows in (1, 2)] == [1, 1]


FOUR_DEVICES = """
import json, sys, tempfile
import jax, numpy as np, optax
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.train import train
from capibara.train.metrics import read_losses
from capibara.train.placement import Placement
from pathlib import Path

assert jax.local_device_count() == 4
assert len(Placement.choose(6).devices) == 3 and len(Placement.choose(5).devices) == 1
out = {}
for name, devices in (("one", jax.devices()[:1]), ("four", None)):
    folder = Path(tempfile.mkdtemp())
    config = tiny_config(folder, "batch_size=8", "steps=6", "log_every=1", "gradient_accumulation_steps=2")
    report = train(config, TinyModel(config), tiny_corpus(), devices=devices, measure_utilisation=False)
    out[name] = [*read_losses(folder / "metrics.jsonl").values(), report.validation_bits_per_byte]
    assert report.devices == (1 if devices else 4)
# Saved by four devices, continued by one.
config = tiny_config(folder, "batch_size=8", "steps=8", "log_every=1", "gradient_accumulation_steps=2")
report = train(config, TinyModel(config), tiny_corpus(), devices=jax.devices()[:1], measure_utilisation=False)
assert (report.start_step, report.step) == (6, 8)
print(json.dumps(out))
"""


@pytest.mark.slow
def test_four_devices_give_the_losses_of_one() -> None:
    support = Path(__file__).parent.parent / "support"
    done = python(
        "-c",
        FOUR_DEVICES,
        env={
            "XLA_FLAGS": emulated(4, quick=True),
            "PYTHONPATH": str(support),
        },
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert len(out["four"]) == 7
    np.testing.assert_allclose(out["four"], out["one"], rtol=2e-4)


def test_the_batch_of_a_step_reaches_the_loss(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 500).astype(np.uint8)
    sampler = BatchSampler(tokens, 4, 16, seed=0)
    model, optimizer = TinyModel(tiny_config(tmp_path)), optax.sgd(0.0)
    params, state = model.init(1)
    expected = model.loss(params, {"tokens": sampler.batch(3)}, state=state)[0]
    placed = Placement.choose(4).put_batch(microbatch(sampler.batch(3), 1))
    _, metrics = make_train_step(model, optimizer)(start(model, optimizer), placed)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
