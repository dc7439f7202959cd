"""A training that moves to other devices while it runs is the one that stays where it is."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest
from emulation import emulated
from other_process import run_apart
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.errors import ConfigError
from capibara.hardware import Chip, ChipError, PriceError, UnknownPriceError, get_chip
from capibara.launch import launch_processes
from capibara.train import TpuDistributedTrainer, read_losses, train
from capibara.train.errors import ScalingError
from capibara.train.loop import Utilisation
from capibara.train.scaling.autoscaler import TpuAutoScaler, active_scaler

RUN = """
import json, sys, tempfile, warnings
warnings.simplefilter("error")
from pathlib import Path
import jax
import numpy as np
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
from capibara.train import checkpoint_store, read_losses, restore_model, train

settings, moments = json.loads(sys.argv[1]), json.loads(sys.argv[2])
folder = Path(tempfile.mkdtemp())
looked = 0

def devices():
    # How many there are, after how many looks: one before each step, and one more after each move.
    global looked
    looked += 1
    count = [there for after, there in moments if looked > after][-1]
    if count < 0:
        return jax.devices()[count:]  # the last ones
    return jax.devices()[:count]

def outcome(name, **options):
    config = tiny_config(folder / name, *settings)
    report = train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False, **options)
    losses = read_losses(folder / name / "metrics.jsonl")
    params, state = restore_model(checkpoint_store(folder / name).newest(), TinyModel(config))
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves((params, state))]
    return report, losses, np.concatenate(leaves)

_, expected, params = outcome("alone", devices=jax.devices()[:1], elastic=True)
scaler = TpuAutoScaler(1, 32, 0.8, None, "utilization", devices=devices, cooldown=0.0, every=1000)
with scaler.managed_scaling():
    report, losses, moved = outcome("moved")
print("RESULT", json.dumps({
    "losses": list(losses.values()), "expected": list(expected.values()), "steps": list(losses) == list(expected),
    "difference": float(abs(moved - params).max()), "devices": report.devices,
    "decisions": [[d.action, d.before, d.after, d.step] for d in scaler.decisions],
}))
"""
SETTINGS = ("train.log_every=1", "checkpoint.every_steps=5", "optimizer.learning_rate=0.01")


def moved(devices: int, moments: list[tuple[int, int]], *settings: str) -> dict[str, Any]:
    import json

    found = run_apart(
        RUN, json.dumps([*SETTINGS, *settings]), json.dumps(moments), XLA_FLAGS=emulated(devices, quick=True)
    )
    assert found["steps"]  # each once, in order
    assert found["losses"] == pytest.approx(found["expected"], rel=2e-5)
    assert found["losses"][-1] < found["losses"][0] - 0.02
    assert found["difference"] < 1e-3
    return found


@pytest.mark.slow
def test_a_run_moves_between_devices() -> None:
    found = moved(2, [(0, 2), (3, -1), (6, 2)], "train.steps=10")
    assert found["decisions"] == [["shrink", 2, 1, 3], ["grow", 1, 2, 6]]
    assert found["devices"] == 2


@pytest.mark.slow  # more programs
def test_a_run_moves_to_other_devices_of_a_mesh() -> None:
    mesh = ("tpu.enabled=true", "tpu.num_chips=4", "tpu.topology=2x2", 'tpu.mesh_axes=["data","model"]')
    found = moved(4, [(0, 4), (3, -2), (6, 4)], "batch_size=8", "train.steps=12", *mesh)
    assert found["decisions"] == [["shrink", 4, 2, 3], ["grow", 2, 4, 6]]
    assert found["devices"] == 4


@pytest.mark.slow  # programs over 32 devices
@pytest.mark.parametrize(
    "mesh",
    [
        (),
        ("tpu.enabled=true", "tpu.num_chips=32", "tpu.topology=32", 'tpu.mesh_axes=["data"]'),
        ("tpu.enabled=true", "tpu.num_chips=32", "tpu.topology=8x4", 'tpu.mesh_axes=["data","model"]'),
        (
            "tpu.enabled=true",
            "tpu.num_chips=32",
            "tpu.topology=8x2x2",
            'tpu.mesh_axes=["data","fsdp","model"]',
        ),
    ],
    ids=["replicated", "data", "data-model", "data-fsdp-model"],
)
def test_32_devices_lose_half_of_them_and_get_them_back(mesh: tuple[str, ...]) -> None:
    found = moved(32, [(0, 32), (15, 16), (30, 32)], "batch_size=32", "train.steps=50", *mesh)
    assert found["decisions"] == [["shrink", 32, 16, 15], ["grow", 16, 32, 30]]
    assert found["devices"] == 32


class Lost:
    """Devices of which there are none any more after some looks."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> list[Any]:
        self.left -= 1
        return jax.devices() if self.left >= 0 else []


def test_a_run_without_devices_ends_with_what_it_had(tmp_path: Any) -> None:
    config = tiny_config(tmp_path, "train.log_every=1")
    scaler = TpuAutoScaler(1, 4, devices=Lost(6))
    with pytest.raises(ScalingError, match="none of the devices"), scaler.managed_scaling():
        train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert active_scaler() is None
    assert scaler.decisions == ()
    # The checkpoint of step 4 is there, and the run goes on from it.
    report = train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert (report.start_step, report.step) == (4, 12)
    assert list(read_losses(tmp_path / "metrics.jsonl")) == list(range(1, 13))


FAILURES = """
import json, sys, tempfile, warnings
warnings.simplefilter("error")
import jax
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
from capibara.jax.tpu_v4.recovery import TpuRecoveryManager
from capibara.train import read_losses, train, trainer
from capibara.train.loop import Loop
from capibara.train.recovery import manager
from capibara.train.scaling import autoscaler

class Lost(Loop):
    def __post_init__(self):
        super().__post_init__()
        right = self.train_step

        def step(state, batch):
            calls.append(len(self.run.placement.devices))
            if len(calls) == 8:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: a device is gone")
            return right(state, batch)

        self.train_step = step

def answering(devices=None, **_):
    return [device for device in devices or jax.devices() if device.id < 2]

def losses(name):
    return list(read_losses(f"{folder}/{name}/metrics.jsonl").values())

folder, calls = tempfile.mkdtemp(), []
mesh = ("tpu.enabled=true", "tpu.num_chips=4", "tpu.topology=2x2", 'tpu.mesh_axes=["data","model"]')
mesh += ("train.log_every=1",)
options = {"measure_utilisation": False}
config = tiny_config(f"{folder}/whole", *mesh)
train(config, TinyModel(config), tiny_corpus(), **options)
trainer.Loop, manager.answering, autoscaler.answering = Lost, answering, answering
config, scaler = tiny_config(f"{folder}/scaled", *mesh), TpuAutoScaler(1, 4)
with scaler.managed_scaling():
    scaled = train(config, TinyModel(config), tiny_corpus(), **options)
counts, calls[:] = list(calls), []
config, recovery = tiny_config(f"{folder}/recovered", *mesh), TpuRecoveryManager(checkpoint_frequency=4, wait_seconds=0)
recovered = recovery.train(config, TinyModel(config), tiny_corpus(), **options)
print("RESULT", json.dumps({
    "whole": losses("whole"), "scaled": losses("scaled"), "recovered": losses("recovered"),
    "counts": counts, "calls": calls, "reasons": [one.reason for one in scaler.decisions],
    "devices": [scaled.devices, recovered.devices],
}))
"""


@pytest.mark.slow  # five programs
def test_a_run_whose_devices_fail_goes_on_with_those_that_answer() -> None:
    found = run_apart(FAILURES, XLA_FLAGS=emulated(4, quick=True))
    for name in ("scaled", "recovered"):
        assert found[name] == pytest.approx(found["whole"], rel=2e-5)
    # The eighth step fails, and the newest checkpoint is of step 4.
    assert found["counts"] == found["calls"] == [4] * 8 + [2] * 8
    assert found["reasons"] == ["2 of 4 devices are gone"]
    assert found["devices"] == [2, 2]


class Device:
    platform = "cpu"
    process_index = 0

    def __init__(self, number: int) -> None:
        self.id = number


def test_a_failure_of_a_step_leaves_out_what_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = [Device(number) for number in range(6)]
    scaler = TpuAutoScaler(2, 4, devices=lambda: devices)
    controller = scaler.controller(devices[:4], lambda there: [n for n in (1, 2, 4) if n <= len(there)])
    assert controller.asks(0) == 0
    lost, invalid = (
        jax.errors.JaxRuntimeError(text) for text in ("UNAVAILABLE: gone", "INVALID_ARGUMENT: no")
    )
    answers = set(devices)
    monkeypatch.setattr(
        "capibara.train.scaling.autoscaler.answering",
        lambda some, **_: [device for device in some if device in answers],
    )
    # All answer, or it will not pass: nobody can help.
    for error in (lost, invalid):
        with pytest.raises(type(error), match=str(error)):
            controller.after(error, 1)
    answers -= {devices[1]}
    controller.after(lost, 1)
    assert controller.devices == (devices[0], *devices[2:5])  # there were others
    answers -= {devices[0], devices[2]}
    controller.after(lost, 2)
    assert controller.devices == tuple(devices[3:5])
    assert [one.action for one in scaler.decisions] == ["replace", "shrink"]
    answers -= {devices[4]}
    controller.after(lost, 3)
    assert controller.devices == (devices[3], devices[5])
    answers.clear()
    with pytest.raises(ScalingError, match="2 to 4 chips are allowed"):
        controller.after(lost, 4)


def test_measurements_are_kept() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"]

    trainer = TpuDistributedTrainer(
        (lambda key: {"w": jax.random.normal(key, (4, 2))}, apply),
        jax.sharding.Mesh(jax.devices()[:1], ("data",)),
    )
    batch = (jax.numpy.ones((8, 4)), jax.numpy.zeros(8, "int32"))
    scaler = TpuAutoScaler(1, 1, 0.5, 10.0, "performance", every=3)
    with scaler.managed_scaling() as same:
        assert same is scaler
        assert active_scaler() is scaler
        trainer.train([batch] * 14)
    # The first step, one alone, three that are measured, one alone …
    assert [load.step for load in scaler.history] == [5, 9, 13]
    for load in scaler.history:
        assert load.chips == 1
        assert 0 < load.utilization <= 1
        assert load.seconds > load.host_seconds >= 0
    assert scaler.decisions == ()


def test_a_failed_move_puts_back_all_that_a_place_makes() -> None:
    from capibara.train.scaling.moves import _PLACED

    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"]

    trainer = TpuDistributedTrainer(
        (lambda key: {"w": jax.random.normal(key, (4, 2))}, apply),
        jax.sharding.Mesh(jax.devices()[:1], ("data",)),
    )
    before = dict(vars(trainer))
    trainer._place(trainer.mesh, trainer.layout)
    changed = {name for name, value in vars(trainer).items() if value is not before.get(name)}
    assert {"placement", "_step", "_described", "_feeder"} <= changed <= set(_PLACED)


def test_what_was_not_scaled_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing was trained inside it"), TpuAutoScaler().managed_scaling():
        pass
    with warnings.catch_warnings(), pytest.raises(KeyError), TpuAutoScaler().managed_scaling():
        raise KeyError
    with (
        pytest.raises(ConfigError, match="another one is active"),
        TpuAutoScaler().managed_scaling(),
        TpuAutoScaler().managed_scaling(),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ConfigError, "every: got 0"),
        ({"devices": [1]}, ConfigError, r"devices: got list, expected a function"),
        ({"scaling_policy": "cheap"}, ConfigError, "scaling_policy: got 'cheap'"),
        # 32 v4 chips cost more than 100 dollars.
        (
            {"min_chips": 32, "cost_limit_per_hour": 100.0, "chip": "tpu-v4"},
            ConfigError,
            r"min_chips=32 cost: \$103.04",
        ),
        ({"chip": "tpu-v4", "region": "mars", "cost_limit_per_hour": 1.0}, UnknownPriceError, "mars"),
        ({"cost_limit_per_hour": -1.0}, ConfigError, "cost_limit_per_hour: got -1.0"),
        ({"term": "forever"}, PriceError, "term: got 'forever'"),
        ({"chip": "tpu-v99"}, ChipError, "tpu-v99"),
    ],
)
def test_invalid_arguments_name_themselves(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TpuAutoScaler(**options)


@pytest.mark.parametrize("name", ["nvidia-a100-80gb", "a chip that nobody knows"])
def test_a_limit_or_a_region_needs_the_price_of_the_devices(name: str) -> None:
    chip = Chip(name=name, title=name, vendor="unknown", kind="gpu")
    with pytest.raises(UnknownPriceError, match="price of"):
        TpuAutoScaler(cost_limit_per_hour=9.5).rules_for(chip)
    with pytest.raises(UnknownPriceError, match="in region 'mars'"):
        TpuAutoScaler(region="mars").rules_for(chip)
    assert TpuAutoScaler().rules_for(chip).price is None
    assert TpuAutoScaler(cost_limit_per_hour=9.5, chip="tpu-v4").rules_for(chip).price == 3.22
    assert TpuAutoScaler(cost_limit_per_hour=9.5).rules_for(None).price == 3.22
    # Chips that cost less than emulated ones, in a region that has none of those, are not refused beforehand.
    cheap = TpuAutoScaler(8, cost_limit_per_hour=10.0, region="us-west4")
    assert 0 < (cheap.rules_for(get_chip("tpu-v5e")).price or 0) <= 1.25


@pytest.mark.parametrize("found", [None, ["TPU_0"], 3])
def test_what_is_no_list_of_devices_is_refused(found: Any) -> None:
    with pytest.raises(ConfigError, match="devices: the function gave"):
        TpuAutoScaler(devices=lambda: found).devices()


def test_several_trainers_do_not_decide_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TpuDistributedTrainer(
        (lambda key: {"w": jax.numpy.ones((4, 2))}, lambda params, x: x @ params["w"])
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with (
        pytest.warns(UserWarning, match="nothing was trained"),
        TpuAutoScaler().managed_scaling(),
        pytest.raises(ConfigError, match="there are 2"),
    ):
        trainer.train([(jax.numpy.ones((8, 4)), jax.numpy.zeros(8, "int32"))])


PARTIAL = """
import json
import jax, numpy as np
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
from capibara.train import TpuDistributedTrainer

def init(key):
    return {"w": jax.random.normal(key, (4, 2))}

looks = 0

def devices():
    # Half of them for three looks, then all.
    global looks
    looks += 1
    return jax.devices()[: 2 if looks <= 3 else 4]

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
trainer = TpuDistributedTrainer((init, lambda params, x: x @ params["w"]), mesh)
rows = [8, 8, 8, 2, 2, 8, 16]
data = [(np.ones((n, 4), "float32"), np.zeros(n, "int32")) for n in rows]
scaler = TpuAutoScaler(1, 4, 0.8, None, "utilization", devices=devices, cooldown=0.0, every=1000)
with scaler.managed_scaling():
    report = trainer.train(data)
print("RESULT", json.dumps({"dropped": report.dropped_rows, "steps": report.steps,
                            "decisions": [[d.before, d.after, d.step] for d in scaler.decisions]}))
"""


@pytest.mark.slow
def test_the_rest_of_a_data_set_that_no_longer_divides_is_left_out() -> None:
    found = run_apart(PARTIAL, XLA_FLAGS=emulated(4, quick=True))
    # The first rest is a step on two devices; all four are back before the second one.
    assert found == {"dropped": 2, "steps": 6, "decisions": [[4, 2, 0], [2, 4, 4]]}


BEST = """
import json, tempfile
from pathlib import Path
import jax
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
from capibara.train import checkpoint_store, train
from capibara.train.progress import SilentReporter
from capibara.train.saved import Facts
from capibara.train.signals import StopFlag

folder, stop, looks = Path(tempfile.mkdtemp()), StopFlag(), 0

def devices():
    # One of two is gone before the fifth step.
    global looks
    looks += 1
    return jax.devices()[: 2 if looks <= 4 else 1]

class Stops(SilentReporter):
    def note(self, text):
        stop.requested = stop.requested or text.startswith("moved")

config = tiny_config(folder, "train.eval_every=4", "checkpoint.keep_best=true")
with TpuAutoScaler(1, 2, devices=devices).managed_scaling() as scaler:
    report = train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False, reporter=Stops(), stop=stop)
store = checkpoint_store(folder)
print("RESULT", json.dumps({
    "moves": [[d.before, d.after, d.step] for d in scaler.decisions], "reason": report.reason, "steps": store.steps(),
    "best": store.best_step(), "validated": Facts.of(store.open(4)).validation is not None,
}))
"""


@pytest.mark.slow
def test_a_move_does_not_write_the_best_checkpoint_again_without_its_validation() -> None:
    assert run_apart(BEST, XLA_FLAGS=emulated(2, quick=True)) == {
        "moves": [[2, 1, 4]],
        "reason": "interrupted",
        "steps": [4],
        "best": 4,
        "validated": True,
    }


def test_utilisation_is_of_the_devices_that_a_run_has_moved_to() -> None:
    class Device:
        platform = "tpu"

    whole = Utilisation(flops_per_token=10.0, device_flops=8e3)
    half = whole.on([Device(), Device()], 4)
    assert half.of(100.0) == 2 * whole.of(100.0) == pytest.approx(0.25)
    assert whole.on(jax.devices("cpu"), 4) == whole


LOST = """
import sys
from capibara.train import join_processes, train
join_processes()
import jax
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler

looks = 0

def devices():
    global looks
    looks += 1
    return jax.devices() if looks < 6 else []

config = tiny_config(sys.argv[1])
with TpuAutoScaler(1, 4, devices=devices).managed_scaling():
    train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
"""


@pytest.mark.slow  # two processes
def test_all_processes_end_when_no_devices_are_left(tmp_path: Path) -> None:
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text(LOST)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    command = [sys.executable, str(program), str(tmp_path / "run")]
    with open(said, "wb") as stream:
        code = launch_processes(
            command, 2, devices=1, grace=60.0, environment=environment, out=stream, err=stream
        )
    text = said.read_text()
    assert code == 1, text
    # Each raises it itself; none is left to wait until JAX gives it up.
    assert "[0] capibara.train.errors.ScalingError: no number of chips is within the limits" in text
    assert "[1] capibara.train.errors.ScalingError: another process finds no devices" in text
    assert "SIGABRT" not in text
