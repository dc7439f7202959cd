"""Health checks: no false alarm on healthy devices, and each planted fault found where it is."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from tpu_compiler import ask, needs_libtpu

from capibara.errors import CapibaraError
from capibara.jax.tpu_v4.diagnostics import HealthReport, TpuDiagnostics
from capibara.observe.health import (
    AxisHealth,
    DeviceHealth,
    DeviceWork,
    HealthError,
    MemoryHealth,
    ProductHealth,
    Temperature,
    UnknownCheckError,
    check_health,
)
from capibara.observe.health.deadline import DeadlineError, Task
from capibara.observe.health.expected import described_devices
from capibara.observe.health.links import make_mesh, merged
from capibara.observe.health.products import DTYPES, make_problems, wrong_elements
from capibara.observe.health.temperature import read_temperatures
from capibara.observe.health.verdicts import LEAST_OF_PEAK, SLOW, judge, slow_rates

SMALL = {"quick": True, "memory_limit_bytes": 2**18}
DOCUMENTED = ("all_chips_online", "temperature_normal", "memory_healthy", "interconnect_ok")

EIGHT = """
import json, threading
import jax, jax.numpy as jnp, numpy as np
from capibara.observe.diagnostics import TpuDiagnostics
from capibara.observe.health import DeviceWork, Temperature, checking
from capibara.observe.health.deadline import Task

class Steady(DeviceWork):
    'Every rate is the same, whatever else this machine does.'
    slow = None
    def timed(self, device, function):
        result, _ = super().timed(device, function)
        return result, 1e-2 if device is not None and device.id == self.slow else 1e-3

class Product(Steady):
    'Device 3 gives one wrong element, sometimes.'
    calls = 0
    def multiply(self, a, b):
        result = super().multiply(a, b)
        if next(iter(a.devices())).id == 3:
            Product.calls += 1
            if Product.calls % 4 == 2:
                result = result.at[17, 33].add(1.0)
        return result

class Bit(Steady):
    'A bit of the memory of device 5 cannot be set to 0.'
    def complement(self, block):
        result = super().complement(block)
        if next(iter(result.devices())).id == 5:
            result = result.at[1234].set(result[1234] | jnp.uint32(64))
        return result

class Stale(Steady):
    'Device 2 keeps the words of another block.'
    def write(self, seed, words):
        if next(iter(seed.devices())).id == 2:
            seed = seed + jnp.uint32(1)
        return super().write(seed, words)

class Exhausted(Steady):
    'Others hold the memory of device 6.'
    def write(self, seed, words):
        if next(iter(seed.devices())).id == 6:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        return super().write(seed, words)

class Sum(Steady):
    'The sum over axis y is wrong on one device.'
    def all_reduce(self, array, mesh, axis):
        result = super().all_reduce(array, mesh, axis)
        return result.at[6, 100:103].add(1) if axis == "y" else result

class Link(Steady):
    'What device 1 sends to device 2 arrives changed.'
    def permute(self, array, mesh, axis, shift):
        result = super().permute(array, mesh, axis, shift)
        return result.at[2, 7].add(1) if axis == "y" and shift == 1 else result

class Short(Task):
    def wait(self, seconds):
        return super().wait(0.2)

class Hangs(Steady):
    'A device waits forever.'
    def __init__(self, number, what):
        self.number, self.what = number, what
    def start(self, name, device, function):
        if name.startswith(self.what) and (None if device is None else device.id) == self.number:
            return Short(threading.Event().wait, name)
        return super().start(name, device, function)

class Slow(Steady):
    slow = 4

class Hiccup(Steady):
    'Device 4 is slow until everything was measured once.'
    begun = 0
    def timed(self, device, function):
        result, seconds = super().timed(device, function)
        if device is not None and device.id == 4:
            self.begun += 1
            if self.begun <= 2 * 2 + 3:  # products of two dtypes, inversions of memory
                seconds *= 10
        return result, seconds

class Lost(Slow):
    'What is slow cannot be measured again.'
    def __init__(self, name, error):
        self.name, self.error = name, error
    def within(self, seconds, name, device, function):
        if name == self.name:
            raise jax.errors.JaxRuntimeError(self.error)
        return super().within(seconds, name, device, function)

class Broken(Steady):
    'Device 7 is lost.'
    def answer(self, array):
        if next(iter(array.devices())).id == 7:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: the device is gone\\nand more")
        return super().answer(array)

class Wrong(Steady):
    'Device 0 computes a small sum wrongly.'
    def answer(self, array):
        result = super().answer(array)
        return result + 1 if next(iter(array.devices())).id == 0 else result

cool = {n: Temperature(True, 40.0, 95.0, "planted") for n in range(8)}
warm = {n: Temperature(n != 1, 99.0 if n == 1 else 50.0 + n, 95.0, "planted") for n in range(8)}

def accelerators(work):
    'A check that takes these devices for accelerators.'
    made = checking.DeviceHealth
    checking.DeviceHealth = lambda **given: made(**{**given, "platform": "tpu"})
    try:
        return check(work)
    finally:
        checking.DeviceHealth = made

def check(work, temperatures=None, **settings):
    diagnostics = TpuDiagnostics(work=work, temperatures=temperatures)
    report = diagnostics.run_full_health_check(quick=True, memory_limit_bytes=2**18, **settings)
    return {**report.to_dict(), "text": str(report)}

runs = {
    "healthy": check(None),
    "steady": check(Steady(), temperatures=lambda devices: cool),
    "cube": check(Steady(), mesh=jax.make_mesh((2, 2, 2), ("a", "b", "c"))),
    "part": check(Steady(), mesh=jax.sharding.Mesh(jax.devices()[2:5], ("ring",))),
    "product": check(Product()),
    "bit": check(Bit()),
    "stale": check(Stale()),
    "exhausted": check(Exhausted()),
    "sum": check(Sum()),
    "link": check(Link()),
    "hangs": check(Hangs(3, "a small computation")),
    "hangs later": check(Hangs(2, "a float32 matrix product")),
    "axis hangs": check(Hangs(None, "communication along axis 'x'")),
    "slow": check(Slow()),
    "slow accelerator": accelerators(Slow()),
    "hiccup": accelerators(Hiccup()),
    "memory lost": check(Lost("a test of memory bandwidth", "UNAVAILABLE: the device is gone")),
    "products lost": check(Lost("float32 matrix products", "UNAVAILABLE: the device is gone")),
    "exhausted later": check(Lost("float32 matrix products", "RESOURCE_EXHAUSTED: Out of memory")),
    "broken": check(Broken()),
    "wrong": check(Wrong()),
    "missing": check(Steady(), expected_devices=9),
    "warm": check(Steady(), temperatures=lambda devices: warm),
}
print("RESULT" + json.dumps(runs))
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """Reports of eight emulated devices: healthy ones, and with one fault each."""
    return run_apart(EIGHT, XLA_FLAGS=emulated(8))


def verdicts(report: dict[str, Any]) -> dict[str, bool | None]:
    return {name: check["ok"] for name, check in report["checks"].items()}


def failed(report: dict[str, Any]) -> list[str]:
    return [name for name, ok in verdicts(report).items() if ok is False]


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["healthy", "steady", "cube", "part"])
def test_no_false_alarm_on_healthy_devices(runs: dict[str, Any], name: str) -> None:
    report = runs[name]
    found = verdicts(report)
    del found["temperature_normal"]  # whatever sensors this machine has
    assert set(found.values()) == {True}, report["text"]
    assert report["healthy"]
    assert report["faults"] == []
    assert report["unfinished"] == []
    for device in report["devices"]:
        assert device["online"]
        assert device["products"]["checked"] == 10
        assert set(device["products"]["rates"]) == set(DTYPES)
        assert device["memory"]["tested"] == 2**18
        assert device["memory"]["bandwidth"] > 0


def test_axes_of_the_mesh(runs: dict[str, Any]) -> None:
    assert [(axis["name"], axis["size"]) for axis in runs["healthy"]["axes"]] == [("x", 2), ("y", 4)]
    assert [(axis["name"], axis["size"]) for axis in runs["cube"]["axes"]] == [("a", 2), ("b", 2), ("c", 2)]
    assert [(axis["name"], axis["size"]) for axis in runs["part"]["axes"]] == [("ring", 3)]
    assert [device["id"] for device in runs["part"]["devices"]] == [2, 3, 4]
    for axis in runs["healthy"]["axes"]:
        assert axis["all_reduce"] is True
        assert axis["permute"] is True
        assert axis["all_reduce_bandwidth"] > 0


FOUND = {
    "product": ("compute_correct", ["cpu:3"], "wrong elements of matrix products; element [17, 33]"),
    "bit": ("memory_healthy", ["cpu:5"], "at byte 4,936 of the tested memory, wrong bits 0x00000040"),
    "stale": ("memory_healthy", ["cpu:2"], "131,072 wrong words"),
    "sum": ("interconnect_ok", ["axis 'y'"], "wrong all-reduce on cpu:6 (3 of 4,096 elements)"),
    "link": ("interconnect_ok", ["link cpu:1 → cpu:2"], "1 wrong elements received (axis 'y')"),
    "hangs": ("all_chips_online", ["cpu:3"], "does not answer: a small computation did not finish in 0.2 s"),
    "hangs later": ("compute_correct", ["cpu:2"], "a float32 matrix product did not finish in 0.2 s"),
    "axis hangs": (
        "interconnect_ok",
        ["axis 'x'"],
        "communication along axis 'x' did not finish in 0.2 s",
    ),
    "broken": ("all_chips_online", ["cpu:7"], "does not compute: UNAVAILABLE: the device is gone"),
    "wrong": ("all_chips_online", ["cpu:0"], "instead of"),
    "missing": ("all_chips_online", ["devices"], "1 missing: JAX lists 8, 9 expected (expected_devices)"),
    "warm": ("temperature_normal", ["cpu:1"], "99 °C, limit 95 °C; planted"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_found_where_it_is(runs: dict[str, Any], name: str) -> None:
    check, where, words = FOUND[name]
    report = runs[name]
    assert failed(report) == [check], report["text"]
    assert not report["healthy"]
    assert [fault["where"] for fault in report["faults"]] == where
    assert words in report["faults"][0]["what"]
    assert report["checks"][check]["reason"].startswith(where[0])
    assert f"{check:<18}  FAILED" in report["text"]


@pytest.mark.parametrize("name", ["slow", "slow accelerator"])
def test_a_slow_device_is_named_with_each_rate(runs: dict[str, Any], name: str) -> None:
    report = runs[name]
    assert failed(report) == ["speed_normal"]
    assert {fault["where"] for fault in report["faults"]} == {"cpu:4"}
    assert [fault["what"].split(" matrix")[0].split(" bandwidth")[0] for fault in report["faults"]] == [
        "bfloat16",
        "float32",
        "memory",
    ]
    assert all("10% of its peers' median" in fault["what"] for fault in report["faults"])


RATES = """
import json
import jax, numpy as np
from capibara.observe.health import DeviceWork, check_health, links, memory, products

FLOPS, BANDWIDTH, RING, LINK = {"bfloat16": 2.0**31, "float32": 2.0**30}, 2.0**28, 2.0**26, 2.0**24

class Known(DeviceWork):
    'What it does takes a known time, which has passed when it was waited for; the first of each kind is compiled.'
    now = queued = 0.0

    def __init__(self):
        self.compiled = set()

    def clock(self):
        return self.now

    def wait(self, real):
        def waited(value):
            self.now, self.queued = self.now + self.queued, 0.0
            return real(value)
        return waited

    def takes(self, seconds, *kind):
        self.queued += seconds + (kind not in self.compiled)
        self.compiled.add(kind)

    def multiply(self, a, b):
        (rows, inner), columns, device = a.shape, b.shape[1], next(iter(a.devices())).id
        self.takes(2 * rows * inner * columns / FLOPS[str(a.dtype)] * (1 + device % 2), device, a.shape, a.dtype)
        return super().multiply(a, b)

    def complement(self, block):
        device = next(iter(block.devices())).id
        self.takes(2 * block.nbytes / BANDWIDTH * (1 + device % 2), device, block.shape)
        return super().complement(block)

    def all_reduce(self, array, mesh, axis):
        size = mesh.shape[axis]
        self.takes(2 * (size - 1) * (array.nbytes / mesh.size / size) / RING, axis, "sum")
        return super().all_reduce(array, mesh, axis)

    def permute(self, array, mesh, axis, shift):
        self.takes(array.nbytes / mesh.size / LINK, axis, shift)
        return super().permute(array, mesh, axis, shift)

class Accelerator:
    'A device whose work is queued several times, and in larger blocks.'
    platform = "tpu"

put, work = jax.device_put, Known()
jax.device_put = lambda value, device: put(value, None if isinstance(device, Accelerator) else device)
jax.block_until_ready, jax.device_get = work.wait(jax.block_until_ready), work.wait(jax.device_get)
mesh = jax.make_mesh((2, 4), ("x", "y"))
checked = check_health(mesh=mesh, work=work, quick=True, memory_limit_bytes=2**18)
report = checked.to_dict()
device = jax.devices()[0]
operands = products.make_problems(64, (0,))[0].operands("float32", device)
memory._BLOCK = 2**16
found = {
    "text": str(checked),
    "devices": [{**one["products"]["rates"], "memory": one["memory"]["bandwidth"]} for one in report["devices"]],
    "axes": [[one["all_reduce_bandwidth"], one["link_bandwidth"]] for one in report["axes"]],
    "queued products": [products.measure(work, device, operands, 10)[1] for _ in range(2)][1],  # compiled first
    "blocks": memory.check_memory(work, Accelerator(), 3 * 2**16, 0).bandwidth,
    "queued inversions": memory.measure_bandwidth(work, Accelerator(), 2**20),
}
axis = links.check_axis(work, mesh, "y", 2**8, 3, 5, None)
found["queued exchanges"] = [axis.all_reduce_bandwidth, axis.link_bandwidth]
print("RESULT" + json.dumps(found))
"""


def test_rates_are_the_known_work_by_the_known_times() -> None:
    found = run_apart(RATES, XLA_FLAGS=emulated(8))
    fast = {"bfloat16": 2.0**31, "float32": 2.0**30, "memory": 2.0**28}
    slow = {name: rate / 2 for name, rate in fast.items()}
    ring, link = 2.0**26, 2.0**24
    text = found.pop("text")
    assert "bfloat16 2.147 GFLOP/s, float32 1.074 GFLOP/s, memory 0.268 GB/s (0.25 MiB)" in text
    assert "axis 'x': 2 devices, all-reduce 0.0671 GB/s, to a neighbour 0.0168 GB/s (16.00 KiB)" in text
    assert found == {
        "devices": [fast, slow] * 4,
        "axes": [[ring, link]] * 2,
        "queued products": fast["float32"],
        "blocks": fast["memory"],
        "queued inversions": fast["memory"],
        "queued exchanges": [ring, link],
    }


def test_the_clock_of_rates_counts_seconds() -> None:
    work = DeviceWork()
    before = time.monotonic()
    _, seconds = work.timed(None, lambda: time.sleep(0.05))
    assert 0.05 <= seconds <= time.monotonic() - before


def test_an_accelerator_that_was_slow_once_is_cleared_by_measuring_again(runs: dict[str, Any]) -> None:
    report = runs["hiccup"]
    assert verdicts(report)["speed_normal"] is True, report["text"]
    rates = {
        device["id"]: {**device["products"]["rates"], "memory": device["memory"]["bandwidth"]}
        for device in report["devices"]
    }
    assert rates[4] == rates[3]


@pytest.mark.parametrize(
    ("name", "check"), [("memory lost", "memory_healthy"), ("products lost", "compute_correct")]
)
def test_a_failure_while_measuring_again_is_of_what_was_measured(
    runs: dict[str, Any], name: str, check: str
) -> None:
    report = runs[name]
    assert failed(report) == [check], report["text"]
    assert {fault["what"] for fault in report["faults"]} == {"UNAVAILABLE: the device is gone"}


def test_too_little_memory_to_measure_again_takes_nothing_from_exact_products(runs: dict[str, Any]) -> None:
    report = runs["exhausted later"]
    assert verdicts(report)["compute_correct"] is True, report["text"]
    assert failed(report) == ["speed_normal"]  # its other rates


@pytest.mark.parametrize("name", ["hangs", "hangs later"])
def test_a_hanging_device_is_left_alone(runs: dict[str, Any], name: str) -> None:
    report = runs[name]
    assert len(report["unfinished"]) == 1
    assert report["checks"]["interconnect_ok"]["ok"] is None
    assert "does not work, and all devices have to take part" in report["checks"]["interconnect_ok"]["reason"]
    assert report["checks"]["memory_healthy"] == {"ok": None, "reason": "not every device was reached"}
    hanging = int(report["faults"][0]["where"].removeprefix("cpu:"))
    assert [device["id"] for device in report["devices"] if device["memory"] is None] == [hanging]


def test_after_an_axis_that_hangs_no_other_is_tried(runs: dict[str, Any]) -> None:
    assert [axis["name"] for axis in runs["axis hangs"]["axes"]] == ["x"]


def test_memory_that_others_hold_is_unknown_not_faulty(runs: dict[str, Any]) -> None:
    report = runs["exhausted"]
    assert report["healthy"]
    assert report["checks"]["memory_healthy"]["ok"] is None
    assert "cpu:6: not tested: a block of 262,144 bytes could not be allocated" in str(
        report["checks"]["memory_healthy"]["reason"]
    )


@pytest.fixture(scope="module")
def one() -> HealthReport:
    """The report of one device of this process."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    return TpuDiagnostics().run_full_health_check(mesh=mesh, quick=True, memory_limit_bytes=2**18)


def test_a_report_is_a_mapping(one: HealthReport) -> None:
    assert set(DOCUMENTED) < set(one)
    assert len(one) == 6
    assert dict(one) == {name: one[name] for name in one}
    assert one == dict(one)
    assert one["all_chips_online"] is True
    assert one["memory_healthy"] is True
    assert one["interconnect_ok"] is None
    assert one.reason("interconnect_ok") == "there is one device, and no link to another"
    assert one.get("nothing") is None
    assert one.healthy
    assert all(one.reason(name) for name in one)
    assert one["speed_normal"] is not False


def test_a_report_prints_and_becomes_json(one: HealthReport) -> None:
    text = str(one)
    assert text.startswith(f"1 × {jax.devices()[0].device_kind}: healthy")
    assert "interconnect_ok     unknown  there is one device" in text
    data = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert data["checks"]["all_chips_online"]["ok"] is True
    assert data["versions"]["jax"] == jax.__version__
    assert DeviceHealth.from_dict(data["devices"][0]) == one.devices[0]


def test_an_unknown_check_is_a_key_error_that_helps(one: HealthReport) -> None:
    for look in (one.__getitem__, one.reason):
        with pytest.raises(KeyError) as caught:
            look("temperatur_normal")
        assert isinstance(caught.value, UnknownCheckError)
        assert isinstance(caught.value, CapibaraError)
        assert "Did you mean 'temperature_normal'?" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": "4x8"}, "mesh: got '4x8', expected a jax.sharding.Mesh"),
        ({"expected_devices": 0}, "expected_devices: got 0, expected an integer of at least 1"),
        ({"expected_devices": True}, "expected_devices: got True"),
        ({"expected_devices": 2.0}, "expected_devices: got 2.0"),
        ({"memory_fraction": 0}, "memory_fraction: got 0, expected a number above 0 and at most 0.9"),
        ({"memory_fraction": 1.0}, "memory_fraction: got 1.0"),
        ({"memory_fraction": float("nan")}, "memory_fraction: got nan"),
        ({"memory_fraction": "0.5"}, "memory_fraction: got '0.5'"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes: got -1"),
        ({"timeout": 0}, "timeout: got 0, expected a number above 0 and at most 86,400. Pass seconds"),
        ({"timeout": float("inf")}, "timeout: got inf"),
        ({"timeout": 1e10}, "timeout: got 10000000000.0, expected a number above 0 and at most 86,400. Pass"),
        ({"timeout": np.complex64(1)}, "timeout: got np.complex64(1+0j), expected a number"),
        ({"mesh": jax.sharding.Mesh(np.empty(0, object), ("x",))}, "expected at least one device. Make one"),
        (
            {"mesh": jax.sharding.Mesh([jax.devices()[0]] * 2, ("x",))},
            f"mesh: got {jax.devices()[0]} at more than one place, expected each device once. Make one",
        ),
        ({"work": 5}, "work: got 5, expected a DeviceWork or None. Pass an instance"),
        ({"work": 0}, "work: got 0, expected a DeviceWork"),
        ({"work": DeviceWork}, "expected a DeviceWork or None. Pass an instance"),
        ({"quick": "no"}, "quick: got 'no', expected a boolean. Pass True or False."),
        ({"temperatures": 40.0}, "temperatures: got 40.0, expected a function or None. Pass one that takes"),
        ({"progress": 1}, "progress: got 1, expected a function or None. Pass one that takes a text"),
    ],
)
def test_invalid_arguments(settings: dict[str, Any], words: str) -> None:
    of_object = {name: value for name, value in settings.items() if name in ("work", "temperatures")}
    of_call = {name: value for name, value in settings.items() if name not in of_object}
    with pytest.raises(HealthError) as caught:
        TpuDiagnostics(**of_object).run_full_health_check(**of_call)
    assert isinstance(caught.value, ValueError)
    assert words in str(caught.value)


def test_progress_counts_to_its_end() -> None:
    told: list[tuple[str, int, int]] = []
    check_health(**SMALL, progress=lambda *now: told.append(now))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][0] == "done"
    assert told[-1][1] == told[-1][2]


def test_a_backend_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", broken)
    report = check_health()
    assert report["all_chips_online"] is False
    assert report.reason("all_chips_online") == "JAX's backend: Unable to initialize backend 'tpu'"
    assert str(report).startswith("0 × no device: 1 fault")


def test_a_backend_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(jax, "devices", go.wait)
    report = check_health(timeout=0.01)
    go.set()
    assert report["all_chips_online"] is False
    assert report.unfinished == ("starting JAX's backend",)
    assert "starting JAX's backend did not finish in 0.01 s" in report.reason("all_chips_online")


def test_sensors_that_hang_are_unknown() -> None:
    go = threading.Event()

    class Impatient(DeviceWork):
        def within(self, seconds: float, name: str, device: Any, function: Any) -> Any:
            return super().within(0.01 if name == "reading temperatures" else seconds, name, device, function)

    def sensors(devices: Any) -> dict[int, Temperature]:
        go.wait()
        return {}

    report = check_health(**SMALL, work=Impatient(), temperatures=sensors)
    go.set()
    assert report["temperature_normal"] is None
    assert report.reason("temperature_normal") == "reading temperatures did not finish in 0.01 s"
    assert report["memory_healthy"] is True


def test_temperatures_without_a_limit() -> None:
    for normal in (True, False):
        reading = {one.id: Temperature(normal, 70.0, reason="planted") for one in jax.local_devices()}
        report = check_health(**SMALL, temperatures=lambda devices, reading=reading: reading)
        assert report["temperature_normal"] is normal
        assert "70 °C" in report.reason("temperature_normal")


def broken_sensors(devices: Any) -> Any:
    raise OSError("no such sensor")


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (broken_sensors, "temperatures: raised OSError: no such sensor"),
        (lambda devices: {}, "temperatures: returned none of this device"),
        (
            lambda devices: {one.id: Temperature(True, float("nan"), 95.0) for one in devices},
            "temperatures: returned celsius=nan, which is not a temperature",
        ),
        (
            lambda devices: {one.id: Temperature(True, 40.0, np.float32("inf")) for one in devices},  # pyright: ignore[reportArgumentType]
            "temperatures: returned limit=inf, which is not a temperature",
        ),
    ],
)
def test_temperatures_that_cannot_be_read_are_unknown(read: Any, reason: str) -> None:
    report = check_health(**SMALL, temperatures=read)
    assert report["temperature_normal"] is None
    assert report.reason("temperature_normal") == reason
    assert report["memory_healthy"] is True
    json.dumps(report.to_dict(), allow_nan=False)


def test_temperatures_of_numpy_count() -> None:
    warm, limit = np.float32(99), np.float32(95)
    reading: Any = Temperature(warm < limit, warm, limit, "planted")  # pyright: ignore[reportArgumentType]
    report = check_health(**SMALL, temperatures=lambda devices: {one.id: reading for one in devices})
    assert report["temperature_normal"] is False
    json.dumps(report.to_dict())


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        (40.0, "temperatures: returned 40.0, expected a mapping from device.id to Temperature. Return {"),
        ({0: 40.0}, "temperatures: returned 40.0 for "),
        ({0: Temperature(True, "hot")}, "temperatures: returned celsius='hot' for "),  # pyright: ignore[reportArgumentType]
        ({0: Temperature("yes", 40.0)}, "temperatures: returned normal='yes' for "),  # pyright: ignore[reportArgumentType]
    ],
)
def test_temperatures_of_another_kind_are_an_error(readings: Any, words: str) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    with pytest.raises(HealthError) as caught:
        check_health(**SMALL, mesh=mesh, temperatures=lambda devices: readings)
    assert str(caught.value).startswith(words)
    assert "expected " in str(caught.value)
    assert "Return " in str(caught.value)


def test_an_error_of_our_own_is_raised() -> None:
    class Mistaken(DeviceWork):
        def write(self, seed: Any, words: int) -> Any:
            raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        check_health(**SMALL, work=Mistaken())


def test_a_deadline_ends_the_wait_not_the_work() -> None:
    go = threading.Event()
    task = Task(lambda: go.wait() and "done", "a long work")
    with pytest.raises(DeadlineError, match=r"a long work did not finish in 0\.01 s"):
        task.wait(0.01)
    go.set()
    assert task.wait(3600) == "done"


@pytest.mark.parametrize("size", [64, 1024])
def test_the_known_products_are_exact(size: int) -> None:
    for problem in make_problems(size, (0, 1)):
        for dtype in DTYPES:
            a, b = problem.operands(dtype, jax.devices()[0])
            assert a.shape == b.shape == (size, size)
            exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
            assert np.abs(exact).max() < 2**24
            assert wrong_elements(problem, exact) == (0, "")
            assert wrong_elements(problem, DeviceWork().multiply(a, b)) == (0, "")
            exact[size - 1, 2] = np.nan
            exact[5, 7] += 1
            count, first = wrong_elements(problem, exact)
            assert count == 2
            assert first.startswith(f"element [5, 7] of a {size}×{size} product")
    assert wrong_elements(make_problems(64, (0,))[0], np.zeros((3, 3)))[1] == "a result of shape (3, 3)"


def device(number: int = 0, **changes: Any) -> DeviceHealth:
    settings = {"id": number, "name": f"tpu:{number}", "kind": "TPU v4", "platform": "tpu", "process": 0}
    return DeviceHealth(**{**settings, "online": True, "seconds": 0.1, **changes})


def test_rates_are_compared_with_the_catalogue_and_with_peers() -> None:
    peaks = {"peak_flops": {"bfloat16": 100.0}, "peak_bandwidth": 10.0}
    share = LEAST_OF_PEAK["bfloat16"]

    def measured(number: int, rate: float, bandwidth: float, tested: int = 2**28) -> DeviceHealth:
        products = ProductHealth(1, rates={"bfloat16": rate})
        return device(number, products=products, memory=MemoryHealth(tested, bandwidth=bandwidth), **peaks)

    good = [measured(0, 100 * share, 9.0), measured(1, 90.0, 9.0), measured(2, 90.0, 9.0)]
    assert slow_rates((one, one.rates()) for one in good[1:]) == {}
    found = slow_rates((one, one.rates()) for one in good)
    assert set(found) == {(0, "bfloat16")}  # as fast as the catalogue asks for, but not as its peers
    found = slow_rates([(one := measured(0, 99 * share, 3.0), one.rates())])
    assert set(found) == {(0, "bfloat16"), (0, "memory")}
    assert "of the catalogue's" in found[0, "memory"]
    little = measured(0, 90.0, 3.0, tested=2**20)  # starting the work takes as long as the work
    assert slow_rates([(little, little.rates())]) == {}
    assert slow_rates((one, one.rates()) for one in (little, measured(1, 90.0, 3.0 / SLOW * 1.1))) == {
        (0, "memory"): "memory bandwidth 3e-09 GB/s, 45% of its peers' median 6.6e-09 GB/s"
    }


def test_verdicts_of_what_was_not_reached() -> None:
    found, faults = judge([], [], listed=0, expected=None, no_backend="none")
    assert [ok for ok, _ in found.values()] == [False, None, None, None, None, None]
    assert [fault.what for fault in faults] == ["none"]
    lost = [device(0), device(1)]
    found, _ = judge(lost, [], listed=3, expected=3, expected_by="TPU_TOPOLOGY", no_links="so it is")
    assert found["all_chips_online"] == (False, "devices: 1 of 3 did not report from their processes")
    assert found["interconnect_ok"] == (None, "so it is")
    assert found["compute_correct"] == (None, "not every device was reached")


def test_speed_is_unknown_without_anything_to_compare_with() -> None:
    def made(number: int, **changes: Any) -> DeviceHealth:
        return device(number, products=ProductHealth(1, rates={"bfloat16": 90.0}), **changes)

    def speed(*those: DeviceHealth) -> tuple[bool | None, str]:
        return judge(those, [], listed=len(those), expected=None)[0]["speed_normal"]

    peaks = {"bfloat16": 100.0}
    cpus = [made(number, platform="cpu", kind="cpu", process=number // 2) for number in range(3)]
    assert speed(made(0), made(1)) == (True, "no device below 50% of its peers' median")
    assert speed(made(0, peak_flops=peaks)) == (True, "1 rate compared with the catalogue")
    for those, reason in (
        (
            [made(0)],
            "tpu:0: the catalogue has no rates of 'TPU v4', and there is no second one to compare with",
        ),
        (
            [made(0), made(1, kind="TPU x")],
            "tpu:0: the catalogue has no rates of 'TPU v4', and there is no second one",
        ),
        ([made(0, peak_flops=peaks), made(1, kind="TPU x")], "tpu:1: the catalogue has no rates of 'TPU x'"),
        (cpus, "tpu:2: the catalogue has no rates of 'cpu', and there is no second one of its process"),
        ([made(0), made(1), device(2)], "tpu:2: no rate was measured"),
        ([], "no device was reached"),
    ):
        ok, why = speed(*those)
        assert ok is None
        assert why.startswith(reason)


def test_the_reason_why_memory_is_not_tested_is_what_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    report = check_health(mesh=mesh, quick=True, memory_limit_bytes=1000)
    assert report["memory_healthy"] is None
    assert report.reason("memory_healthy").endswith(
        "not tested: memory_limit_bytes is 1,000, and the smallest test needs 65,536 bytes"
    )
    monkeypatch.setattr("capibara.hardware.telemetry.available_memory", lambda: 200_000)
    report = check_health(mesh=mesh, quick=True, memory_limit_bytes=2**18)
    assert report.reason("memory_healthy").endswith(
        "not tested: 0.25 of the 200,000 free bytes is less than the 65,536 of the smallest test"
    )


def test_a_slow_axis_is_named_where_the_catalogue_knows_its_links() -> None:
    def axis(bandwidth: float) -> AxisHealth:
        return AxisHealth("x", 4, 8, True, (), True, (), 1e9, bandwidth, 45e9)

    products = ProductHealth(1, rates={"bfloat16": 1.0})
    those = [device(0, products=products), device(1, products=products)]
    found, _ = judge(those, [axis(40e9)], listed=2, expected=2)
    assert found["speed_normal"][0] is True
    found, faults = judge(those, [axis(1e9)], listed=2, expected=2)
    assert found["speed_normal"][0] is False
    assert found["interconnect_ok"][0] is True
    assert [fault.where for fault in faults] == ["axis 'x'"]


def test_what_processes_saw_of_an_axis_is_merged() -> None:
    here = AxisHealth("x", 2, 8, True, (), True, ())
    there = AxisHealth("x", 2, 8, False, ("cpu:1 (1 of 2 elements)",), False, (("cpu:0", "cpu:1", 3),))
    both = merged([here, AxisHealth.from_dict(json.loads(json.dumps(vars(there))))])
    assert both == there


ENVIRONMENTS = [
    ({"TPU_TOPOLOGY": "2x2x4"}, 1, 16, "TPU_TOPOLOGY"),
    ({"TPU_ACCELERATOR_TYPE": "v4-32"}, 1, 16, "TPU_ACCELERATOR_TYPE"),
    ({"TPU_TOPOLOGY": "2x2x1", "MEGASCALE_NUM_SLICES": "2"}, 2, 8, "TPU_TOPOLOGY"),
    ({"TPU_TOPOLOGY": "nonsense"}, 1, None, ""),
    ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_HOST_BOUNDS": "1,1,4"}, 4, 16, "TPU_CHIPS_PER_HOST_BOUNDS"),
    ({"TPU_VISIBLE_CHIPS": "0,1", "TPU_TOPOLOGY": "2x2x1"}, 1, 2, "TPU_VISIBLE_CHIPS"),
    ({"TPU_VISIBLE_CHIPS": "0,1", "TPU_TOPOLOGY": "2x2x1"}, 2, None, ""),
    ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "2,2,1"}, 4, 4, "TPU_CHIPS_PER_PROCESS"),
    ({}, 1, None, ""),
]


@pytest.mark.parametrize(("environment", "processes", "count", "source"), ENVIRONMENTS)
def test_expected_tpus(environment: Any, processes: int, count: int | None, source: str) -> None:
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v4", num_cores=2)
    found, by = described_devices(environment, [chip], processes)
    assert found == count
    assert by.startswith(source)
    core = SimpleNamespace(platform="tpu", device_kind="TPU v4", num_cores=1)
    assert described_devices(environment, [core], processes)[0] == (None if count is None else 2 * count)


def test_expected_gpus_and_cpus(tmp_path: Path) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert described_devices({}, [gpu], system=str(tmp_path)) == (2, "the device files /dev/nvidia*")
    assert described_devices({"CUDA_VISIBLE_DEVICES": "3"}, [gpu]) == (1, "CUDA_VISIBLE_DEVICES")
    assert described_devices({"CUDA_VISIBLE_DEVICES": "MIG-1/2"}, [gpu]) == (None, "")
    assert described_devices({}, [gpu], processes=2) == (None, "")
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_force_host_platform_device_count=8"}
    assert described_devices(flags, [cpu], processes=2) == (16, "XLA_FLAGS")
    assert described_devices({}, [cpu]) == (None, "")


FOR_TPU = """
import json
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from capibara.observe.health import expected, links, work

found = {}
for name, more in (("cores", {}), ("megacore", {"chip_config_name": "megacore"})):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x4", **more).devices
    found[name] = [dict(links.make_mesh(devices).shape), expected._devices_per_chip(devices[0])]

mesh, one = links.make_mesh(devices), SingleDeviceSharding(devices[0])
word, block = (jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=one) for shape in ((), (2**26,)))
rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
array = jax.ShapeDtypeStruct((mesh.size, 2**22), jnp.int32, sharding=rows)
memory = work._complement.lower(block).compile().memory_analysis()
found["in place"] = [memory.alias_size_in_bytes, memory.temp_size_in_bytes]
found["temporaries"] = [
    lowered.compile().memory_analysis().temp_size_in_bytes
    for lowered in (work._write.lower(word, 2**26), work._compare.lower(block, word, word))
]
found["links"] = [
    work._all_reduce(mesh, "z").lower(array).compile().as_text().count(" all-reduce") > 0,
    work._permute(mesh, "z", -1).lower(array).compile().as_text().count(" collective-permute") > 0,
]
print(json.dumps(found))
"""


@needs_libtpu
def test_the_programs_compile_for_tpu_v4() -> None:
    found = ask(FOR_TPU)
    assert found["cores"] == [{"x": 2, "y": 2, "z": 4, "core": 2}, 2]
    assert found["megacore"] == [{"x": 2, "y": 2, "z": 4}, 1]
    assert found["in place"] == [2**28, 0]
    assert max(found["temporaries"]) < 1.1 * 2**28  # one block more, as the memory test says
    assert found["links"] == [True, True]


class Chip(SimpleNamespace):
    """A device of a described grid, as far as a mesh looks at it."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


def test_the_grid_of_chips_becomes_the_mesh() -> None:
    chips = [
        Chip(id=n, coords=(n % 2, n // 2 % 2, n // 4), core_on_chip=0, process_index=0) for n in range(16)
    ]
    mesh = make_mesh(chips)
    assert dict(mesh.shape) == {"x": 2, "y": 2, "z": 4}
    assert mesh.devices[1, 0, 3].coords == (1, 0, 3)
    cores = [Chip(id=n, coords=(n // 2, 0, 0), core_on_chip=n % 2) for n in range(8)]
    assert dict(make_mesh(cores).shape) == {"x": 4, "core": 2}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_temperature_of_a_processor(tmp_path: Path) -> None:
    cpu = SimpleNamespace(id=0, platform="cpu", device_kind="cpu")

    def read() -> Temperature:
        return read_temperatures([cpu], str(tmp_path))[0]

    assert read() == Temperature(None, reason="this system shows no temperature sensor of the processor")
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    write(zone / "type", "x86_pkg_temp")
    write(zone / "temp", "61000")
    write(zone / "trip_point_0_type", "critical")
    write(zone / "trip_point_0_temp", "100000")
    write(tmp_path / "sys/class/thermal/thermal_zone1/type", "iwlwifi")
    write(tmp_path / "sys/class/thermal/thermal_zone1/temp", "140000")
    assert read() == Temperature(True, 61.0, 100.0, "sensor x86_pkg_temp")
    sensor = tmp_path / "sys/class/hwmon/hwmon3"
    write(sensor / "name", "k10temp")
    write(sensor / "temp1_input", "97500")
    write(sensor / "temp1_label", "Tctl")
    assert read() == Temperature(False, 97.5, 95.0, "sensor k10temp Tctl")


def test_temperature_of_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    tpus = [SimpleNamespace(id=number, platform="tpu", device_kind="TPU v5e") for number in range(2)]
    scores = ["0", "3"]
    metric = SimpleNamespace(data=lambda: scores)
    sdk = SimpleNamespace(tpumonitoring=SimpleNamespace(get_metric=lambda name: metric))
    monkeypatch.setattr(importlib, "import_module", lambda name: sdk)
    found = read_temperatures(tpus)
    assert [found[number].normal for number in range(2)] == [True, False]
    assert found[1].reason == "libtpu reports no temperature; throttle score 3 of 10"
    scores.clear()
    assert read_temperatures(tpus)[0].normal is None

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'libtpu'")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "ModuleNotFoundError" in read_temperatures(tpus)[0].reason


class FakeNvml(ModuleType):
    """Two GPUs as ``pynvml`` has them: the second has no bound, and its sensor fails if asked so."""

    def __init__(self, celsius: dict[int, float], bounds: dict[int, float]) -> None:
        super().__init__("pynvml")
        self.celsius, self.bounds = celsius, bounds

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> float:
        assert sensor == 0
        return self.celsius[handle]

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, bound: int) -> float:
        assert bound == 1
        return self.bounds[handle]


def test_temperature_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(id=n, platform="gpu", device_kind="NVIDIA H100 80GB HBM3") for n in range(3)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({0: 84.0, 1: 91.0}, {0: 87.0}))
    first, second, third = read_temperatures(gpus).values()
    assert (first.normal, first.celsius, first.limit) == (True, 84.0, 87.0)
    assert (second.normal, second.celsius, second.limit) == (False, 91.0, 90.0)  # no bound of its own
    assert (third.normal, third.reason) == (None, "KeyError: 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read_temperatures(gpus[:1])[0].celsius == 91.0


def test_temperature_of_a_gpu_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = SimpleNamespace(id=0, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    assert "pip install nvidia-ml-py" in read_temperatures([gpu])[0].reason
    other = SimpleNamespace(id=1, platform="gpu", device_kind="Radeon")
    assert read_temperatures([other])[1].normal is None


INTERRUPTED = """
import os, signal, threading
import jax
from capibara.observe.health.deadline import Task

def compute():
    # As a device at work: Python's lock is given away in C++.
    return jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, h: h @ h * 1e-3, x))(x))

x = jax.numpy.ones((600, 600))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
Task(compute, "products").wait(600)
"""


def test_an_interrupt_in_a_script_does_not_abort_it():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (1, -signal.SIGINT, 130), done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")
