"""The configuration for Ray Train: against the interface that Ray documents, and with Ray where it is installed."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.errors import ConfigError, MissingExtraError
from capibara.train import ray as adapter
from capibara.train import read_losses, train


class RayError(Exception):
    """Ray's own errors."""


class WorkerGroup:
    """The part of Ray's group of workers that a backend uses: a function runs in one worker or in all of them."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, []

    def __len__(self) -> int:
        return self.count

    def execute_single(self, worker: int, function: Any, *args: Any) -> Any:
        self.calls.append((worker, function.__name__))
        return function(*args)

    def execute_single_async(self, worker: int, function: Any, *args: Any) -> Any:
        self.calls.append((worker, function.__name__))
        return lambda: function(*args)

    def execute_async(self, function: Any) -> Any:
        self.calls.append(("all", function.__name__))
        return function


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules with the names of Ray's, and the classes that Ray documents to derive from."""
    fake: Any = types.ModuleType("ray")
    fake.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    fake.exceptions = types.SimpleNamespace(RayError=RayError)
    fake.waited = []

    def get(futures: Any, timeout: float | None = None) -> Any:
        fake.waited.append(timeout)
        return [one() for one in futures] if isinstance(futures, list) else futures()

    fake.get = get
    backend: Any = types.ModuleType("ray.train.backend")
    backend.Backend = type("Backend", (), {})
    backend.BackendConfig = type("BackendConfig", (), {})
    for name, module in (
        ("ray", fake),
        ("ray.train", types.ModuleType("ray.train")),
        ("ray.train.backend", backend),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    adapter._classes.cache_clear()
    yield fake
    adapter._classes.cache_clear()


def test_all_workers_join_at_one_address(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []

    def join() -> None:
        names = ("CAPIBARA_COORDINATOR", "CAPIBARA_NUM_PROCESSES", "CAPIBARA_PROCESS_ID", "XLA_FLAGS", "MORE")
        joined.append([os.environ[name] for name in names])

    monkeypatch.setattr(adapter, "join_processes", join)
    for name in (
        "CAPIBARA_COORDINATOR",
        "CAPIBARA_NUM_PROCESSES",
        "CAPIBARA_PROCESS_ID",
        "MORE",
        "JAX_PLATFORMS",
    ):
        monkeypatch.setenv(name, "before")  # so that it is as before afterwards
    monkeypatch.setenv("XLA_FLAGS", "--here")
    config, group = adapter.ray_jax_config(devices=3, environment={"MORE": "1"}), WorkerGroup(3)
    assert isinstance(config, sys.modules["ray.train.backend"].BackendConfig)
    assert issubclass(config.backend_cls, sys.modules["ray.train.backend"].Backend)
    config.backend_cls().on_start(group, config)
    (address,) = {one[0] for one in joined}
    host, _, port = address.partition(":")
    assert host == "10.0.0.7"
    assert 0 < int(port) < 65536
    flags = "--here --xla_force_host_platform_device_count=3"
    assert [one[1:] for one in joined] == [["3", str(n), flags, "1"] for n in range(3)]
    # All are started before any is waited for: each waits for the others.
    assert [worker for worker, _ in group.calls] == [0, 0, 1, 2]
    assert ray.waited == [None]


def test_the_end_of_a_group_is_not_waited_for_for_ever(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, group = adapter.ray_jax_config(), WorkerGroup(2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    left = []
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: left.append(1))
    config.backend_cls().on_shutdown(group, config)
    assert (left, group.calls) == ([1], [("all", "_leave")])
    assert 0 < ray.waited[-1] <= 60

    def gone() -> None:
        raise RayError("the worker died")

    monkeypatch.setattr(jax.distributed, "shutdown", gone)
    config.backend_cls().on_shutdown(group, config)


@pytest.mark.parametrize("devices", [0, -1, True, 1.5])
def test_wrong_numbers_of_devices(ray: Any, devices: Any) -> None:
    with pytest.raises(ConfigError, match="devices="):
        adapter.ray_jax_config(devices=devices)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    adapter._classes.cache_clear()
    with pytest.raises(MissingExtraError, match=r"capibara-jax\[ray\]"):
        adapter.ray_jax_config()


SETTINGS = ("train.steps=4", "batch_size=8", "train.log_every=1")


def _train(config: dict[str, Any]) -> None:
    settings = tiny_config(config["directory"], *SETTINGS)
    report = train(settings, TinyModel(settings), tiny_corpus(), measure_utilisation=False)
    assert (jax.process_count(), report.devices) == (2, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_workers_of_ray_are_one_device(tmp_path: Path) -> None:
    real = pytest.importorskip("ray")
    jax_trainer = importlib.import_module("ray.train.v2.jax").JaxTrainer
    ray_train = importlib.import_module("ray.train")
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    real.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
    try:
        jax_trainer(
            _train,
            train_loop_config={"directory": str(tmp_path / "ray")},
            jax_config=adapter.ray_jax_config(devices=2),
            scaling_config=ray_train.ScalingConfig(num_workers=2),
            run_config=ray_train.RunConfig(storage_path=str(tmp_path), name="run"),
        ).fit()
    finally:
        real.shutdown()
    settings = tiny_config(tmp_path / "one", *SETTINGS)
    train(settings, TinyModel(settings), tiny_corpus(), measure_utilisation=False, devices=jax.devices()[:1])
    losses = [list(read_losses(tmp_path / name / "metrics.jsonl").values()) for name in ("ray", "one")]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=2e-5)
