"""Whole runs in this process: resuming, limits, refusals, and that something is learned."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import TEXT, tiny_config, tiny_corpus

from capibara.errors import ConfigError
from capibara.train import (
    CheckpointDamagedError,
    DataError,
    DivergedError,
    ResumeMismatchError,
    RunLockedError,
    TrainReport,
    checkpoint_store,
    read_losses,
    read_metrics,
    restore_model,
    split_corpus,
    train,
)
from capibara.train.progress import SilentReporter
from capibara.train.rundir import lock_run
from capibara.train.signals import StopFlag


class Recorder(SilentReporter):
    """Remembers what it is told; can ask for a stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps: list[int] = []
        self.stop = StopFlag()
        self.stop_after = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, step: int, loss: float) -> None:
        self.steps.append(step)
        if step == self.stop_after:
            self.stop.requested, self.stop.signal = True, 15


def run(folder: Path, *overrides: str, recorder: Recorder | None = None, **options: Any) -> TrainReport:
    config = tiny_config(folder, *overrides)
    recorder = recorder or Recorder()
    options.setdefault("corpus", tiny_corpus())
    return train(
        config,
        TinyModel(config),
        reporter=recorder,
        stop=recorder.stop,
        measure_utilisation=False,
        **options,
    )


def hex_losses(folder: Path) -> list[str]:
    losses = read_losses(folder / "metrics.jsonl")
    assert list(losses) == list(range(1, len(losses) + 1))
    return [loss.hex() for loss in losses.values()]


def final_state(folder: Path) -> bytes:
    checkpoint = checkpoint_store(folder).newest()
    assert checkpoint is not None
    params, state = restore_model(checkpoint, TinyModel(tiny_config(folder)))
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    report = run(folder)
    assert (report.reason, report.step, report.start_step) == ("finished", 12, 0)
    return folder


def test_a_run_leaves_what_it_says(undisturbed: Path) -> None:
    names = {"config.toml", "checkpoints", "ledger.jsonl", "metrics.jsonl", "loss.png", "lock"}
    assert set(os.listdir(undisturbed)) == names
    assert sorted(os.listdir(undisturbed / "checkpoints")) == ["12", "8"]
    entries = list(read_metrics(undisturbed / "metrics.jsonl"))
    # Lines end at log steps (5, 10), evaluations (6, 12) and checkpoints (4, 8, 12).
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == [4, 5, 6, 8, 10, 12]
    validations = [entry for entry in entries if entry["kind"] == "validation"]
    assert [entry["step"] for entry in validations] == [6, 12]
    for entry in entries:
        if entry["kind"] == "train":
            np.testing.assert_allclose(entry["loss"], np.mean(entry["losses"]))
            np.testing.assert_allclose(entry["bits_per_byte"], entry["loss"] / np.log(2))
            assert entry["tokens_per_second"] > 0
    meta = json.loads((undisturbed / "checkpoints/12/meta.json").read_text())
    assert meta["step"] == 12
    assert meta["seconds"] > 0


def test_the_validation_figure_is_what_the_model_gives(undisturbed: Path) -> None:
    from capibara.train import validation_batches

    config = tiny_config(undisturbed)
    model = TinyModel(config)
    checkpoint = checkpoint_store(undisturbed).newest()
    assert checkpoint is not None
    params, state = restore_model(checkpoint, model)
    batches = validation_batches(tiny_corpus().validation, batch_size=4, sequence_length=16, max_batches=2)
    assert len(batches) == 2
    nats = [float(model.loss(params, {"tokens": b}, state=state, train=False)[0]) for b in batches]
    final = list(read_metrics(undisturbed / "metrics.jsonl"))[-1]
    assert (final["kind"], final["step"]) == ("validation", 12)
    np.testing.assert_allclose(final["bits_per_byte"], np.mean(nats) / np.log(2), rtol=1e-5)


@pytest.mark.parametrize("stops", [[1, 8], pytest.param([5], marks=pytest.mark.slow)])
def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path, undisturbed: Path, stops: list[int]) -> None:
    for stop in stops:
        report = run(tmp_path, recorder=Recorder(stop_after=stop))
        assert report.reason == "interrupted"
        assert report.signal == 15
        # The loop sees the flag once the steps it has queued are done.
        assert stop <= report.step < 12
        newest = checkpoint_store(tmp_path).newest()
        assert newest is not None
        assert newest.step == report.step
    report = run(tmp_path)
    assert report.step == 12
    assert report.start_step > 0
    assert hex_losses(tmp_path) == hex_losses(undisturbed)
    assert final_state(tmp_path) == final_state(undisturbed)


def test_lines_after_the_checkpoint_are_dropped_and_written_again(tmp_path: Path, undisturbed: Path) -> None:
    """As after a kill: metrics and a validation are ahead of the newest checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "checkpoints" / "12")
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"kind": "train", "step": 13, "los')
    (folder / ".metrics.jsonl.123.tmp").write_text("half")
    recorder = Recorder()
    report = run(folder, recorder=recorder)
    assert report.start_step == 8
    assert any("resuming after step 8" in note for note in recorder.notes)
    assert not list(folder.glob(".*"))
    assert hex_losses(folder) == hex_losses(undisturbed)
    assert final_state(folder) == final_state(undisturbed)


def test_a_truncated_checkpoint_costs_only_time(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    victim = max((folder / "checkpoints/12/model").rglob("*"), key=lambda file: file.stat().st_size)
    os.truncate(victim, 10)
    recorder = Recorder()
    report = run(folder, recorder=recorder)
    assert report.start_step == 8
    assert len(recorder.warnings) == 1
    assert "damaged" in recorder.warnings[0]
    assert hex_losses(folder) == hex_losses(undisturbed)
    assert final_state(folder) == final_state(undisturbed)
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8", "damaged-12"]


def test_only_damaged_checkpoints_are_not_silently_started_over(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    for step in ("8", "12"):
        (folder / "checkpoints" / step / "manifest.json").unlink()
    with pytest.raises(CheckpointDamagedError, match="--fresh"):
        run(folder)
    assert run(folder, fresh=True).start_step == 0
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]


def test_already_trained(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    recorder = Recorder()
    report = run(folder, recorder=recorder)
    assert report.reason == "already trained"
    assert (report.step, report.loss) == (12, None)
    assert "already trained 12 steps; pass train.steps=24" in recorder.notes[-1]
    recorder = Recorder()
    assert run(folder, "train.steps=14", recorder=recorder).step == 14
    assert any("train.steps was 12, now 14" in note for note in recorder.notes)
    assert hex_losses(folder)[:12] == hex_losses(undisturbed)
    assert run(folder, "checkpoint.resume=false").start_step == 0


def test_the_time_limit_counts_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return Clock.now

    class Ticking(Recorder):
        def step(self, step: int, loss: float) -> None:
            super().step(step, loss)
            Clock.now += 10.0

    monkeypatch.setattr("time.perf_counter", Clock())
    first = Ticking(stop_after=2)
    stopped = run(tmp_path, "train.max_seconds=55.0", recorder=first)
    assert stopped.reason == "interrupted"
    spent = stopped.seconds
    assert spent == 10.0 * stopped.step
    second = Ticking()
    report = run(tmp_path, "train.max_seconds=55.0", recorder=second)
    assert report.reason == "time"
    assert spent < 55 <= report.seconds <= 55 + 10 * 4
    assert report.step == round(report.seconds / 10)
    # Ended by its limit, so its validation is there and its checkpoint is the newest.
    assert report.validation_bits_per_byte is not None
    third = Ticking()
    assert run(tmp_path, "train.max_seconds=55.0", recorder=third).reason == "already trained"
    assert "train.max_seconds" in third.notes[-1]


def test_another_model_is_refused_by_naming_the_settings(tmp_path: Path, undisturbed: Path) -> None:
    with pytest.raises(ResumeMismatchError) as caught:
        run(undisturbed, "model.embed_dim=32", "model.rope_theta=500.0", "train.steps=20")
    text = str(caught.value)
    assert "model.embed_dim was 16, now 32; model.rope_theta was 10000.0, now 500.0" in text
    assert "--fresh" in text
    assert "train.steps" not in text


def test_another_optimizer_is_refused(undisturbed: Path) -> None:
    with pytest.raises(ResumeMismatchError, match=r"was 'adamw', now 'lion'.*Restore optimizer\.name=adamw"):
        run(undisturbed, "optimizer.name=lion", "train.steps=20")


def test_settings_that_read_as_nonsense_are_refused(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    # A checkpoint of some future version: whole, but with a setting that this one does not know.
    config = folder / "checkpoints/12/config.toml"
    config.write_text(config.read_text() + "\n[future]\nx = 1\n")
    manifest = folder / "checkpoints/12/manifest.json"
    content = json.loads(manifest.read_text())
    data = config.read_bytes()
    content["files"]["config.toml"] = [len(data), hashlib.sha256(data).hexdigest()]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ResumeMismatchError, match="future"):
        run(folder)


def test_other_text_is_refused_unless_allowed(tmp_path: Path) -> None:
    run(tmp_path, "train.steps=6")
    other = split_corpus((TEXT + "More.").encode(), name="more sentences", validation_fraction=0.1)
    with pytest.raises(ResumeMismatchError, match=r"'sentences', now 'more sentences'.*--allow-new-text"):
        run(tmp_path, "train.steps=8", corpus=other)
    report = run(tmp_path, "train.steps=8", corpus=other, allow_new_text=True)
    assert (report.start_step, report.step) == (6, 8)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        run(tmp_path)


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    class Exploding(TinyModel):
        def loss(self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True) -> Any:
            loss, (new_state, metrics) = super().loss(params, batch, state=state, key=key, train=train)
            loss = loss / (state["calls"] < 5)
            return loss, (new_state, {**metrics, "cross_entropy": loss})

    config = tiny_config(tmp_path)
    with pytest.raises(DivergedError, match=r"loss became inf at step 6.*learning_rate"):
        train(config, Exploding(config), tiny_corpus(), measure_utilisation=False)
    newest = checkpoint_store(tmp_path).newest()
    assert newest is not None
    assert newest.step == 4


def test_a_full_disk_in_the_middle_leaves_a_run_that_continues(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from capibara.train import CheckpointWriteError, checkpoint

    real = checkpoint._write_item

    def full(path: Path, *rest: Any) -> None:
        if ".tmp-8-" in str(path) and path.name == "training":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_item", full)
        with pytest.raises(CheckpointWriteError, match=r"step 8 .*No space left.*step 4 is intact"):
            run(tmp_path)
    report = run(tmp_path)
    assert report.start_step == 4
    assert hex_losses(tmp_path) == hex_losses(undisturbed)


def test_text_that_does_not_fit_the_settings(tmp_path: Path) -> None:
    short = split_corpus(b"too short", name="short", validation_fraction=0.5)
    with pytest.raises(DataError, match="too short for one sequence"):
        run(tmp_path, corpus=short)
    with pytest.raises(ConfigError, match=r"vocab_size=64 is too small.*byte"):
        run(tmp_path, "model.vocab_size=64")
    assert os.listdir(tmp_path) == []


def test_it_learns(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        "train.steps=150",
        "optimizer.learning_rate=0.02",
        "model.embed_dim=32",
        "checkpoint.every_steps=150",
        "train.eval_every=150",
    )
    # Sentences that differ only in numbers; 8 bits per byte is knowing nothing.
    assert report.validation_bits_per_byte is not None
    assert report.validation_bits_per_byte < 3.0
    assert "bits per byte" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["step"] == 150


def test_utilisation_follows_from_the_measured_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import capibara.measure

    monkeypatch.setattr(capibara.measure, "matmul_rate", lambda dtype: 1e9)
    config = tiny_config(tmp_path, "train.steps=3")
    model = TinyModel(config)
    report = train(config, model, tiny_corpus())
    assert report.tokens_per_second is not None
    assert report.utilisation is not None
    expected = report.tokens_per_second * model.flops_per_token(16) / 1e9
    np.testing.assert_allclose(report.utilisation, expected)
    assert f"utilisation        {report.utilisation:.1%} of a matrix multiply's 1 GFLOP/s" in str(report)
    trained = [
        line for line in read_metrics(Path(report.directory) / "metrics.jsonl") if line["kind"] == "train"
    ]
    np.testing.assert_allclose(
        [line["utilisation"] for line in trained],
        [line["tokens_per_second"] * model.flops_per_token(16) / 1e9 for line in trained],
    )
    assert "a matrix multiply" not in str(dataclasses.replace(report, utilisation=None))
