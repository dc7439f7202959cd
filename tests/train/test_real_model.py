"""Training and generation with the real model: every kind of block resumes exactly and decodes as it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from tiny_run import tiny_config, tiny_corpus

from capibara.core import ModularCapibaraModel
from capibara.serve import Generator, Sampling, find_checkpoint, load_model
from capibara.train import read_losses, train
from capibara.train.progress import SilentReporter
from capibara.train.signals import StopFlag

ALL_KINDS = (
    'model.pattern=["attention", "ssm", "vq"]',
    "model.num_layers=3",
    "model.ssm.state_dim=4",
    "model.ssm.head_dim=8",
    "model.ssm.chunk_size=8",
    "model.vq.codebook_size=8",
    "model.dropout_rate=0.1",
    "train.steps=8",
)


class StopAfter(SilentReporter):
    def __init__(self, step: int) -> None:
        self.at, self.flag = step, StopFlag()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, loss: float) -> None:
        if step >= self.at:
            self.flag.requested, self.flag.signal = True, 2


@pytest.mark.slow
def test_all_kinds_of_block_resume_exactly_and_generate(tmp_path: Path) -> None:
    straight, stopped = (tiny_config(tmp_path / name, *ALL_KINDS) for name in ("straight", "stopped"))
    options: dict[str, Any] = {"measure_utilisation": False}
    train(straight, ModularCapibaraModel(straight), tiny_corpus(), **options)
    stop = StopAfter(2)
    first = train(
        stopped, ModularCapibaraModel(stopped), tiny_corpus(), reporter=stop, stop=stop.flag, **options
    )
    assert 2 <= first.step < 8
    second = train(stopped, ModularCapibaraModel(stopped), tiny_corpus(), **options)
    assert (second.start_step, second.step) == (first.step, 8)
    losses = [
        read_losses(Path(config.checkpoint.directory) / "metrics.jsonl") for config in (straight, stopped)
    ]
    assert {step: loss.hex() for step, loss in losses[0].items()} == {
        step: loss.hex() for step, loss in losses[1].items()
    }
    leaves = []
    for config in (straight, stopped):
        loaded = load_model(find_checkpoint(config.checkpoint.directory))
        leaves.append(jax.tree.leaves((loaded.params, loaded.state)))
    for one, other in zip(*leaves, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

    generator = Generator(loaded.model, loaded.params, state=loaded.state, sampling=Sampling(temperature=0.0))
    prompt = list(b"Sent")
    found = list(generator.tokens(prompt, max_tokens=12))
    apply = jax.jit(loaded.model.apply)
    visible = list(prompt)
    for _ in range(12):
        padded = device_array([visible + [0] * (16 - len(visible))], jnp.int32)
        logits, _ = apply(loaded.params, padded, state=loaded.state)
        visible.append(int(jnp.argmax(logits[0, len(visible) - 1])))
    assert found == visible[4:]


@pytest.mark.slow
def test_how_layers_are_compiled_may_change_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """Scanned and unrolled, a model has the same arrays, the same dropout and, but for rounding, the same losses."""
    settings = ("model.num_layers=2", "model.dropout_rate=0.2", "train.steps=6")
    options: dict[str, Any] = {"measure_utilisation": False}

    def config(folder: str, layers: str) -> Any:
        return tiny_config(tmp_path / folder, *settings, f"model.scan_layers={layers}")

    straight = config("straight", "scan")
    train(straight, ModularCapibaraModel(straight), tiny_corpus(), **options)
    first = config("changed", "scan")
    stop = StopAfter(2)
    stopped = train(
        first, ModularCapibaraModel(first), tiny_corpus(), reporter=stop, stop=stop.flag, **options
    )
    assert stopped.step < 6
    second = config("changed", "unroll")
    again = StopAfter(100)
    report = train(second, ModularCapibaraModel(second), tiny_corpus(), reporter=again, **options)
    assert (report.start_step, report.step) == (stopped.step, 6)
    assert any("model.scan_layers was 'scan', now 'unroll'" in note for note in again.notes)
    want, got = (read_losses(tmp_path / name / "metrics.jsonl") for name in ("straight", "changed"))
    np.testing.assert_allclose([got[step] for step in sorted(want)], list(want.values()), rtol=1e-5)
