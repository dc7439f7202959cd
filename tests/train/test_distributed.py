"""The trainer for models of any kind: its steps are those of a loop written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emulation import emulated
from other_process import run_apart
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara import compose as ml
from capibara.errors import ConfigError
from capibara.train import DataError, DivergedError, ResumeMismatchError, TpuDistributedTrainer
from capibara.train.errors import CheckpointNotFoundError

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(24, 6)).astype("float32")
LABELS = (POINTS[:, 0] * POINTS[:, 1] > 0).astype("int64")
BATCHES = [(POINTS[:8], LABELS[:8]), (POINTS[8:16], LABELS[8:16]), (POINTS[16:], LABELS[16:])]


def init(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {"in": 0.4 * jax.random.normal(first, (6, 12)), "out": 0.3 * jax.random.normal(second, (12, 2))}


def apply(params: Any, inputs: Any) -> Any:
    return jnp.tanh(inputs @ params["in"]) @ params["out"]


def one_device() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def trainer(model: Any = (init, apply), **options: Any) -> TpuDistributedTrainer:
    options = {"optimizer": optax.adam(1e-2), **options}
    return TpuDistributedTrainer(model, one_device(), **options)


def by_hand(steps: int, loss: Any = None) -> tuple[list[float], Any, list[Any]]:
    """Losses, the last parameters and all of them of a plain loop."""
    params, optimizer = init(jax.random.key(0)), optax.adam(1e-2)
    moments = optimizer.init(params)

    def usual(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    losses, seen = [], [params]
    for n in range(steps):
        x, y = BATCHES[n % 3]
        value, grads = jax.value_and_grad(loss or usual)(params, x, y)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
        seen.append(params)
    return losses, params, seen


def same(got: Any, want: Any, rtol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {
            "use_gradient_checkpointing": True,
            "activation_offloading": True,
            "async_gradient_communication": True,
            "optimizer_sharding": True,
        },
    ],
    ids=["plain", "accumulation", "every option"],
)
def test_the_steps_are_those_of_a_loop_by_hand(options: dict[str, Any]) -> None:
    losses, params, _ = by_hand(6)
    made = trainer(**options)
    report = made.train(BATCHES, epochs=2)
    assert report.steps == report.step == made.step_count == 6
    np.testing.assert_allclose(report.losses, losses, rtol=2e-5)
    same(made.params, params)


def test_an_average_of_the_parameters_is_kept_and_used(tmp_path: Path) -> None:
    _, _, seen = by_hand(3)
    average = seen[0]
    for params in seen[1:]:
        average = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, average, params)
    made = trainer(ema_decay=0.75)
    made.train(BATCHES)
    same(made.state.ema, average)
    same(made.trained(ema=True), average)
    want = optax.softmax_cross_entropy_with_integer_labels(apply(average, POINTS), LABELS).mean()
    assert made.evaluate(BATCHES, ema=True)["loss"] == pytest.approx(float(want), rel=1e-5)
    assert made.evaluate(BATCHES)["loss"] != pytest.approx(float(want), rel=1e-5)
    # It is saved, and a trainer with another optimizer state is told so.
    made.save(tmp_path)
    again = trainer(ema_decay=0.75).restore(tmp_path)
    same(again.state.ema, average)
    assert again.step_count == 3
    same(again.step(BATCHES[0])["loss"], made.step(BATCHES[0])["loss"])
    same(again.params, made.params)
    with pytest.raises(ResumeMismatchError):
        trainer(optimizer=optax.sgd(1e-2)).restore(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        trainer().restore(tmp_path / "none")
    with pytest.raises(ConfigError, match="ema_decay"):
        trainer().trained(ema=True)


def test_a_loss_of_ones_own_and_weights() -> None:
    def squares(outputs: Any, targets: Any) -> Any:
        return jnp.square(outputs[:, 0] - targets)

    weights = np.linspace(0, 1, 8).astype("float32")
    x, y = BATCHES[0]
    losses, params, _ = by_hand(1, lambda p, x, y: (squares(apply(p, x), y) * weights).sum() / weights.sum())
    for parts in (1, 2):  # a microbatch counts as its weights do
        made = trainer(loss=squares, gradient_accumulation_steps=parts)
        metrics = made.step({"inputs": x, "targets": y, "weights": weights})
        assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)
        same(made.params, params)
    assert set(metrics) == {"loss", "grad_norm"}


def test_functions_get_a_key_and_whether_it_is_training() -> None:
    seen = []

    def noisy(params: Any, inputs: Any, key: Any, train: bool) -> Any:
        seen.append((key is not None, train))
        return apply(params, inputs) + (jax.random.normal(key, ()) if train else 0.0)

    made = trainer((lambda key, inputs: init(key), noisy))
    with pytest.raises(ConfigError, match="call trainer"):
        made.params
    made.step(BATCHES[0])
    made.evaluate(BATCHES[:1])
    assert seen[0] == (True, True)
    assert seen[-1] == (False, False)
    assert made.predict(POINTS[:4]).shape == (4, 2)


def test_data_in_every_form() -> None:
    made = trainer()
    assert made.fit((POINTS, LABELS), epochs=2, batch_size=8).steps == 6
    assert made.train(iter(BATCHES), steps=2).steps == 2
    assert made.train(BATCHES, steps=4).step == 12
    last = {"inputs": POINTS[:7], "targets": LABELS[:7]}
    seen = []
    halves = trainer(gradient_accumulation_steps=2)
    report = halves.train(
        [BATCHES[0], last], on_step=lambda step, metrics: seen.append((step, metrics["loss"]))
    )
    assert (report.steps, report.dropped_rows) == (1, 7)
    assert seen == [(1, report.losses[0])]
    with pytest.raises(DataError, match="can be read once"):
        made.train(iter(BATCHES), epochs=2)
    with pytest.raises(DataError, match="batch_size"):
        made.train((POINTS, LABELS))
    with pytest.raises(DataError, match="not one batch"):
        made.train([])
    with pytest.raises(DataError, match="multiple of 2 microbatches"):
        halves.step(last)
    with pytest.raises(DataError, match="no targets"):
        made.step(POINTS)
    with pytest.raises(DataError, match="the rows"):
        made.step((POINTS, LABELS[:3]))
    with pytest.raises(DataError, match="numbers of the classes"):
        made.step((POINTS[:8], POINTS[:8, :3]))
    with pytest.raises(DivergedError, match="step"):
        made.train([(POINTS * np.float32("nan"), LABELS)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 3}, "model: got int"),
        ({"model": (init, 3)}, "apply is int"),
        ({"optimizer": 3}, "expected an optax"),
        ({"optimizer": "adamm"}, "adamw"),
        ({"learning_rate": 0.1}, "an optimizer of your own"),
        ({"optimizer": "sgd", "learning_rate": -1}, "above 0"),
        ({"loss": "mse"}, "a function of"),
        ({"ema_decay": 2.0}, "between 0 and 1"),
        ({"optimizer_sharding": 1}, "True or False"),
        ({"gradient_accumulation_steps": 0}, "integer from 1"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(**options)
    with pytest.raises(ConfigError, match="got str, expected a"):
        TpuDistributedTrainer((init, apply), "4x8")


@pytest.mark.slow  # the parts of it are tested with TinyModel elsewhere
def test_a_model_of_the_protocol_trains_on_text(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    made = TpuDistributedTrainer(TinyModel(config), one_device())
    corpus = tiny_corpus()
    report = made.train(corpus, steps=4, validation=corpus)
    assert report.steps == 4
    assert report.metrics["learning_rate"] > 0
    assert report.validation is not None
    assert report.validation["loss"] < 6
    made.save(tmp_path / "saved")
    more = TpuDistributedTrainer(TinyModel(config), one_device()).restore(tmp_path / "saved")
    # The order of the data goes on where it stood.
    assert more.train(corpus, steps=1).losses == pytest.approx(made.train(corpus, steps=1).losses, rel=1e-6)


@pytest.mark.slow
def test_a_composed_model() -> None:
    made = trainer(ml.MLP(input_size=6, hidden_sizes=[8], output_size=2, activation=ml.Tanh))
    report = made.train(BATCHES, epochs=4)
    assert report.loss < report.losses[0]
    whole = ml.TrainModel(ml.MLP(input_size=6, hidden_sizes=[8], output_size=2, activation=ml.Tanh))
    whole.add_loss(ml.CrossEntropy(), input="output", target="label", key_name="cost")
    compiled = ml.compile(whole, shapes={"input": [None, 6]})
    batch = {"input": POINTS[:8], "label": LABELS[:8].astype("int32")}
    other = trainer(compiled)
    params = jax.tree.map(jnp.copy, other.params)
    want, gradients = compiled.evaluate(params, batch, {"final_cost": 1.0})
    metrics = other.step(batch)
    assert float(metrics["loss"]) == pytest.approx(float(want["final_cost"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)


MESHES = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from capibara.train import TpuDistributedTrainer
from capibara.errors import ConfigError

random = np.random.default_rng(0)
points = random.normal(size=(16, 8)).astype("float32")
batches = [(points, (points[:, 0] * points[:, 1] > 0).astype("int32"))] * 3

def init(key):
    keys = jax.random.split(key, 2)
    return {"in": 0.4 * jax.random.normal(keys[0], (8, 32)), "out": 0.3 * jax.random.normal(keys[1], (32, 2))}

def apply(params, inputs):
    return jnp.tanh(inputs @ params["in"]) @ params["out"]

class Plain:
    "A gradient transformation that no placeholder goes through."
    @staticmethod
    def init(params):
        return {"seen": jnp.int32(0), "moment": {k: jnp.zeros(params[k].shape) for k in ("in", "out")}}
    @staticmethod
    def update(updates, state, params=None):
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, state["moment"], updates)
        return jax.tree.map(lambda m: -0.1 * m, moment), {"seen": state["seen"] + 1, "moment": moment}

def mesh(*axes):
    return jax.make_mesh(tuple(n for _, n in axes), tuple(name for name, _ in axes))

def run(mesh, **options):
    options = {"optimizer": Plain, "ema_decay": 0.5, **options}
    made = TpuDistributedTrainer((init, apply), mesh, **options)
    report = made.train(batches)
    where = {name: [list(x.sharding.shard_shape(x.shape)) for x in (tree["in"], tree["out"])]
             for name, tree in (("params", made.params), ("moments", made.state.opt_state["moment"]),
                                ("ema", made.state.ema))}
    return {"losses": report.losses, "norm": report.metrics["grad_norm"], "where": where,
            "params": jax.tree.map(lambda x: np.asarray(x).tolist(), (made.params, made.state.ema)),
            "options": made.compiler_options}

data, both = mesh(("data", 8)), mesh(("data", 4), ("fsdp", 2))
out = {"one": run(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))}
out["zero"] = run(data, optimizer_sharding=True, gradient_accumulation_steps=2, async_gradient_communication=True)
out["fsdp"] = run(both, use_gradient_checkpointing=True)
names = {"in": (None, "mlp"), "out": ("mlp", None)}
out["tensor"] = run(mesh(("data", 2), ("model", 4)), param_axes=names)
refused = {}
for name, axes in {"model": [("data", 2), ("model", 4)], "context": [("context", 8)], "pipeline": [("pipeline", 8)],
                   "nothing": [("modell", 8)]}.items():
    try:
        TpuDistributedTrainer((init, apply), mesh(*axes))
    except ConfigError as error:
        refused[name] = str(error)
print("RESULT", json.dumps({"runs": out, "refused": refused}))
"""


@pytest.fixture(scope="module")
def meshes() -> Any:
    return run_apart(MESHES, XLA_FLAGS=emulated(8, quick=True))


@pytest.mark.slow  # test_axes.py has a mesh among the quick ones
@pytest.mark.parametrize("name", ["zero", "fsdp", "tensor"])
def test_a_mesh_computes_what_one_device_does(meshes: Any, name: str) -> None:
    got, want = meshes["runs"][name], meshes["runs"]["one"]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["norm"], want["norm"], rtol=1e-5)
    same(got["params"], want["params"], rtol=1e-5)


@pytest.mark.slow
def test_parameters_moments_and_average_lie_where_the_options_say(meshes: Any) -> None:
    where = {name: run["where"] for name, run in meshes["runs"].items()}
    whole = [[8, 32], [32, 2]]
    assert where["zero"] == {"params": whole, "moments": [[8, 4], [4, 2]], "ema": [[8, 4], [4, 2]]}
    assert where["fsdp"] == {key: [[8, 16], [16, 2]] for key in ("params", "moments", "ema")}
    assert where["tensor"] == {key: [[8, 8], [8, 2]] for key in ("params", "moments", "ema")}
    assert meshes["runs"]["zero"]["options"] == {"xla_cpu_enable_concurrency_optimized_scheduler": True}
    assert meshes["runs"]["fsdp"]["options"] == {}


@pytest.mark.slow
def test_an_axis_that_would_shard_nothing_is_refused(meshes: Any) -> None:
    refused = meshes["refused"]
    assert "param_axes" in refused["model"]
    assert "another framework" in refused["context"]
    assert "layers are not known" in refused["pipeline"]
    assert "'model'" in refused["nothing"]
