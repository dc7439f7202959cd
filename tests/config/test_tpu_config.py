"""TPUConfig: the document's snippets, validation, sharding rules, hotspots and real profiling."""

from __future__ import annotations

import gc
import math
import shutil
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from vendor_libraries import FakeDevice, FakeNvml, libtpu

from capibara.config import ConfigError, TPUConfig, TPUError
from capibara.config.tpu_config import ScalingConfig, TPUConfigError
from capibara.errors import CapibaraError
from capibara.hardware import ChipError


def document_rule(tensor_shape):
    """The rule as document 3 states it."""
    if len(tensor_shape) == 2:
        return PartitionSpec("data", "model")
    elif len(tensor_shape) == 3:
        return PartitionSpec("data", None, "model")
    else:
        return PartitionSpec("data", *[None] * (len(tensor_shape) - 2), "model")


def test_the_documents_call():
    config = TPUConfig(
        num_chips=32,
        topology="4x8",
        memory_per_chip=32 * 1024**3,
        flops_per_chip=275e12,
        compute_dtype="bfloat16",
        param_dtype="float32",
    )
    assert config == TPUConfig()
    assert config.mesh_shape == (4, 8)
    assert config.axis_sizes == {"data": 4, "model": 8}
    assert config.use_mixed_precision is True
    assert config.total_memory == 2**40
    assert config.total_flops == pytest.approx(8.8e15)
    assert config.scaling_config.load_threshold == 0.8
    assert hash(config) == hash(TPUConfig())


def test_memory_config():
    memory = TPUConfig().get_memory_config()
    assert memory["use_mixed_precision"] is True
    assert (memory["compute_dtype"], memory["param_dtype"]) == ("bfloat16", "float32")
    assert (memory["compute_bytes"], memory["param_bytes"]) == (2, 4)
    assert TPUConfig(compute_dtype="float32").get_memory_config()["use_mixed_precision"] is False


def test_describe():
    text = TPUConfig().describe()
    assert "data=4, model=8" in text
    assert "32 GiB a chip, 1024 GiB in all" in text


def test_errors_are_of_every_fitting_kind():
    with pytest.raises(TPUError) as caught:
        TPUConfig(num_chips=31)
    for kind in (TPUConfigError, CapibaraError, RuntimeError, ConfigError, ValueError):
        assert isinstance(caught.value, kind)
    assert issubclass(TPUError, CapibaraError)
    assert issubclass(TPUError, RuntimeError)


@pytest.mark.parametrize(
    ("settings_", "parts"),
    [
        ({"num_chips": 31}, ["'4x8'", "32 chips", "num_chips = 31"]),
        ({"topology": "4x9"}, ["'4x9'", "36"]),
        ({"topology": "4,8"}, ["'4,8'"]),
        ({"topology": (4, 8)}, ["(4, 8)", "string"]),
        ({"num_chips": 0}, ["num_chips", "0"]),
        ({"num_chips": 32.0}, ["num_chips", "integer"]),
        ({"num_chips": True}, ["num_chips", "True"]),
        ({"memory_per_chip": 0}, ["memory_per_chip"]),
        ({"flops_per_chip": math.nan}, ["flops_per_chip", "nan"]),
        ({"flops_per_chip": -1}, ["flops_per_chip"]),
        ({"compute_dtype": "bfloat"}, ["compute_dtype", "'bfloat'", "Did you mean 'bfloat16'?"]),
        ({"param_dtype": 32}, ["param_dtype", "32"]),
        ({"mesh_axes": ("data",)}, ["mesh_axes", "2 different names"]),
        ({"mesh_axes": ("data", "data")}, ["mesh_axes"]),
        ({"topology": "2x2x2x4"}, ["mesh_axes", "4 axes"]),
        ({"scaling_config": 0.8}, ["scaling_config"]),
    ],
)
def test_bad_settings(settings_, parts):
    with pytest.raises(TPUConfigError) as caught:
        TPUConfig(**settings_)
    for part in parts:
        assert part in str(caught.value)


def test_bad_threshold():
    with pytest.raises(TPUError, match="load_threshold"):
        ScalingConfig("high")  # pyright: ignore[reportArgumentType]


def test_from_chip():
    config = TPUConfig.from_chip("v4", "4x8")
    assert config == TPUConfig()
    assert TPUConfig.from_chip("v5e", "2x4", param_dtype="bfloat16").num_chips == 8
    with pytest.raises(ChipError, match="memory"):
        TPUConfig.from_chip("axion")


# --- sharding ---


@pytest.mark.parametrize("shape", [(32, 512), (8, 3, 16), (4, 5, 6, 8), (4, 1, 1, 1, 8), (0, 8)])
def test_divisible_shapes_follow_the_documents_rule(shape):
    assert TPUConfig().get_sharding_spec(shape) == document_rule(shape)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), PartitionSpec()),
        ((16,), PartitionSpec("model")),
        ((7,), PartitionSpec(None)),
        ((7, 16), PartitionSpec(None, "model")),
        ((8, 9), PartitionSpec("data", None)),
        ((7, 4, 9), PartitionSpec(None, None, None)),
    ],
)
def test_low_ranks_and_dimensions_the_mesh_does_not_divide(shape, expected):
    assert TPUConfig().get_sharding_spec(shape) == expected


def test_meshes_of_other_ranks():
    flat = TPUConfig(num_chips=8, topology="8")
    assert flat.get_sharding_spec((16, 16)) == PartitionSpec("data", None)
    deep = TPUConfig(num_chips=16, topology="2x2x4")
    assert deep.mesh_axes == ("data", "fsdp", "model")
    assert deep.get_sharding_spec((4, 4)) == PartitionSpec("data", "model")
    named = TPUConfig(mesh_axes=("rows", "columns"))
    assert named.get_sharding_spec((32, 32)) == PartitionSpec(None, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.sampled_from([(1, 1), (4, 8), (8, 4), (16, 2), (3, 5)]))
def test_every_spec_is_accepted_by_jax(shape, mesh_shape):
    rows, columns = mesh_shape
    config = TPUConfig(num_chips=rows * columns, topology=f"{rows}x{columns}")
    sharding = NamedSharding(AbstractMesh(mesh_shape, ("data", "model")), config.get_sharding_spec(shape))
    shard = sharding.shard_shape(tuple(shape))  # raises where a dimension is not divisible
    assert len(shard) == len(shape)


@pytest.mark.parametrize("shape", [(4, -1), ("a",), 5, (4.0, 8), None])
def test_shapes_that_are_none(shape):
    with pytest.raises(TPUError, match="tensor_shape"):
        TPUConfig().get_sharding_spec(shape)


# --- hotspots ---


def document_loop(load, threshold):
    """The double loop of document 3."""
    hotspots = []
    for i in range(load.shape[0]):
        for j in range(load.shape[1]):
            if load[i, j] > threshold:
                hotspots.append((i, j))  # noqa: PERF401
    return hotspots


@settings(max_examples=80, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int32]),
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6),
    ),
    st.floats(-2, 2),
)
def test_hotspots_equal_the_documents_double_loop(load, threshold):
    config = TPUConfig(scaling_config=ScalingConfig(threshold))
    found = config.detect_hotspots(load)
    assert found == document_loop(load, threshold)
    assert all(type(i) is int and type(j) is int for i, j in found)


def test_hotspots_of_jax_arrays_lists_and_bfloat16():
    config = TPUConfig()
    assert config.detect_hotspots(jnp.array([[0.9, 0.1], [0.1, 0.95]])) == [(0, 0), (1, 1)]
    assert config.detect_hotspots([[0.8, 0.81]]) == [(0, 1)]
    assert config.detect_hotspots(jnp.ones((1, 2), jnp.bfloat16)) == [(0, 0), (0, 1)]
    assert config.detect_hotspots([[math.nan, math.inf]]) == [(0, 1)]


@pytest.mark.parametrize("load", [1.0, [1.0], [[[1.0]]], [["a"]], [[1j]]])
def test_loads_that_are_no_tables_of_numbers(load):
    with pytest.raises(TPUError, match="load"):
        TPUConfig().detect_hotspots(load)


def test_a_hot_hidden_position_spreads_the_batch():
    load = np.zeros((4, 8))
    load[:, 3] = 1.0
    assert TPUConfig().optimize_sharding(load=load) == PartitionSpec(("data", "model"), None)


def test_a_hot_batch_row_spreads_the_hidden_dimension():
    load = np.zeros((4, 8))
    load[2, :] = 1.0
    assert TPUConfig().optimize_sharding(load) == PartitionSpec(None, ("data", "model"))


def test_no_hotspots_change_nothing():
    assert TPUConfig().optimize_sharding(np.zeros((4, 8))) == PartitionSpec("data", "model")
    spec = TPUConfig().optimize_sharding(np.zeros((4, 8)), (32, 5, 64))
    assert spec == TPUConfig().get_sharding_spec((32, 5, 64))


def test_optimize_sharding_for_a_tensor():
    load = np.zeros((4, 8))
    load[:, 0] = 1.0
    config = TPUConfig()
    assert config.optimize_sharding(load, (64, 5, 16)) == PartitionSpec(("data", "model"), None, None)
    # 40 rows are not a multiple of 32 chips: the regular layout.
    assert config.optimize_sharding(load, (40, 5, 16)) == PartitionSpec("data", None, "model")
    with pytest.raises(TPUError, match="two dimensions"):
        config.optimize_sharding(load, (64,))


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(np.float32, (4, 8), elements=st.floats(0, 1, width=32)), st.tuples(*[st.integers(1, 4)] * 2)
)
def test_optimized_specs_are_accepted_by_jax(load, parts):
    shape = (32 * parts[0], 3, 32 * parts[1])
    mesh = AbstractMesh((4, 8), ("data", "model"))
    spec = TPUConfig().optimize_sharding(load, shape)
    shards = NamedSharding(mesh, spec).shard_shape(shape)
    assert math.prod(shards) * 32 == math.prod(shape)  # every chip holds an equal part


# --- profiling ---


def test_profile_reports_what_is_really_here(tmp_path):
    kept = jnp.ones((256, 256), jnp.float32)
    usage = TPUConfig().profile_tpu_usage(trace_dir=tmp_path / "trace", workload=lambda: jnp.sin(kept).sum())
    assert usage["device_count"] == len(jax.local_devices())  # not the configured 32
    assert usage["platform"] == jax.devices()[0].platform
    assert usage["memory_allocated"] >= kept.nbytes
    assert usage["memory_peak"] >= usage["memory_allocated"]
    assert usage["seconds"] > 0
    utilization = usage["device_utilization"]
    assert utilization is None or 0 <= utilization <= 1
    assert set(usage["notes"]) == {"memory_allocated", "memory_peak", "device_utilization"}
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_profile_sees_memory_come_and_go():
    gc.collect()  # arrays of earlier tests must not vanish in between
    before = TPUConfig().profile_tpu_usage()["memory_allocated"]
    block = jnp.zeros((1024, 1024), jnp.float32).block_until_ready()
    during = TPUConfig().profile_tpu_usage()["memory_allocated"]
    assert during - before >= block.nbytes
    del block
    assert TPUConfig().profile_tpu_usage()["memory_allocated"] < during


def test_a_trace_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TPUError, match="trace_dir"):
        TPUConfig().profile_tpu_usage(trace_dir=tmp_path / "file" / "trace")

    def gone() -> None:
        shutil.rmtree(tmp_path / "trace")
        (tmp_path / "trace").write_text("")

    with pytest.raises(TPUError, match="trace_dir"):
        TPUConfig().profile_tpu_usage(trace_dir=tmp_path / "trace", workload=gone)
    with pytest.raises(ZeroDivisionError):
        TPUConfig().profile_tpu_usage(trace_dir=tmp_path / "broken", workload=lambda: 1 // 0)
    with jax.profiler.trace(str(tmp_path / "next")):  # none of them is still being taken
        pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workload": 5}, "workload: got 5, expected a function without arguments or None. Pass one"),
        ({"trace_dir": 5}, "trace_dir: got 5, expected the path of a folder"),
        ({"trace_dir": b"traces"}, "trace_dir: got b'traces', expected the path of a folder (str"),
        ({"trace_dir": ""}, "trace_dir: got '', expected the path of a folder"),
        (
            {"trace_dir": "a\0b"},
            "trace_dir: got 'a\\x00b', expected the path of a folder (str or os.PathLike), without",
        ),
        ({"trace_dir": Path("a\0b")}, "without NUL characters, or None. Pass a folder"),
    ],
)
def test_invalid_arguments_of_profiling(arguments: dict[str, Any], words: str):
    with pytest.raises(TPUError) as caught:
        TPUConfig().profile_tpu_usage(**arguments)
    assert words in str(caught.value)


def test_a_failing_workload_is_not_hidden():
    def broken():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        TPUConfig().profile_tpu_usage(workload=broken)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two GPUs in JAX and in NVML, of which the second does not report its utilization."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = [FakeDevice("gpu", number, "NVIDIA B", 50 + number) for number in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    return fake


def test_utilization_of_gpus_is_nvmls(gpus: FakeNvml):
    usage = TPUConfig().profile_tpu_usage(workload=lambda: time.sleep(0.25))
    assert usage["device_utilization"] == pytest.approx(0.4)
    note = usage["notes"]["device_utilization"]
    assert "NVML, mean of" in note
    assert "of 1 of 2 devices" in note
    assert "others: RuntimeError: Not Supported" in note
    assert usage["memory_allocated"] == 101
    assert gpus.started == 1
    assert "capibara-utilization" not in [thread.name for thread in threading.enumerate()]


def test_utilization_is_the_mean_of_the_region(gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    working = False
    seen: list[int] = []

    def rates(handle: int) -> types.SimpleNamespace:
        gpu = 10 + 10 * len(seen) if working else 99
        if working and handle == 0:
            seen.append(gpu)
        return types.SimpleNamespace(gpu=gpu if handle == 0 else 50)

    def workload() -> None:
        nonlocal working
        working = True
        deadline = time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(gpus, "nvmlDeviceGetUtilizationRates", rates)
    usage = TPUConfig().profile_tpu_usage(workload=workload)
    # Not the 99 % before it. Each device counts alike.
    first = sum(seen) / len(seen) / 100
    assert usage["device_utilization"] == pytest.approx((first + 0.5) / 2)
    assert f"mean of {len(seen)} readings" in usage["notes"]["device_utilization"]
    assert "of 2 of 2 devices" in usage["notes"]["device_utilization"]


def test_gpus_are_those_that_the_program_may_see(gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice("gpu", 0, "NVIDIA A", 1)])
    for visible, busy in (("GPU-first", 0.4), ("GPU-second", None), ("1,0", None), ("0", 0.4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert TPUConfig().profile_tpu_usage(workload=lambda: None)["device_utilization"] == busy


def test_utilization_of_tpus_is_libtpus(monkeypatch: pytest.MonkeyPatch):
    devices = [FakeDevice("tpu", number, "TPU v4", 1) for number in range(4)]  # two on each chip
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    libtpu(monkeypatch, duty_cycle_pct=["10.00", "70.00"])
    usage = TPUConfig().profile_tpu_usage(workload=lambda: None)
    assert usage["device_utilization"] == pytest.approx(0.4)
    assert usage["notes"]["device_utilization"].startswith("libtpu's duty cycle")
    libtpu(monkeypatch)
    usage = TPUConfig().profile_tpu_usage(workload=lambda: None)
    assert usage["device_utilization"] is None
    assert "libtpu reports no duty_cycle_pct now" in usage["notes"]["device_utilization"]


def test_utilization_that_nobody_reports(gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    usage = TPUConfig().profile_tpu_usage(workload=lambda: None)
    assert usage["device_utilization"] is None
    assert usage["notes"]["device_utilization"].endswith("pip install nvidia-ml-py")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice("gpu", 0, "AMD X", 1)])
    usage = TPUConfig().profile_tpu_usage(workload=lambda: None)
    assert usage["notes"]["device_utilization"] == "no source of utilization for AMD X"


def test_a_workload_that_fails_ends_the_readings(gpus: FakeNvml):
    with pytest.raises(ZeroDivisionError):
        TPUConfig().profile_tpu_usage(workload=lambda: 1 // 0)
    assert "capibara-utilization" not in [thread.name for thread in threading.enumerate()]
