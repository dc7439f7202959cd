"""Whole runs that meet a bad batch, a fault of the machine, or nothing at all for too long."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import python, tiny_config, tiny_corpus

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.train import (
    CheckpointDamagedError,
    CorruptionError,
    DivergedError,
    checkpoint_store,
    read_losses,
    restore_model,
    train,
    trainer,
)
from capibara.train.loop import Loop
from capibara.train.progress import SilentReporter
from capibara.train.recovery.guard import Guard
from capibara.train.recovery.replay import fingerprints, replayed
from capibara.train.recovery.rollback import Rollback
from capibara.train.recovery.skips import Skips
from capibara.train.recovery.watchdog import Watchdog
from capibara.train.saved import Facts, restore_state
from capibara.train.state import TrainState


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Without:
    """Batches without some of them."""

    def __init__(self, batches: Any, numbers: Sequence[int]) -> None:
        self.batches, self.left = batches, [n for n in range(100) if n not in numbers]
        self.batch_size, self.sequence_length = batches.batch_size, batches.sequence_length

    def batch(self, step: int) -> Any:
        return self.batches.batch(self.left[step])


def poisoned_model(config: ModularModelConfig, numbers: Sequence[int], factor: float) -> TinyModel:
    """Its loss is multiplied by ``factor`` on some batches, known by their bytes."""
    batches = tiny_corpus().batches(batch_size=4, sequence_length=16, seed=0)
    bad = np.stack([batches.batch(n) for n in numbers]) if numbers else np.zeros((0, 4, 17), np.int32)

    class Poisoned(TinyModel):
        def loss(self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True) -> Any:
            loss, (new_state, metrics) = super().loss(params, batch, state=state, key=key, train=train)
            tokens = batch["tokens"]
            hit = jnp.any(jnp.all(tokens[None] == bad, axis=(1, 2))) if tokens.shape == (4, 17) else False
            loss = loss * jnp.where(hit & train, factor, 1.0)
            return loss, (new_state, {**metrics, "cross_entropy": loss})

    return Poisoned(config)


def run(
    folder: Path,
    *overrides: str,
    bad: Sequence[int] = (),
    factor: float = math.inf,
    left_out: Sequence[int] = (),
) -> Warnings:
    config, reporter, data = tiny_config(folder, *overrides), Warnings(), tiny_corpus()
    if left_out:

        @dataclasses.dataclass(frozen=True)
        class Other(type(data)):  # type: ignore[misc]
            def batches(self, **settings: Any) -> Any:
                return Without(super().batches(**settings), left_out)

        data = Other(**{f.name: getattr(data, f.name) for f in dataclasses.fields(data)})
    train(config, poisoned_model(config, bad, factor), data, reporter=reporter, measure_utilisation=False)
    return reporter


def final_state(folder: Path) -> bytes:
    checkpoint = checkpoint_store(folder).newest()
    assert checkpoint is not None
    params, state = restore_model(checkpoint, TinyModel(tiny_config(folder)))
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state)))


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("bad", "factor", "settings"),
    [
        ([5], math.inf, []),
        ([5, 6, 9], math.nan, []),
        ([0, 11], math.inf, []),
        ([10], 50.0, ["recovery.spike_sigmas=12", "recovery.spike_window=8"]),
    ],
)
def test_a_run_goes_on_without_batches_on_which_the_loss_diverges(
    tmp_path: Path, bad: list[int], factor: float, settings: list[str]
) -> None:
    reporter = run(tmp_path / "bad", *settings, bad=bad, factor=factor)
    run(tmp_path / "never", *settings, left_out=bad)
    assert final_state(tmp_path / "bad") == final_state(tmp_path / "never")
    losses = [read_losses(tmp_path / name / "metrics.jsonl") for name in ("bad", "never")]
    assert losses[0] == losses[1]
    assert list(losses[0]) == list(range(1, 13))
    newest = checkpoint_store(tmp_path / "bad").newest()
    assert newest is not None
    assert Facts.of(newest).skipped == bad
    for number in bad:
        assert sum(f"go on without batch {number} " in text for text in reporter.warnings) == 1
    assert any("to compute the same steps again" in text for text in reporter.warnings)


@pytest.mark.slow
def test_a_resumed_run_leaves_out_the_same_batches(tmp_path: Path) -> None:
    run(tmp_path, "train.steps=8", "optimizer.schedule=constant", bad=[5])
    # The data is sound now: what was left out is known from the checkpoint alone.
    assert run(tmp_path, "optimizer.schedule=constant").warnings == []
    run(tmp_path / "never", "optimizer.schedule=constant", left_out=[5])
    assert final_state(tmp_path) == final_state(tmp_path / "never")


def test_a_run_gives_up_in_the_end(tmp_path: Path) -> None:
    reporter = Warnings()
    config = tiny_config(tmp_path, "recovery.max_skips=2")
    with pytest.raises(DivergedError, match=r"the loss became inf at step 6\. Nothing of that is saved"):
        train(
            config,
            poisoned_model(config, [5, 6, 7, 8], math.inf),
            tiny_corpus(),
            reporter=reporter,
            measure_utilisation=False,
        )
    newest = checkpoint_store(tmp_path).newest()
    assert newest is not None
    assert newest.step == 4
    assert len(reporter.warnings) == 3


def test_a_run_may_be_told_to_end_at_once(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="step 6"):
        run(tmp_path, "recovery.max_skips=0", bad=[5])


@pytest.mark.thin(2)
@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_fault_that_does_not_come_again_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    calls: list[int] = []

    class Faulty(Loop):
        def __post_init__(self) -> None:
            super().__post_init__()
            right = self.train_step

            def step(state: TrainState, batch: Any) -> Any:
                state, metrics = right(state, batch)
                calls.append(len(calls))
                return state, {**metrics, what: jnp.float32(np.nan)} if len(calls) == 7 else metrics

            self.train_step = step

    monkeypatch.setattr(trainer, "Loop", Faulty)
    reporter = run(tmp_path / "faulty")
    monkeypatch.undo()
    run(tmp_path / "never")
    assert final_state(tmp_path / "faulty") == final_state(tmp_path / "never")
    newest = checkpoint_store(tmp_path / "faulty").newest()
    assert newest is not None
    assert Facts.of(newest).skipped is None
    assert any("step 7 is sound when it is computed again" in text for text in reporter.warnings)


@pytest.mark.thin(4)
@pytest.mark.parametrize("wrong", ["a", [1, -1], [True], {"a": 1}])
def test_a_checkpoint_whose_list_of_skipped_batches_is_wrong(tmp_path: Path, wrong: Any) -> None:
    run(tmp_path, "train.steps=4")
    checkpoint = checkpoint_store(tmp_path).newest()
    assert checkpoint is not None
    with pytest.raises(CheckpointDamagedError, match=r"skipped=.*expected a list of numbers of batches"):
        Facts.of(dataclasses.replace(checkpoint, meta={**checkpoint.meta, "skipped": wrong}))


@pytest.mark.parametrize(
    "setting",
    ["recovery.max_skips=-1", "recovery.spike_window=2", "recovery.stuck_seconds=nan", "recovery.x=1"],
)
def test_settings_out_of_range(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        tiny_config(tmp_path, setting)


@hypothesis.given(st.lists(st.integers(0, 40), max_size=12))
def test_numbers_of_batches_are_those_of_a_list_without_them(steps: list[int]) -> None:
    skips, left = Skips(), list(range(200))
    for step in steps:
        assert skips.skip(step) == left.pop(step)
    assert [skips.number(step) for step in range(100)] == left[:100]
    for step in (0, 7, 60):
        assert Skips(skips.before(step)).number(step) == left[step]


def test_what_counts_as_a_spike() -> None:
    random = np.random.default_rng(0)
    guard = Guard(learning_rate=1e-3, sigmas=8.0, window=32)
    guard.know(2.0 + 0.1 * random.standard_normal(32))
    for step in range(100):
        guard.check(step, {"loss": 2.0 + 0.1 * float(random.standard_normal())})
    with pytest.raises(
        DivergedError, match=r"rose to 3\.5000 at step 7, more than recovery\.spike_sigmas=8"
    ) as caught:
        guard.check(7, {"loss": 3.5})
    assert caught.value.step == 7
    # No window of losses yet, or not asked for: only what is not finite counts.
    for other in (Guard(learning_rate=1.0, sigmas=8.0, window=32), Guard(learning_rate=1.0)):
        other.know([1.0] * 20)
        other.check(1, {"loss": 1e9})
        with pytest.raises(DivergedError, match="norm of the gradients became inf at step 2"):
            other.check(2, {"loss": 1.0, "grad_norm": math.inf})


def _state(seed: int) -> TrainState:
    key = jax.random.key(seed)
    params = {
        "a": jax.random.normal(key, (3, 5)),
        "b": jnp.arange(7, dtype=jnp.bfloat16),
        "c": jnp.ones((2, 2), bool),
    }
    opt_state = {"n": jnp.int32(3), "z": jnp.zeros((0, 4)), "half": jnp.ones(3, jnp.float16)}
    return TrainState.create(params, {"s": jnp.arange(4, dtype=jnp.int8)}, opt_state, seed=seed)


def test_a_step_that_gives_the_same_twice_is_taken_once() -> None:
    @jax.jit
    def step(state: TrainState, batch: Any) -> Any:
        params = {**state.params, "a": state.params["a"] * 1.5 + batch}
        return dataclasses.replace(state, params=params, step=state.step + 1), {"loss": batch}

    state = _state(0)
    after, metrics = replayed(step, state, jnp.float32(2.0), step=1)
    np.testing.assert_allclose(
        after.params["a"], np.asarray(state.params["a"]) * np.float32(1.5) + 2, rtol=1e-6
    )
    assert (int(after.step), float(metrics["loss"])) == (1, 2.0)


@pytest.mark.parametrize("leaf", ["a", "b", "c"])
def test_one_changed_bit_of_a_replayed_step_is_found(leaf: str) -> None:
    calls: list[int] = []

    def step(state: TrainState, batch: Any) -> Any:
        calls.append(0)
        array = np.array(state.params[leaf])
        if len(calls) == 2:
            array.view(np.uint8).reshape(-1)[-1] ^= 1
        return dataclasses.replace(state, params={**state.params, leaf: jnp.asarray(array)}), {}

    with pytest.raises(CorruptionError, match=rf"step 9 was computed twice.*1 arrays.*{leaf}") as caught:
        replayed(step, _state(1), None, step=9)
    assert caught.value.devices == (str(jax.devices()[0]),)


@hypothesis.given(st.integers(0, 3 * 5 * 4 - 1), st.integers(0, 7))
@hypothesis.settings(max_examples=40)
def test_every_bit_counts_in_a_fingerprint(place: int, bit: int) -> None:
    array = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
    other = array.copy()
    other.view(np.uint8).reshape(-1)[place] ^= 1 << bit
    assert fingerprints({"x": jnp.asarray(array)}) != fingerprints({"x": jnp.asarray(other)})


@pytest.mark.slow
def test_a_run_goes_back_once_for_a_device_that_computes_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[int] = []

    def faulty(train_step: Any, state: TrainState, batch: Any, *, step: int) -> Any:
        wrong.append(step)
        if len(wrong) == 3:
            raise CorruptionError(f"step {step} was computed twice.", devices=("cpu:0",))
        return replayed(train_step, state, batch, step=step)

    monkeypatch.setattr("capibara.train.loop.replayed", faulty)
    reporter = run(tmp_path / "faulty", "recovery.replay_every=3")
    assert wrong == [3, 6, 9, 9, 12]
    assert [text for text in reporter.warnings if "Going back to step 8" in text]
    wrong[:] = [0, 0]
    monkeypatch.undo()
    run(tmp_path / "never")
    assert final_state(tmp_path / "faulty") == final_state(tmp_path / "never")


def test_a_device_that_computes_wrongly_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(train_step: Any, state: TrainState, batch: Any, *, step: int) -> Any:
        raise CorruptionError(f"step {step} was computed twice.", devices=("cpu:0",))

    monkeypatch.setattr("capibara.train.loop.replayed", faulty)
    with pytest.raises(CorruptionError):
        run(tmp_path, "recovery.replay_every=3")


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_stuck_run_is_named_with_its_stacks() -> None:
    said: list[str] = []
    with open("/dev/null", "w") as nowhere, Watchdog(0.2, warn=said.append, stream=nowhere) as watchdog:
        watchdog.beat("step 2 was computed")
        watchdog.beat("step 3 was computed")
        wait_for(lambda: said)
    assert len(said) == 1
    assert "process 0 of 1" in said[0]
    assert "while step 3 was computed" in said[0]


def test_a_watchdog_allows_what_took_long_before() -> None:
    watchdog = Watchdog(0.5)
    watchdog.beat("a")
    # Not one step is done: compilers, first reads of a disk …
    assert watchdog.allowed == 30.0
    watchdog._since -= 4.0
    watchdog.beat("b")
    assert watchdog.allowed == pytest.approx(40.0, abs=1.0)
    with watchdog.during("c", "checkpoint", parts=2):
        assert watchdog.allowed == 30.0
        watchdog._since -= 6.0
    assert watchdog.allowed == pytest.approx(40.0, abs=1.0)
    with watchdog.during("d", "checkpoint"):
        assert watchdog.allowed == pytest.approx(30.0, abs=1.0)
    quick = Watchdog(0.5)
    quick.beat("a")
    quick.beat("b")
    assert quick.allowed == 0.5


_STUCK = """
import threading
from capibara.train.recovery.watchdog import Watchdog

def waits_for_nobody():
    threading.Event().wait()

with Watchdog(0.3, end=True) as watchdog:
    watchdog.beat("a")
    watchdog.beat("b")
    waits_for_nobody()
"""


def test_a_stuck_process_can_end_itself() -> None:
    done = python("-c", _STUCK)
    assert done.returncode == 75
    assert "seems stuck" in done.stderr
    assert "waits_for_nobody" in done.stderr


_HELD = """
import ctypes
from capibara.train.recovery import watchdog as module

module._LAST = 0.2

def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(60)

with module.Watchdog(1.0, end=True) as watchdog:
    watchdog.beat("a")
    watchdog.beat("b")
    while True:  # until the watching thread had its turn
        import time
        time.sleep(0.4)
        holds_the_interpreter()
"""


@pytest.mark.slow
def test_a_library_that_holds_the_interpreter_is_found_too() -> None:
    done = python("-c", _HELD)
    assert done.returncode == 1
    assert "holds_the_interpreter" in done.stderr


def test_stacks_without_a_file() -> None:
    stream = io.StringIO()
    with Watchdog(0.1, stream=stream) as watchdog:
        watchdog.beat("this test began")
        watchdog.beat("this test waited")
        wait_for(lambda: "test_stacks_without_a_file" in stream.getvalue())
    assert "while this test waited" in stream.getvalue()


def test_steps_that_diverge_by_turns_do_not_go_on_for_ever() -> None:
    reporter = Warnings()
    rollback = Rollback(Skips(), max_skips=3, reporter=reporter)
    errors = [DivergedError("x", step=step) for step in (7, 6, 7, 6, 7)]
    for error in errors[:3]:
        rollback.after(error, 4)
        rollback.sound(5)
    with pytest.raises(DivergedError):
        rollback.after(errors[3], 4)
    # A newer checkpoint is progress.
    rollback.after(DivergedError("x", step=9), 8)


def test_the_old_state_is_gone_when_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    seen: list[int] = []

    def restore(*args: Any) -> Any:
        seen.append(live())
        return restore_state(*args)

    monkeypatch.setattr(trainer, "restore_state", restore)
    before = live()
    run(tmp_path, bad=[5])
    assert len(seen) == 2
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(TinyModel(tiny_config(tmp_path)).params))
    # Neither parameters nor the two moments of any step.
    assert max(seen) - before < 2 * state
