"""Load and advice: constructed loads with answers by hand, a plain simulation as oracle, and invalid input."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from other_process import run_apart
from vendor_libraries import FakeDevice, libtpu

from capibara.config import ModularModelConfig, TPUConfig
from capibara.config.tpu_config import ScalingConfig
from capibara.observe.errors import ReshardingError
from capibara.observe.monitor import (
    DeviceReading,
    MachineSource,
    MonitorError,
    Reading,
    TpuRealTimeMonitor,
    sources,
)
from capibara.observe.resharding import advise_resharding
from capibara.sharding import Layout

CONFIG = TPUConfig(num_chips=8, topology="2x4")
BATCH, HIDDEN = PartitionSpec(("data", "model"), None), PartitionSpec(None, ("data", "model"))


class Played:
    """A source with a given utilization and memory use of each device, one reading a second."""

    def __init__(self, *readings: Sequence[tuple[float | None, float | None]]) -> None:
        self.readings, self.at = readings, 0

    def read(self) -> Reading:
        values = self.readings[min(self.at, len(self.readings) - 1)]
        self.at += 1
        devices = [
            DeviceReading(
                f"GPU_{number}",
                "X",
                None if full is None else int(100 * full),
                100,
                busy,
                reasons={} if busy is not None else {"utilization": "Not Supported"},
            )
            for number, (busy, full) in enumerate(values)
        ]
        return Reading(float(self.at), {}, devices=devices)

    def clock(self) -> float:
        return float(self.at)


def watched(*readings: Sequence[tuple[float | None, float | None]]) -> TpuRealTimeMonitor:
    source = Played(*readings)
    monitor = TpuRealTimeMonitor(100, {}, source=source, clock=source.clock)
    for _ in readings:
        monitor.update()
    return monitor


TWO = TPUConfig(num_chips=2, topology="1x2")


def test_load_is_the_mean_of_recent_readings():
    monitor = watched([(0.0, 0.1), (1.0, 0.1)], [(0.5, 0.1), (0.5, 0.1)], [(1.0, 0.3), (None, 0.1)])
    load = monitor.load(TWO)
    assert load.metric == "utilization"
    assert load.values.tolist() == [[0.5, 0.75]]
    assert (load.readings, load.seconds, load.names) == (3, 2.0, ("GPU_0", "GPU_1"))
    assert monitor.load(TWO, seconds=1.5).values.tolist() == [[0.75, 0.5]]
    full = monitor.load(TWO, metric="memory_usage")
    np.testing.assert_allclose(full.values, [[0.5 / 3, 0.1]])
    assert TPUConfig(num_chips=2, topology="1x2", scaling_config=ScalingConfig(0.6)).detect_hotspots(
        load
    ) == [(0, 1)]
    assert load.name(0, 1) == "GPU_1"


def test_memory_stands_in_for_utilization_and_says_so():
    monitor = watched([(None, 0.25), (None, None)])
    load = monitor.load(TWO)
    assert load.metric == "memory_usage"
    assert load.values[0, 0] == 0.25
    assert math.isnan(load.values[0, 1])
    assert set(load.reasons) == {"GPU_1"}
    assert json.loads(json.dumps(load.to_dict()))["values"] == [[0.25, None]]
    assert any("not time" in note for note in advise_resharding(load, TWO).notes)
    load = monitor.load(TWO, metric="utilization")
    assert np.isnan(load.values).all()
    advice = advise_resharding(load, TWO)
    assert (advice.pattern, advice.spec) == ("unknown", None)
    assert "Not Supported" in advice.reason
    assert advice.to_dict()["most"] is None


def test_load_of_a_program_on_a_mesh(monkeypatch: pytest.MonkeyPatch):
    """Devices stand where the mesh has them, and those of another process are unknown."""
    jax.devices()  # a monitor asks no JAX that has not started
    devices = [FakeDevice("tpu", number, "TPU v5e", 10) for number in range(4)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(sources, "live_array_bytes", lambda exact: 7)
    libtpu(monkeypatch, duty_cycle_pct=["10", "20", "30", "90"])
    monitor = TpuRealTimeMonitor(source=MachineSource())
    far = FakeDevice("tpu", 9, "TPU v5e", 10)
    grid = np.array([[devices[3], devices[0]], [devices[1], far]], dtype=object)
    mesh: Any = type("Mesh", (), {"devices": grid})()
    load = monitor.load(TPUConfig(num_chips=4, topology="2x2"), mesh=mesh)
    np.testing.assert_allclose(load.values, [[0.9, 0.1], [0.2, np.nan]])
    assert "another process" in load.reasons["TPU_9"]
    assert TPUConfig(num_chips=4, topology="2x2").detect_hotspots(load) == [(0, 0)]
    with pytest.raises(MonitorError, match="mesh: got a mesh of 2x2 devices, expected 1x4"):
        monitor.load(TPUConfig(num_chips=4, topology="1x4"), mesh=mesh)


CPUS = """
import json
import jax
from capibara.config import TPUConfig
from capibara.observe.monitor import MonitorError, TpuRealTimeMonitor
jax.devices()
monitor = TpuRealTimeMonitor()
load = monitor.load(TPUConfig(num_chips=8, topology="2x4"))
try:
    monitor.load(TPUConfig())
except MonitorError as error:
    wrong = str(error)
print("RESULT", json.dumps([load.to_dict(), wrong]))
"""


def test_emulated_devices_have_no_load_of_their_own():
    load, wrong = run_apart(CPUS, XLA_FLAGS=emulated(8))
    assert load["values"] == [[None] * 4] * 2
    assert load["names"] == [f"CPU_{number}" for number in range(8)]
    assert "share the machine's cores" in load["reasons"]["CPU_3"]
    assert "4x8, which is 32 devices, but JAX has 8" in wrong


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": 3}, "config: got 3, expected a TPUConfig"),
        ({"metric": "temperature"}, "metric: got 'temperature', expected utilization or memory_usage"),
        ({"seconds": 0}, "seconds: got 0"),
        ({"seconds": math.nan}, "seconds: got nan"),
        ({"seconds": True}, "seconds: got True"),
        ({"config": CONFIG}, "2x4, which is 8 devices, but 2 accelerators are watched"),
    ],
)
def test_bad_arguments_of_load(options: dict[str, Any], words: str):
    monitor = watched([(0.5, 0.5), (0.5, 0.5)])
    with pytest.raises(MonitorError, match=words):
        monitor.load(**{"config": TWO, **options})


def full(base: float = 0.2) -> np.ndarray:
    return np.full((2, 4), base)


def test_a_hot_column_by_hand():
    load = full()
    load[:, 1] = 0.9
    advice = advise_resharding(load, CONFIG, {"hidden": (32, 5, 16), "odd": (9, 4), "array": np.ones((8, 2))})
    assert advice.pattern == "columns"
    assert advice.hotspots == advice.outliers == ((0, 1), (1, 1))
    assert advice.spec == BATCH
    # Each device gets an eighth of the batch, of all columns: (0.2 · 3 + 0.9) / 4.
    assert advice.predicted_gain == pytest.approx(1 - 0.375 / 0.9)
    assert advice.gain_limit == pytest.approx(1 - 0.375 / 0.9)
    assert advice.specs == {
        "hidden": PartitionSpec(("data", "model"), None, None),
        "odd": PartitionSpec(None, "model"),
        "array": BATCH,
    }
    assert any("odd: its batch size 9 is not a multiple of 8" in note for note in advice.notes)
    text = str(advice)
    for word in ("columns: the load differs along 'model'", "(0, 1), (1, 1)", "saves up to 58 %"):
        assert word in text
    assert json.loads(json.dumps(advice.to_dict()))["spec"] == str(BATCH)


def test_a_hot_row_by_hand():
    load = full()
    load[1] = 1.0
    advice = advise_resharding(load.tolist(), CONFIG)
    assert (advice.pattern, advice.spec) == ("rows", HIDDEN)
    assert advice.predicted_gain == pytest.approx(0.4)
    assert CONFIG.optimize_sharding(load) == HIDDEN


def test_more_hot_columns_than_rows():
    """Counting positions, as the documents do, would shard the dimension that is already unbalanced."""
    load = full()
    load[:, :3] = 1.0
    advice = advise_resharding(load, CONFIG)
    assert CONFIG.optimize_sharding(load) == HIDDEN
    assert (advice.pattern, advice.spec) == ("columns", BATCH)
    assert advice.predicted_gain == pytest.approx(1 - 0.8)
    assert any("optimize_sharding counts hot positions" in note for note in advice.notes)
    assert any("saves up to 0 %" in note for note in advice.notes)


def test_a_cross_is_not_the_chips_fault():
    config = TPUConfig()  # 4x8
    load = np.full((4, 8), 0.1)
    load[2] += 0.4
    load[:, 5] += 0.4
    advice = advise_resharding(load, config)
    assert advice.pattern in ("rows", "columns", "rows and columns")
    assert advice.spec is not None


@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_one_device_is_checked_and_not_resharded(place: tuple[int, int]):
    load = full()
    load[place] = 0.9
    advice = advise_resharding(load, CONFIG)
    assert (advice.pattern, advice.spec, advice.predicted_gain) == ("devices", None, 0.0)
    assert advice.outliers == advice.hotspots == (place,)
    assert "capibara health" in advice.how[0]
    assert advice.gain_limit == pytest.approx(1 - 0.2875 / 0.9)


def test_the_device_is_named():
    grid = [(0.2, None)] * 7 + [(0.95, None)]
    monitor = watched(grid)
    assert "(1, 3) (GPU_7)" in advise_resharding(monitor.load(CONFIG), CONFIG).reason


def test_balanced_loads():
    advice = advise_resharding(full(0.95), CONFIG)
    assert (advice.pattern, advice.spec) == ("balanced", None)
    assert advice.gain_limit == pytest.approx(0)
    assert "all are above the threshold" in advice.reason
    assert advise_resharding(full(0.0), CONFIG).pattern == "balanced"
    assert advise_resharding(full(0.5), CONFIG).how == ()


def test_imbalance_without_hotspots():
    load = full(0.1)
    load[:, 0] = 0.4
    advice = advise_resharding(load, CONFIG)
    assert (advice.pattern, advice.spec, advice.hotspots) == ("columns", None, ())
    assert "ScalingConfig(0.4)" in advice.how[0] or "ScalingConfig(0.39" in advice.how[0]


def test_a_mesh_of_one_axis_cannot_tell():
    config = TPUConfig(num_chips=4, topology="4")
    advice = advise_resharding([[0.1], [0.9], [0.1], [0.1]], config)
    assert (advice.pattern, advice.outliers) == ("unclear", ((1, 0),))
    three = TPUConfig(num_chips=8, topology="2x2x2")
    load = full()
    load[1] = 1.0
    advice = advise_resharding(load, three)
    assert advice.spec == PartitionSpec(None, ("data", "fsdp", "model"))


def test_unknown_loads_are_left_out():
    load = full()
    load[:, 1] = 0.9
    load[0, 3] = np.nan
    advice = advise_resharding(load, CONFIG)
    assert advice.pattern == "columns"
    assert advice.mean == pytest.approx((0.9 * 2 + 0.2 * 5) / 7)
    assert any("1 of 8 devices is unknown" in note for note in advice.notes)
    load[1] = np.nan
    assert advise_resharding(load, CONFIG).pattern == "unclear"


@st.composite
def products(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Work of every batch position and hidden position of a small array that 4 × 4 devices share."""
    of_batch = draw(st.lists(st.integers(0, 5), min_size=16, max_size=16))
    of_hidden = draw(st.lists(st.integers(0, 5), min_size=16, max_size=16))
    return np.array(of_batch, float), np.array(of_hidden, float)


@settings(max_examples=200, deadline=None)
@given(products())
def test_predictions_against_a_simulation(parts: tuple[np.ndarray, np.ndarray]):
    """Work per element is summed for each device in the old layout and in the advised one."""
    config = TPUConfig(num_chips=16, topology="4x4", scaling_config=ScalingConfig(0.0))
    # In each device's block the work is spread evenly, which is what a load of devices can say.
    block = np.add.outer(parts[0], parts[1]).reshape(4, 4, 4, 4).mean((1, 3))
    work = np.kron(block, np.ones((4, 4)))
    load = work.reshape(4, 4, 4, 4).sum((1, 3))
    advice = advise_resharding(load, config)
    assert 0 <= advice.predicted_gain <= advice.gain_limit + 1e-12
    assert advice.gain_limit == pytest.approx(0 if not load.any() else 1 - load.mean() / load.max())
    if advice.spec is None:
        assert advice.predicted_gain == 0
        return
    after = {"batch": work.sum(1), "hidden": work.sum(0)}  # 16 positions on 16 devices
    chosen = after["batch" if advice.spec[0] is not None else "hidden"]
    assert chosen.max() == pytest.approx(min(one.max() for one in after.values()))
    assert advice.predicted_gain == pytest.approx(1 - chosen.max() / load.max())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(2, 6),
    st.data(),
    st.floats(0.05, 0.5),
    st.floats(0.2, 0.5),
    st.integers(0, 1),
)
def test_patterns(rows: int, columns: int, data: st.DataObject, base: float, more: float, axis: int):
    """A planted row, column or device is recognised on any mesh, wherever it is."""
    config = TPUConfig(num_chips=rows * columns, topology=f"{rows}x{columns}")
    load = np.full((rows, columns), base)
    at = data.draw(st.integers(0, (rows, columns)[axis] - 1))
    load[(at, slice(None)) if axis == 0 else (slice(None), at)] += more
    assert advise_resharding(load, config).pattern == ("rows", "columns")[axis]
    load = np.full((rows, columns), base)
    place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    load[place] += more
    advice = advise_resharding(load, config)
    assert (advice.pattern, advice.outliers) == ("devices", (place,))


def test_the_advised_settings_are_valid():
    """What is to be typed is taken by ``capibara train``, and means the mesh that is advised."""
    load = full()
    load[:, 1] = 0.9
    for given_load, axis in ((load, "data"), (full() + np.array([[0.0], [0.8]]), "model")):
        (line,) = [one for one in advise_resharding(given_load, CONFIG).how if "capibara train" in one]
        words = [word.strip("';") for word in line.split() if word.strip("'").startswith("tpu.")]
        config = ModularModelConfig.from_toml("demo", words)
        assert Layout.from_config(config).mesh == ((axis, 8),)


@pytest.mark.parametrize(
    ("load", "tensors", "words"),
    [
        (np.zeros((4, 2)), None, r"load: got shape \(4, 2\), expected \(2, 4\)"),
        (np.zeros(8), None, "load: got shape"),
        ([["a"] * 4] * 2, None, "load: got dtype"),
        (full(-0.1), None, "load: got -0.1, expected finite numbers from 0 on"),
        (full(math.inf), None, "load: got inf"),
        (full(), [(2, 3)], "tensors: got"),
        (full(), {"x": (8,)}, r"tensors\['x'\]: got \(8,\), expected at least two sizes"),
        (full(), {"x": (8, 0)}, r"tensors\['x'\]"),
        (full(), {"x": "wide"}, r"tensors\['x'\]: got 'wide'"),
        (full(), {"x": 3}, r"tensors\['x'\]: got 3"),
    ],
)
def test_bad_input(load: Any, tensors: Any, words: str):
    with pytest.raises(ReshardingError, match=words):
        advise_resharding(load, CONFIG, tensors)


def test_bad_config():
    wrong: Any = {"num_chips": 8}
    with pytest.raises(ReshardingError, match="config: got"):
        advise_resharding(full(), wrong)
