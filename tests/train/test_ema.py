"""The moving average of the parameters in runs: ``train.ema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.config.problems import SettingsError
from capibara.train import CheckpointNotFoundError, checkpoint_store, restore_model, train

QUICK = (
    "train.steps=2",
    "train.eval_every=1",
    "train.eval_batches=1",
    "checkpoint.every_steps=1",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
)


def run(folder: Path, *settings: str) -> Any:
    config = tiny_config(folder, *QUICK, *settings)
    return train(
        config, TinyModel(config), tiny_corpus(), devices=jax.devices()[:1], measure_utilisation=False
    )


def bits(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["bits_per_byte"] for line in lines if line["kind"] == "validation"}


@pytest.mark.slow  # three runs; what the step does is tested with the trainer
def test_the_average_is_saved_continued_and_validated(tmp_path: Path) -> None:
    model = TinyModel(tiny_config(tmp_path))
    run(tmp_path / "run", "train.ema=0.75", "train.validate_ema=true")
    store = checkpoint_store(tmp_path / "run")
    assert store.steps() == [1, 2]
    first = model.init(0)[0]
    saved = [restore_model(store.open(step), model)[0] for step in (1, 2)]
    averaged = [restore_model(store.open(step), model, ema=True)[0] for step in (1, 2)]
    want = first
    for params, got in zip(saved, averaged, strict=True):
        want = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, want, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)
    # Validation is of the average: what was validated here is not what is validated without.
    run(tmp_path / "plain")
    ours, plain = bits(tmp_path / "run"), bits(tmp_path / "plain")
    assert ours[2] > plain[2]
    assert ours[2] == pytest.approx(_bits(model, averaged[1]), rel=1e-5)
    assert plain[2] == pytest.approx(_bits(model, saved[1]), rel=1e-5)
    # A run that was without begins with its parameters as they are then.
    run(tmp_path / "plain", "train.steps=3", "train.ema=0.75")
    plain_store = checkpoint_store(tmp_path / "plain")
    last, average = (
        restore_model(plain_store.open(3), model, ema=False)[0],
        restore_model(plain_store.open(3), model, ema=True)[0],
    )
    before = saved[1]  # the same run until then
    want = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, before, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), average, want)
    with pytest.raises(CheckpointNotFoundError, match="no averaged parameters"):
        restore_model(plain_store.open(2), model, ema=True)


def _bits(model: TinyModel, params: Any) -> float:
    (batch,) = tiny_corpus().validation_batches(batch_size=4, sequence_length=16, max_batches=1)
    _, (_, metrics) = model.loss(params, {"tokens": batch}, state=model.state, train=False)
    return float(metrics["cross_entropy"]) / np.log(2)


def test_settings_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for settings, said in (
        ("train.validate_ema=true", "train.validate_ema"),
        ("train.ema=1.0", "train.ema"),
        ("optimizer.name=sgd optimizer.beta2=0.9", "optimizer.beta2: got 0.9, but sgd has no such decay"),
        ("optimizer.name=adafactor optimizer.beta1=0.8", "use adamw, lion, muon, sgd"),
    ):
        with pytest.raises(SettingsError, match=said.replace("(", "[(]")):
            tiny_config(tmp_path, *settings.split())
    tiny_config(tmp_path, "optimizer.name=sgd", "optimizer.beta2=0.95")  # as it is without
    tiny_config(tmp_path, "optimizer.name=sgd", "optimizer.beta1=0.5")
