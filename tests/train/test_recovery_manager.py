"""Functions and trainings that go on after devices have failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.errors import ConfigError
from capibara.train import read_losses, train, trainer
from capibara.train.loop import Loop
from capibara.train.progress import SilentReporter
from capibara.train.recovery.manager import DeviceFailedError, TpuError, TpuRecoveryManager, answering

LOST = "UNAVAILABLE: connection to the device was lost"


def manager(**settings: Any) -> TpuRecoveryManager:
    return TpuRecoveryManager(**{"wait_seconds": 0.0, **settings})


class Failing:
    """Fails at first, then gives what it is called with, doubled."""

    def __init__(self, times: int, text: str = LOST) -> None:
        self.left, self.text, self.calls = times, text, 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise JaxRuntimeError(self.text)
        return x * 2


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_what_may_pass_is_tried_again(failures: int) -> None:
    recovery, function = manager(), Failing(failures)
    np.testing.assert_array_equal(recovery.guard(function)(jnp.arange(3)), [0, 2, 4])
    assert function.calls == failures + 1
    assert [event.action for event in recovery.events] == ["retried"] * failures


def test_it_gives_up_after_max_attempts() -> None:
    recovery, function = manager(max_attempts=2), Failing(9)
    with pytest.raises(DeviceFailedError, match=r"UNAVAILABLE: connection.*failed 2 times.*doctor") as caught:
        recovery.run(function, jnp.ones(2))
    assert function.calls == 2
    assert isinstance(caught.value, TpuError)
    assert isinstance(caught.value.__cause__, JaxRuntimeError)
    assert [event.action for event in recovery.events] == ["retried", "gave up"]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("RESOURCE_EXHAUSTED: Out of memory", "batch_size"), ("INVALID_ARGUMENT: no", "not valid")],
)
def test_what_will_not_pass_is_not_tried_again(text: str, remedy: str) -> None:
    function = Failing(1, text)
    with pytest.raises(DeviceFailedError, match=f"{text}.*{remedy}"):
        manager().run(function, jnp.ones(2))
    assert function.calls == 1


def test_a_real_lack_of_memory() -> None:
    with pytest.raises(DeviceFailedError, match="RESOURCE_EXHAUSTED"):
        manager().run(lambda: jnp.ones((1 << 21, 1 << 21)))


def test_nothing_is_tried_again_without_auto_recovery() -> None:
    function = Failing(1)
    with pytest.raises(DeviceFailedError):
        manager(auto_recovery=False).run(function, jnp.ones(2))
    assert function.calls == 1


def test_other_errors_pass_through() -> None:
    def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError), manager().recovery_context() as recovery:
        recovery.run(wrong)


def test_other_devices_are_taken() -> None:
    places: list[Any] = []

    def function(x: Any, times: int) -> Any:
        places.append(x.devices())
        if len(places) <= 2:
            raise JaxRuntimeError(LOST)
        return x * times

    other = jax.devices()[-1]
    recovery = manager(max_attempts=2, fallback_to_gpu=True, fallback=[other])
    result = recovery.run(function, jnp.ones(3), times=3)
    assert result.devices() == {other}
    assert [event.action for event in recovery.events] == ["retried", "moved"]
    with pytest.raises(DeviceFailedError, match="no GPUs to fall back to"):
        manager(fallback_to_gpu=True, fallback=[]).run(Failing(9), jnp.ones(2))


def test_donated_inputs_are_not_tried_again() -> None:
    def function(x: Any) -> Any:
        x.delete()
        raise JaxRuntimeError(LOST)

    with pytest.raises(DeviceFailedError, match="donated its inputs"):
        manager().run(function, jnp.ones(2))


def test_an_error_that_leaves_the_context_says_what_to_do() -> None:
    with pytest.raises(DeviceFailedError, match="capibara doctor"), manager().recovery_context():
        raise JaxRuntimeError(LOST)


@pytest.mark.parametrize(
    "settings", [{"max_attempts": 0}, {"checkpoint_frequency": True}, {"wait_seconds": float("nan")}]
)
def test_arguments_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TpuRecoveryManager(**settings)


def test_devices_that_do_not_answer_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answering() == jax.local_devices()
    said: list[str] = []

    def lost(*_: Any) -> Any:
        raise JaxRuntimeError(LOST)

    monkeypatch.setattr(jax, "device_put", lost)
    assert answering(warn=said.append) == []
    assert LOST in said[0]


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def failing_loop(steps: list[int]) -> type[Loop]:
    """A loop that fails once at each call of a step with these numbers."""
    calls: list[int] = []

    class Lost(Loop):
        def __post_init__(self) -> None:
            super().__post_init__()
            right = self.train_step

            def step(state: Any, batch: Any) -> Any:
                calls.append(0)
                if len(calls) in steps:
                    raise JaxRuntimeError(LOST)
                return right(state, batch)

            self.train_step = step

    return Lost


def test_a_training_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "never", "checkpoint.every_steps=5")
    train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    monkeypatch.setattr(trainer, "Loop", failing_loop([3, 11]))
    config, reporter = tiny_config(tmp_path / "lost"), Warnings()
    recovery = manager(checkpoint_frequency=5, reporter=reporter)
    report = recovery.train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False, fresh=True)
    assert (report.step, report.reason, report.start_step) == (12, "finished", 5)
    losses = [read_losses(tmp_path / name / "metrics.jsonl") for name in ("never", "lost")]
    assert losses[0] == losses[1]
    assert [event.action for event in recovery.events] == ["resumed", "resumed"]
    assert [
        text.endswith(f"Going on from step {step}.")
        for text, step in zip(reporter.warnings, (0, 5), strict=True)
    ]


def test_a_training_goes_on_elsewhere_if_no_device_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "Loop", failing_loop([7]))
    asked: list[Any] = []

    def answers(devices: Any = None, *, warn: Any = None) -> list[Any]:
        asked.append(devices)
        return [] if len(asked) == 1 else list(devices)

    monkeypatch.setattr("capibara.train.recovery.manager.answering", answers)
    config, other = tiny_config(tmp_path), jax.devices()
    recovery = manager(checkpoint_frequency=4, fallback_to_gpu=True, fallback=other)
    report = recovery.train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert (report.step, asked) == (12, [None, other])
    asked.clear()
    monkeypatch.setattr(trainer, "Loop", failing_loop([7]))
    with pytest.raises(DeviceFailedError, match="No device answers any more"):
        manager().train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False, fresh=True)


def test_an_error_without_a_code_may_pass() -> None:
    for text in ("Out of reach", "the device is gone", ""):
        function = Failing(1, text)
        manager().run(function, jnp.ones(2))
        assert function.calls == 2


def test_a_training_without_progress_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "Loop", failing_loop(list(range(6, 100))))
    config = tiny_config(tmp_path)
    recovery = manager(checkpoint_frequency=4, max_attempts=2)
    with pytest.raises(DeviceFailedError, match="The checkpoint of step 4 stays"):
        recovery.train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert [event.action for event in recovery.events] == ["resumed", "gave up"]
