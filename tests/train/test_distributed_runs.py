"""What a run of the trainer keeps, which rows it takes, and in which order."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import capibara.train.checkpoint as module
from capibara.errors import ConfigError
from capibara.train import CheckpointWriteError, DivergedError, TpuDistributedTrainer
from capibara.train.feed import batches_of

POINTS = np.arange(20, dtype="float32")[:, None]


def line(**options: Any) -> TpuDistributedTrainer:
    """One weight, which is what the loss of every row is multiplied with."""
    model = (lambda key: {"w": jax.numpy.ones(1)}, lambda params, inputs: inputs * params["w"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    options = {"optimizer": optax.sgd(1e-3), "loss": lambda outputs, targets: outputs[:, 0], **options}
    return TpuDistributedTrainer(model, mesh, **options)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def test_a_folder_with_later_steps_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    first = line()
    batch = (POINTS[:4], POINTS[:4])
    first.train([batch], steps=6, directory=tmp_path, save_every=3)
    other = line()
    other.step(batch)
    for attempt in (
        lambda: other.save(tmp_path),
        lambda: other.train([batch], directory=tmp_path),
        # These are known to be refused before they train.
        lambda: other.train([batch], steps=1, directory=tmp_path),
        lambda: other.train([batch], steps=100, save_every=2, directory=tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"checkpoint of step 6, .* step [1-4] .*restore\(\)"):
            attempt()
        assert kept(tmp_path) == [3, 6]
    assert other.step_count == 2
    assert line().restore(tmp_path).step_count == 6
    # A damaged one that was passed over is in nobody's way.
    (tmp_path / "checkpoints" / "6" / "meta.json").write_text("{}")
    again = line().restore(tmp_path)
    assert again.train([batch], steps=1, directory=tmp_path).step == 4
    assert kept(tmp_path) == [3, 4]


def test_a_run_that_diverges_saves_nothing_of_it(tmp_path: Path) -> None:
    good, bad = (POINTS[:4], POINTS[:4]), (POINTS[:4] * np.float32("nan"), POINTS[:4])
    made = line()
    with pytest.raises(DivergedError, match="step 3"):
        made.train([good, good, bad, good, good, good], directory=tmp_path, save_every=1)
    assert kept(tmp_path) == [1, 2]
    assert np.isfinite(line().restore(tmp_path).params["w"]).all()


def rows(batches: Any) -> list[list[int]]:
    return [batch["inputs"][:, 0].astype(int).tolist() for batch in batches]


def test_steps_of_arrays_go_over_them_as_often_as_needed() -> None:
    data = {"inputs": POINTS, "targets": POINTS}
    assert line().train((POINTS, POINTS), batch_size=10, steps=7).steps == 7
    seen = rows(islice(batches_of(data, batch_size=10, steps=6), 6))
    epochs = [seen[at] + seen[at + 1] for at in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Passes one by one have the orders of as many at once.
    assert [*rows(batches_of(data, batch_size=10)), *rows(batches_of(data, batch_size=10, first=2))] == seen[
        :4
    ]
    made, at_once = line(), line()
    losses = [loss for _ in range(2) for loss in made.fit((POINTS, POINTS), 1, batch_size=10).losses]
    assert losses == list(at_once.fit((POINTS, POINTS), 2, batch_size=10).losses)


def test_no_row_of_arrays_is_left_out_unseen() -> None:
    made = line(gradient_accumulation_steps=4)
    report = made.train((POINTS[:18], POINTS[:18]), batch_size=8, steps=4)
    assert (report.steps, report.dropped_rows) == (4, 2)
    whole = line().train((POINTS[:18], POINTS[:18]), batch_size=8)
    assert (whole.steps, whole.dropped_rows) == (3, 0)
    for size in (8, 100):  # of a small validation set there may be less than one batch
        value = line().evaluate((POINTS[:18], POINTS[:18]), batch_size=size)["loss"]
        assert value == pytest.approx(POINTS[:18].mean(), rel=1e-6)
    assert rows(batches_of({"inputs": POINTS[:5]}, batch_size=2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def root(factor: float, **options: Any) -> TpuDistributedTrainer:
    """A loss whose gradient is not a number at 0, where the loss itself is 0."""
    return line(loss=lambda outputs, targets: jax.numpy.sqrt(outputs[:, 0] * factor), **options)


def test_finite_losses_with_other_gradients_are_not_saved(tmp_path: Path) -> None:
    good, bad = (POINTS[1:5], POINTS[1:5]), (POINTS[1:5] * 0, POINTS[1:5])
    made = root(1.0)
    with pytest.raises(DivergedError, match="norm of the gradients became nan at step 3"):
        made.train([good, good, bad, good], directory=tmp_path, save_every=1)
    assert kept(tmp_path) == [1, 2]
    assert line().restore(tmp_path).step_count == 2


def test_a_state_that_overflows_is_not_saved(tmp_path: Path) -> None:
    made = line(optimizer=optax.sgd(3e38))
    made.step((POINTS[:4], POINTS[:4]))
    with pytest.raises(DivergedError, match=r"model/params/w became infinite or not a number by step 1"):
        made.save(tmp_path)
    assert not (tmp_path / "checkpoints").exists() or not kept(tmp_path)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real, reached = threading.Event(), module._write_item, []

    def slow(path: Path, *rest: Any) -> None:
        assert go.wait(60)
        real(path, *rest)

    def on_step(number: int, metrics: Any) -> None:
        reached.append(number)
        if number == 4:  # two later than the save, as losses are read
            go.set()

    monkeypatch.setattr(module, "_write_item", slow)
    batch = (POINTS[:4], POINTS[:4])
    made = line(optimizer=optax.adam(1e-3))
    made.train([batch] * 7, directory=tmp_path, save_every=2, on_step=on_step)
    assert kept(tmp_path) == [6, 7]
    assert made.restore(tmp_path).step_count == 7
    other = line(optimizer=optax.adam(1e-3))
    for _ in range(7):
        other.step(batch)
    np.testing.assert_array_equal(made.params["w"], other.params["w"])


def test_a_save_that_fails_meanwhile_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    batch = (POINTS[:4], POINTS[:4])
    made = line()
    made.step(batch)
    made.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_item", fail)
        with pytest.raises(CheckpointWriteError, match=r"step 3 .*No space left.*step 1 is intact"):
            made.train([batch] * 500, directory=tmp_path, save_every=3)
    assert made.step_count < 400
    assert kept(tmp_path) == [1]
    made.save(tmp_path)
    assert kept(tmp_path) == [1, made.step_count]
