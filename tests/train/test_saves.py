"""Checkpoints that are written while training goes on: the same bits, and nothing lost when the writing fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

import capibara.train.checkpoint as module
import capibara.train.checkpoint_files as checkpoint_files
import capibara.train.finite as finite
from capibara.hardware.telemetry import DeviceMemory
from capibara.train import CheckpointStore, checkpoint_store, read_losses, train
from capibara.train.copies import Copier
from capibara.train.errors import CheckpointWriteError, DataError, DivergedError, ProcessesError
from capibara.train.exchange import Exchange
from capibara.train.finite import check_finite, not_finite
from capibara.train.processes import Processes
from capibara.train.progress import SilentReporter
from capibara.train.recovery.guard import Guard
from capibara.train.saves import Saves
from capibara.train.signals import StopFlag

FACTS: dict[str, Any] = {"meta": {}, "config_toml": ""}


def tree(value: float) -> dict[str, Any]:
    key = jax.random.key(int(value))
    half = jax.random.normal(key, (7,)).astype(jnp.bfloat16)
    return {"model": {"w": jax.random.normal(key, (40, 30)) * value, "half": half, "n": jnp.int32(value)}}


@jax.jit
def _next(items: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, items)


donating = jax.jit(_next, donate_argnums=0)


def read(store: CheckpointStore, step: int) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree(1)["model"])
    return store.open(step).restore("model", like)


def same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_a_step_that_donates_the_state_changes_nothing(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copier, "place_for", lambda _, tree: place)
    warnings: list[str] = []
    store, items, wanted = CheckpointStore(tmp_path), tree(3), tree(3)
    saves = Saves(store, warn=warnings.append)
    saves.save(5, items, **FACTS)
    for _ in range(3):
        items = donating(items)
    jax.block_until_ready(items)
    saves.settle()
    same(read(store, 5), wanted["model"])
    assert bool(warnings) == (place == "none")


class Held:
    """Lets the writer stand still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached, self.real = threading.Event(), threading.Event(), module._write_item
        monkeypatch.setattr(module, "_write_item", self)

    def __call__(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.go.wait(60)
        self.real(*arguments)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("capibara-checkpoint"):
            thread.join(60)


def test_what_is_being_written_is_not_listed_and_the_next_save_waits_for_it(
    tmp_path: Path, held: Held
) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=10)
    saves = Saves(store)
    saves.save(10, tree(1), **FACTS)
    assert held.reached.wait(60)
    assert store.steps() == []
    assert store.newest() is None
    threading.Timer(0.1, held.go.set).start()
    saves.save(11, tree(2), best=True, **FACTS)
    assert store.steps()[0] == 10
    for step in (12, 13):
        saves.save(step, tree(step), **FACTS)
    saves.settle()
    assert store.steps() == [10, 11, 13]
    assert store.best_step() == 11
    assert sorted(os.listdir(tmp_path)) == ["10", "11", "13", "best"]


@pytest.mark.parametrize("where", ["_write_item", "sync_and_digest"])
def test_a_full_disk_is_known_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, saves = CheckpointStore(tmp_path), Saves(CheckpointStore(tmp_path))
    saves.save(1, tree(1), **FACTS)
    saves.settle()
    with monkeypatch.context() as patch:
        patch.setattr(module, where, fail)
        saves.save(2, tree(2), **FACTS)
        end = time.monotonic() + 60
        while not saves.failed():
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(CheckpointWriteError, match=r"step 2 .*No space left.*step 1 is intact") as caught:
            saves.settle()
    assert isinstance(caught.value.__cause__, OSError)
    assert not saves.failed()
    assert os.listdir(tmp_path) == ["1"]
    saves.save(3, tree(3), **FACTS)
    saves.settle()
    assert store.steps() == [1, 3]


@pytest.mark.parametrize(
    "error", [RuntimeError("UNAVAILABLE: the device is gone"), OSError(28, "No space left")]
)
def test_a_checkpoint_that_is_lost_with_its_device_does_not_keep_a_run_from_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    warnings: list[str] = []
    saves = Saves(CheckpointStore(tmp_path), warn=warnings.append)
    monkeypatch.setattr(module, "_write_item", fail)
    saves.save(2, tree(2), **FACTS)
    if isinstance(error, OSError):
        with pytest.raises(CheckpointWriteError, match=r"step 2 .*No space left"):
            saves.settle_before_going_back()
        return
    saves.settle_before_going_back()
    assert warnings == ["the checkpoint that was being written is lost: UNAVAILABLE: the device is gone"]
    assert os.listdir(tmp_path) == []


def test_a_save_that_hangs_is_reported_once_and_given_up_in_the_end(tmp_path: Path, held: Held) -> None:
    warnings: list[str] = []
    ticks: list[int] = []
    store = CheckpointStore(tmp_path)
    saves = Saves(
        store, slow_seconds=0.05, wait_seconds=0.4, warn=warnings.append, tick=lambda: ticks.append(1)
    )
    saves.save(7, tree(1), **FACTS)
    assert held.reached.wait(60)
    time.sleep(0.06)
    for _ in range(3):
        assert not saves.failed()
    (text,) = warnings
    assert "step 7 is being written" in text
    assert "test_saves.py" in text  # where it hangs
    assert "in __call__" in text
    with pytest.raises(
        CheckpointWriteError, match=r"step 7 is not complete after .*in __call__.*wait_seconds"
    ):
        saves.settle()
    assert len(warnings) == 1
    assert ticks
    # Should it go on after all, it is too late: the run's folder may be another run's by now.
    held.go.set()
    (thread,) = [one for one in threading.enumerate() if one.name == "capibara-checkpoint-7"]
    thread.join(60)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError("of training"), KeyboardInterrupt()])
def test_an_error_of_training_waits_for_the_checkpoint_and_an_impatient_user_does_not(
    tmp_path: Path, held: Held, error: BaseException
) -> None:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path)
    saves = Saves(store, warn=warnings.append)
    saves.save(7, tree(1), **FACTS)
    if isinstance(error, ValueError):
        held.go.set()
    saves.leave(error)
    assert store.steps() == ([7] if isinstance(error, ValueError) else [])
    assert len(warnings) == (0 if isinstance(error, ValueError) else 1)
    saves.leave(error)  # there is nothing to wait for


def test_who_does_not_wait_for_the_end_leaves_no_late_checkpoint(tmp_path: Path, held: Held) -> None:
    """As Ctrl-C in a notebook while the last save is waited for."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    saves = Saves(CheckpointStore(tmp_path), tick=interrupt)
    saves.save(7, tree(1), **FACTS)
    assert held.reached.wait(60)
    with pytest.raises(KeyboardInterrupt):
        saves.settle()
    held.go.set()
    (thread,) = [one for one in threading.enumerate() if one.name == "capibara-checkpoint-7"]
    thread.join(60)
    assert os.listdir(tmp_path) == []


def test_a_save_that_was_given_up_does_nothing_to_another_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go, hanging = module._write_item, threading.Event(), threading.Event()

    def first_hangs(*arguments: Any) -> None:
        if not hanging.is_set():
            hanging.set()
            assert go.wait(60)
        real(*arguments)

    monkeypatch.setattr(module, "_write_item", first_hangs)
    store = CheckpointStore(tmp_path)
    saves = Saves(store, wait_seconds=0.1)
    saves.save(7, tree(1), **FACTS)
    (thread,) = [one for one in threading.enumerate() if one.name == "capibara-checkpoint-7"]
    with pytest.raises(CheckpointWriteError, match="given up"):
        saves.settle()

    def meanwhile(*arguments: Any) -> tuple[int, str]:  # the other one is half written
        go.set()
        thread.join(60)
        return real_digest(*arguments)

    real_digest = checkpoint_files.sync_and_digest
    monkeypatch.setattr(module, "sync_and_digest", meanwhile)
    again = Saves(store, asynchronous=False)
    again.save(7, tree(2), **FACTS)
    assert not thread.is_alive()
    same(read(store, 7), tree(2)["model"])
    assert os.listdir(tmp_path) == ["7"]


@pytest.mark.parametrize("where", ["copy", "write"])
def test_devices_without_memory_for_the_copy_are_not_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
        )

    what = (Copier, "copy") if where == "copy" else (module, "_write_item")
    monkeypatch.setattr(*what, fail)
    saves = Saves(CheckpointStore(tmp_path))

    def both() -> None:
        saves.save(7, tree(1), **FACTS)
        saves.settle()

    with pytest.raises(
        CheckpointWriteError, match=r"step 7 .*no memory for a copy.*checkpoint\.asynchronous=false"
    ):
        both()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("length", [31, 32, 33])
def test_the_copy_is_gone_after_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Also while somebody keeps the error, as Python's prompt does."""
    real, error = module._write_item, {31: OSError(28, "full"), 32: ValueError("what")}.get(length)

    def write(path: Path, tree: Any, *rest: Any) -> None:
        real(path, tree, *rest)
        if error is not None:
            raise error

    monkeypatch.setattr(module, "_write_item", write)
    items = {"model": {"w": jnp.ones((length, 45))}}
    saves = Saves(CheckpointStore(tmp_path))
    saves.save(7, items, **FACTS)
    if error is None:
        saves.settle()
    else:
        with pytest.raises((CheckpointWriteError, ValueError)):
            saves.settle()
    assert len([one for one in jax.live_arrays() if one.shape == (length, 45)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_a_program_that_ends_waits_for_its_checkpoint(tmp_path: Path, full: bool) -> None:
    program = """
import errno, os, sys, time
import jax.numpy as jnp
from capibara.train import CheckpointStore, checkpoint
from capibara.train.saves import Saves

real = checkpoint._write_item
def slow(*arguments):
    time.sleep(0.5)
    if sys.argv[2] == "True":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(*arguments)

checkpoint._write_item = slow
def of_a_function():
    saves = Saves(CheckpointStore(sys.argv[1]))
    saves.save(3, {"model": {"w": jnp.ones(3)}}, meta={}, config_toml="")

of_a_function()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "store"), str(full)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(tmp_path / "store") == ([] if full else ["3"])
    assert ("could not write the checkpoint of step 3" in ended.stderr) == full, ended.stderr


class Client:
    """The coordinator's key-value store, as far as it is used."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            assert key not in self.found
            self.found[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.found, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: nobody said it")
            return self.found[key]

    def key_value_try_get(self, key: str) -> str:
        if key not in self.found:
            raise RuntimeError("NOT_FOUND: no such key")
        return self.found[key]

    def key_value_delete(self, place: str) -> None:
        for key in [key for key in self.found if key.startswith(place)]:
            del self.found[key]


def together(monkeypatch: pytest.MonkeyPatch, what: Any, count: int = 3) -> tuple[list[Any], Client]:
    """What each of some processes gets, as threads."""
    client, results = Client(), [None] * count
    monkeypatch.setattr("capibara.train.exchange.coordinator_client", lambda: client)
    monkeypatch.setattr("capibara.train.exchange._POLL_MS", 20)

    def one(index: int) -> None:
        exchange = Exchange.between(Processes(count, index), "token")
        assert exchange is not None
        try:
            results[index] = what(exchange)
        except Exception as error:
            results[index] = error  # pyright: ignore[reportCallIssue, reportArgumentType]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, client


def test_threads_of_processes_agree_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def what(exchange: Exchange) -> Any:
        first = exchange.first_does(lambda: {"name": f"of {exchange.index}"})
        shares = exchange.all_do(lambda: exchange.index**2)
        exchange.barrier("here")
        return first, shares

    results, client = together(monkeypatch, what)
    assert results == [({"name": "of 0"}, [0, 1, 4])] * 3
    exchange = Exchange.between(Processes(3, 0), "token")
    assert exchange is not None
    exchange.forget()
    assert not client.found


@pytest.mark.parametrize("how", ["action", "elsewhere"])
def test_all_threads_learn_of_a_failure(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def what(exchange: Exchange) -> Any:
        def action() -> int:
            if exchange.index == 1:
                raise DataError("what happened")
            return 1

        if how == "elsewhere" and exchange.index == 1:
            exchange.tell_failure(DataError("what happened"))
            return DataError("what happened")
        return exchange.all_do(action)

    results, _ = together(monkeypatch, what)
    assert [type(one) for one in results] == [DataError] * 3
    assert {str(one) for one in results} == {"what happened"}


def test_a_thread_that_was_given_up_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def what(exchange: Exchange) -> Any:
        if exchange.index == 0:
            exchange.given_up.set()
            return exchange.all_say(1)
        return None

    (result, *_), _ = together(monkeypatch, what)
    assert isinstance(result, ProcessesError)


def test_without_a_coordinator_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.train.exchange.coordinator_client", lambda: None)
    assert Exchange.between(Processes(2, 0), "token") is None
    alone = Exchange.between(Processes(1, 0), "token")
    assert alone is not None
    assert alone.all_do(lambda: 3) == [3]


def test_infinities_that_were_there_from_the_start_are_part_of_the_model() -> None:
    mask = jnp.array([0.0, -jnp.inf])
    start = {"model": {"mask": mask, "w": jnp.ones(3), "n": jnp.int32(1)}}
    check_finite(1, start, lambda: not_finite(start))
    bad = {"model": {**start["model"], "w": jnp.array([1.0, jnp.nan, 0.0])}}
    with pytest.raises(DivergedError, match=r"model/w became infinite or not a number by step 4") as caught:
        check_finite(4, bad, lambda: not_finite(start))
    assert caught.value.step == 4

    def never() -> Any:
        raise AssertionError("not needed")

    check_finite(1, {"model": {"w": jnp.ones(3)}}, never)


def test_arrays_in_the_hosts_memory_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = finite._finite, []

    def look(leaves: list[Any]) -> Any:
        sizes.append(len(leaves))
        return real(leaves)

    monkeypatch.setattr(finite, "_finite", look)
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    start = {
        name: jax.device_put(jnp.ones(3), there) if name in "bd" else jnp.ones(3)
        for name in ("a", "b", "c", "d")
    }
    check_finite(1, start, lambda: not_finite(start))
    assert sizes == [2, 1, 1]
    for name in start:
        bad = {**start, name: start[name].at[1].set(jnp.inf) if name in "ac" else there_is_one(there)}
        with pytest.raises(DivergedError, match=f"^{name} became infinite"):
            check_finite(4, bad, lambda: not_finite(start))


def there_is_one(where: Any) -> jax.Array:
    return jax.device_put(jnp.array([1.0, jnp.nan]), where)


class Stopping(SilentReporter):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, step: int, loss: float) -> None:
        self.steps.append(step)


def test_a_run_ends_at_the_next_step_when_its_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = module._write_item, threading.Event()

    def failing(path: Path, *rest: Any) -> None:
        if ".tmp-8-" in str(path):
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *rest)

    class Waiting(Stopping):
        def step(self, step: int, loss: float) -> None:
            super().step(step, loss)
            if step > 8:
                assert failed.wait(60)
                time.sleep(0.2)

    monkeypatch.setattr(module, "_write_item", failing)
    config, reporter = tiny_config(tmp_path, "train.steps=200"), Waiting()
    with pytest.raises(CheckpointWriteError, match=r"step 8 .*No space left.*step 4 is intact"):
        train(config, TinyModel(config), tiny_corpus(), reporter=reporter, measure_utilisation=False)
    assert checkpoint_store(tmp_path).steps() == [4]
    assert 8 <= max(reporter.steps) < 16  # it was never asked to save again


@pytest.mark.slow
def test_a_run_that_saves_meanwhile_is_the_one_that_waits(tmp_path: Path) -> None:
    found = []
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        config = tiny_config(
            folder, f"checkpoint.asynchronous={str(asynchronous).lower()}", "checkpoint.keep=9"
        )
        train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
        store = checkpoint_store(folder)
        assert store.steps() == [4, 8, 12]
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as reader:
            arrays = [
                reader.restore((store.folder / str(step) / item).absolute())
                for step in store.steps()
                for item in ("model", "training")
            ]
        found.append((arrays, [loss.hex() for loss in read_losses(folder / "metrics.jsonl").values()]))
    assert found[0][1] == found[1][1]
    same(found[0][0], found[1][0])


@pytest.mark.slow
def test_a_rollback_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, going_back = module._write_item, threading.Event()

    def slow(path: Path, *rest: Any) -> None:
        if ".tmp-4-" in str(path):
            going_back.wait(30)
        real(path, *rest)

    checks = []

    def check(self: Guard, step: int, values: Any) -> None:
        if step == 6 and not checks:
            checks.append(checkpoint_store(tmp_path).steps())
            threading.Timer(0.3, going_back.set).start()
            raise DivergedError("the loss became nan at step 6. Nothing.", step=6)

    monkeypatch.setattr(module, "_write_item", slow)
    monkeypatch.setattr(Guard, "check", check)
    warnings: list[str] = []

    class Told(SilentReporter):
        def warn(self, text: str) -> None:
            warnings.append(text)

    config = tiny_config(tmp_path, "recovery.replay_every=3")
    report = train(config, TinyModel(config), tiny_corpus(), reporter=Told(), measure_utilisation=False)
    assert checks == [[]]  # it was not there yet
    assert "Going back to step 4" in warnings[0]
    assert report.step == 12


@pytest.mark.slow
def test_a_signal_waits_for_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._write_item

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        real(*arguments)

    class Asked(SilentReporter):
        def step(self, step: int, loss: float) -> None:
            if step == 5:
                stop.requested = True

    monkeypatch.setattr(module, "_write_item", slow)
    config, stop = tiny_config(tmp_path), StopFlag()
    report = train(
        config, TinyModel(config), tiny_corpus(), reporter=Asked(), stop=stop, measure_utilisation=False
    )
    assert report.reason == "interrupted"
    assert checkpoint_store(tmp_path).steps() == [4, report.step]


@pytest.mark.parametrize(
    ("free", "available", "expected"),
    [
        (20_000, 0, "device"),
        (5_000, 10**9, "host"),
        (5_000, 5_000, "none"),
        (None, 10**9, "device"),
        (None, 10, "none"),
    ],
)
def test_a_copy_goes_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, free: int | None, available: int, expected: str
) -> None:
    def figures(devices: list[Any]) -> list[DeviceMemory]:
        limit = None if free is None else 10**6
        return [DeviceMemory(str(one), 0, limit and limit - (free or 0), limit) for one in devices]

    monkeypatch.setattr("capibara.train.copies.device_memory", figures)
    monkeypatch.setattr("capibara.train.copies.available_memory", lambda: available)
    assert Copier().place_for({"w": jnp.zeros((100, 100), jnp.int8)}) == expected  # 10,000 bytes


def test_the_copy_before_is_not_counted_as_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a device has the last copy in it, which is gone when the next is made."""
    peak = [980_000]

    def figures(devices: list[Any]) -> list[DeviceMemory]:
        return [DeviceMemory(str(one), 0, peak[0], 10**6) for one in devices]

    monkeypatch.setattr("capibara.train.copies.device_memory", figures)
    monkeypatch.setattr("capibara.train.copies.available_memory", lambda: 0)
    copier, state = Copier(), {"w": jnp.zeros((100, 100), jnp.int8)}
    assert copier.place_for(state) == "device"
    peak[0] += 10_000
    assert copier.place_for(state) == "device"
    assert copier.place_for({"w": jnp.zeros((100, 101), jnp.int8)}) == "none"  # of another size


def test_room_is_looked_for_again_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Copier, "place_for", lambda _, tree: asked.append(tree["params"].sharding) or "none")
    monkeypatch.setattr(CheckpointStore, "save", lambda *args, **options: None)
    saves = Saves(CheckpointStore(tmp_path))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for step, where in enumerate([here, here, there, there]):
        saves.save(step, {"params": jax.device_put(jnp.zeros(4), where)})
    assert asked == [here, there]
