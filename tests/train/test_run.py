"""A run is built once; its model, data and optimizer are whatever offers what the protocols ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.data import ByteTokenizer
from capibara.errors import ConfigError
from capibara.serve import find_checkpoint
from capibara.train import (
    CheckpointDamagedError,
    ResumeMismatchError,
    Run,
    checkpoint_store,
    open_checkpoint,
    read_losses,
    read_metrics,
    train,
)
from capibara.train.placement import Placement
from capibara.train.saved import Facts


class Counting:
    """Batches of one's own: rows of the number of their step."""

    def __init__(self, batch_size: int, sequence_length: int) -> None:
        self.batch_size, self.sequence_length = batch_size, sequence_length

    def batch(self, step: int) -> np.ndarray:
        return np.full((self.batch_size, self.sequence_length + 1), step % 256, np.int32)


class Numbers:
    """A data source of one's own, without validation."""

    name, fingerprint, unit, bytes_per_token, highest = "numbers", "0" * 64, "byte", 1.0, 255
    tokenizer = ByteTokenizer()

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> Counting:
        return Counting(batch_size, sequence_length)

    def validation_batches(self, **sizes: int) -> list[np.ndarray]:
        return []


class Bigram:
    """A model of one's own in plain JAX: a table of the logits after each byte."""

    num_params = 256 * 256

    def init(self, seed: int) -> tuple[Any, Any]:
        return {"table": jax.random.normal(jax.random.key(seed), (256, 256))}, {}

    def loss(self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True) -> Any:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        scores = jax.nn.log_softmax(params["table"][inputs])
        loss = -jnp.take_along_axis(scores, targets[..., None], -1).mean()
        return loss, (state, {"cross_entropy": loss})

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        return 0.0


def test_a_model_and_data_of_ones_own(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "optimizer.weight_decay=0.0", "optimizer.grad_clip_norm=0.0")
    report = train(config, Bigram(), Numbers(), measure_utilisation=False)
    assert (report.reason, report.step, report.validation_bits_per_byte) == ("finished", 12, None)
    # Each step sees one byte, whose row no step before has changed: the loss is that of the first table.
    table = np.asarray(Bigram().init(config.train.seed)[0]["table"], np.float64)
    shifted = table - table.max(axis=1, keepdims=True)
    expected = np.log(np.exp(shifted).sum(axis=1)) - np.diagonal(shifted)
    losses = read_losses(tmp_path / "metrics.jsonl")
    np.testing.assert_allclose([losses[step] for step in range(1, 13)], expected[:12], rtol=1e-5)


def test_a_run_for_its_step_alone_has_no_data() -> None:
    config = tiny_config("unused")
    run = Run(config, Placement.of(config, jax.local_devices()[:1]), TinyModel(config))
    assert run.state.step.shape == ()
    with pytest.raises(ConfigError, match=r"no data.*Give data="):
        _ = run.batches


def test_a_run_is_built_once(tmp_path: Path) -> None:
    run = Run.build(tiny_config(tmp_path), TinyModel(tiny_config(tmp_path)), tiny_corpus())
    assert run.batches is run.batches
    assert run.train_step is run.train_step
    np.testing.assert_array_equal(run.put_batch(3)["tokens"][0], run.batches.batch(3))


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    checkpoint = checkpoint_store(tmp_path).newest()
    assert checkpoint is not None
    facts = Facts.of(checkpoint)
    assert facts.trained(checkpoint) > 0
    assert (facts.text, facts.fingerprint) == ("sentences", tiny_corpus().fingerprint)
    assert (facts.position, facts.reference, facts.pretrained) == (None, None, None)
    assert facts.to_meta().items() <= dict(checkpoint.meta).items()


class Turning(Counting):
    """For some steps ones follow ones; then twos do."""

    def batch(self, step: int) -> np.ndarray:
        rows = np.ones((self.batch_size, self.sequence_length + 1), np.int32)
        if step >= 6:
            rows[:, 1::2] = 2
        return rows


class Turned(Numbers):
    """Validated with what is trained on at first alone."""

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> Turning:
        return Turning(batch_size, sequence_length)

    def validation_batches(self, **sizes: int) -> list[np.ndarray]:
        return [np.ones((2, sizes["sequence_length"] + 1), np.int32)]


def validations(folder: Path) -> dict[int, float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["bits_per_byte"] for line in lines if line["kind"] == "validation"}


def test_the_best_stays(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "train.steps=16",
        "train.eval_every=2",
        "checkpoint.every_steps=8",
        "checkpoint.keep=1",
        "checkpoint.keep_best=true",
        "optimizer.name=sgd",
        "optimizer.beta1=0.0",
        "optimizer.learning_rate=1.0",
    )
    train(config, Bigram(), Turned(), measure_utilisation=False)
    bits = validations(tmp_path)
    assert min(bits, key=lambda step: bits[step]) == 6
    store = checkpoint_store(tmp_path)
    assert (store.best_step(), store.steps()) == (6, [6, 16])
    found = find_checkpoint(tmp_path / "checkpoints" / "best")
    assert found.step == 6
    assert Facts.of(found).validation == bits[6]
    # A run that goes on remembers it, and is no better.
    more = config.with_overrides(["train.steps=20"])
    train(more, Bigram(), Turned(), measure_utilisation=False)
    assert (store.best_step(), store.steps()) == (6, [6, 20])


def test_a_kill_before_the_link(tmp_path: Path) -> None:
    """The best of the checkpoints that are there is found again, though nothing points to it."""
    config = tiny_config(
        tmp_path,
        "train.steps=6",
        "train.eval_every=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep=1",
        "checkpoint.keep_best=true",
        "optimizer.name=sgd",
        "optimizer.beta1=0.0",
        "optimizer.learning_rate=1.0",
        "optimizer.schedule=constant",
    )
    train(config, Bigram(), Turned(), measure_utilisation=False)
    (tmp_path / "checkpoints" / "best").unlink()
    more = config.with_overrides(["train.steps=14"])
    train(more, Bigram(), Turned(), measure_utilisation=False)
    store = checkpoint_store(tmp_path)
    assert (store.best_step(), store.steps()) == (6, [6, 14])


def test_the_best_of_no_validation(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "checkpoint.keep_best=true")
    with pytest.raises(ConfigError, match=r"keep_best=true.*keep_best=false"):
        train(config, Bigram(), Numbers(), measure_utilisation=False)


def test_an_optimizer_that_keeps_other_arrays(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "optimizer.name=sgd")
    train(config, Bigram(), Turned(), measure_utilisation=False)
    other = config.with_overrides(["train.steps=20", "optimizer.beta1=0.0"])
    with pytest.raises(ResumeMismatchError, match=r"training/opt_state/.* expected nothing"):
        train(other, Bigram(), Turned(), measure_utilisation=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", "long"),
        ("seconds", -1.0),
        ("seconds", True),
        ("seconds", 10**400),
        ("validation", "low"),
        ("text", 3),
        ("fingerprint", []),
        ("position", "start"),
        ("reference", {}),
        ("pretrained", "llama"),
    ],
)
def test_facts_of_another_type(name: str, value: Any, tmp_path: Path) -> None:
    store = checkpoint_store(tmp_path)
    store.save(3, {"model": {"params": {"w": jnp.ones(2)}}}, meta={name: value}, config_toml="")
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "3")
    with pytest.raises(CheckpointDamagedError, match=f"{name}=.*expected"):
        Facts.of(checkpoint)


def test_a_time_that_is_missing(tmp_path: Path) -> None:
    checkpoint_store(tmp_path).save(3, {"model": {"params": {"w": jnp.ones(2)}}}, meta={}, config_toml="")
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "3")
    with pytest.raises(CheckpointDamagedError, match="expected a time"):
        Facts.of(checkpoint).trained(checkpoint)
