"""Checkpoints: exact, atomic, checked before they are trusted, and safe from a full disk."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import python

import capibara.train.checkpoint as module
from capibara.train.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from capibara.train.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ResumeMismatchError,
    RunLockedError,
    RunWriteError,
)
from capibara.train.quiet_orbax import quiet_orbax
from capibara.train.rundir import atomic_write, lock_run, prepare_folder


def tree(value: int = 0) -> dict[str, Any]:
    key = jax.random.key(value)
    return {
        "weights": {"w": jax.random.normal(key, (40, 30)), "b": jnp.full(3, jnp.nan)},
        "half": jax.random.normal(key, (7,)).astype(jnp.bfloat16),
        "step": jnp.int32(value),
        "nothing": {},
    }


def target(like: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like)


def save(store: CheckpointStore, step: int) -> Checkpoint:
    return store.save(step, {"model": tree(step)}, meta={"seconds": 1.5}, config_toml="# settings\n")


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    assert store.newest() is None
    save(store, 7)
    found = CheckpointStore(tmp_path / "c").newest()
    assert found is not None
    assert found.step == 7
    assert found.meta["seconds"] == 1.5
    assert found.config_path.read_text() == "# settings\n"
    assert_same_bits(found.restore("model", target(tree(7))), tree(7))


def test_orbax_alone_can_read_it(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    save(CheckpointStore(tmp_path), 3)
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore(tmp_path / "3" / "model", target(tree(3)))
    assert_same_bits(read, tree(3))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 100, 20):
        save(store, step)
    assert store.steps() == [20, 100]
    assert sorted(os.listdir(tmp_path)) == ["100", "20"]


def test_some_are_kept_besides_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=10)
    for step in (5, 10, 15, 20, 25):
        store.save(step, {"model": tree(step)}, meta={}, config_toml="", best=step in (5, 15))
    assert store.steps() == [10, 15, 20, 25]
    assert store.best_step() == 15
    found = open_checkpoint(tmp_path / "best")
    assert found.step == 15
    assert_same_bits(found.restore("model", target(tree(15))), tree(15))
    # The link is no checkpoint of its own, and one that leads nowhere is nothing.
    shutil.rmtree(tmp_path / "15")
    assert store.best_step() is None
    store.clear()
    assert not list(tmp_path.iterdir())


def test_a_folder_called_best_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in ("best", ".tmp-best-3"):
        (tmp_path / name).mkdir()
    store.clear()
    store.clean()
    assert os.listdir(tmp_path) == ["best"]
    with pytest.raises(CheckpointWriteError, match=r"step 3 is written.*keep_best=false"):
        store.save(3, {"model": tree(3)}, meta={}, config_toml="", best=True)
    assert sorted(os.listdir(tmp_path)) == ["3", "best"]


@pytest.mark.parametrize("name", ["../../etc", "", "latest", "15x"])
def test_a_link_to_something_else_marks_nothing(name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 15)
    if name:
        (tmp_path / "best").symlink_to(name)
    assert store.best_step() is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 4)
    store.save(4, {"model": tree(9)}, meta={"seconds": 2.0}, config_toml="")
    found = store.open(4)
    assert found.meta["seconds"] == 2.0
    assert_same_bits(found.restore("model", target(tree(9))), tree(9))


def biggest_file(path: Path) -> Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> None:
    file = biggest_file(path / "model")
    os.truncate(file, file.stat().st_size - 1)


def flip(path: Path) -> None:
    file = biggest_file(path / "model" / "ocdbt.process_0")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(path: Path) -> None:
    biggest_file(path / "model").unlink()


def add(path: Path) -> None:
    (path / "model" / "extra").write_text("x")


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 30)


def foreign_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": [1, 2]}')


def nested_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def link(path: Path) -> None:
    file = biggest_file(path / "model")
    shutil.move(file, path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def newer_format(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "format": 9}))


DAMAGES = [
    truncate,
    flip,
    remove,
    add,
    lose_manifest,
    cut_manifest,
    foreign_manifest,
    nested_manifest,
    link,
    newer_format,
]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    store = CheckpointStore(folder)
    save(store, 1)
    save(store, 2)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, two_checkpoints: Path, damage: Any
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two_checkpoints, folder)
    damage(folder / "2")
    store, warnings = CheckpointStore(folder), []
    found = store.newest(warn=warnings.append)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert f"{folder}/2' is damaged" in warnings[0]
    with pytest.raises(CheckpointDamagedError):
        store.open(2)
    store.set_aside(after=1)
    assert store.steps() == [1]
    damage(folder / "1")
    with pytest.raises(CheckpointDamagedError, match=r"is whole.*--fresh"):
        store.newest()
    store.clear()
    assert store.newest() is None
    assert [name for name in os.listdir(folder) if name != "elsewhere"] == []


@pytest.mark.parametrize("flips", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_detected(flips: int, two_checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two_checkpoints / "2", folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    # Half of them in any file alike, half in any byte alike.
    random = np.random.default_rng(flips)
    for number in range(flips):
        shares = None if number % 2 else sizes / sizes.sum()
        path = files[random.choice(np.flatnonzero(sizes), p=None if shares is None else shares[sizes > 0])]
        place, bit = int(random.integers(path.stat().st_size)), int(random.integers(8))
        with open(path, "r+b") as stream:
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ 1 << bit]))
            stream.flush()
            with pytest.raises(CheckpointDamagedError):
                open_checkpoint(folder)
            stream.seek(place)
            stream.write(bytes([byte]))
    assert open_checkpoint(folder).step == 2


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path / "5")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {**t, "weights": {**t["weights"], "w": jnp.zeros((40, 31))}},
        lambda t: {**t, "more": jnp.zeros(3)},
        lambda t: {**t, "half": t["half"].astype(jnp.float32)},
        lambda t: {key: value for key, value in t.items() if key != "half"},
    ],
)
def test_arrays_of_another_model_are_refused(two_checkpoints: Path, change: Any) -> None:
    checkpoint = open_checkpoint(two_checkpoints / "2")
    with pytest.raises(ResumeMismatchError, match=r"model/\S+ is .* there, expected .*--fresh"):
        checkpoint.restore("model", target(change(tree(2))))


def test_interrupted_saves_are_invisible_and_cleaned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    # What a kill just before the rename leaves behind.
    shutil.copytree(tmp_path / "1", tmp_path / ".tmp-2-123")
    assert store.steps() == [1]
    store.clean()
    assert os.listdir(tmp_path) == ["1"]


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = CheckpointStore(tmp_path), os.rename
    save(store, 1)

    def rename(source: Any, target: Any) -> None:
        if Path(target) == tmp_path / "1" and "old" not in Path(source).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointWriteError, match="step 1 is intact"):
            save(store, 1)
    assert os.listdir(tmp_path) == ["1"]
    assert store.open(1).step == 1
    save(store, 1)
    assert os.listdir(tmp_path) == ["1"]


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    store, real = CheckpointStore(tmp_path), os.rename
    save(store, 1)

    def rename(source: Any, target: Any) -> None:
        if Path(target) == tmp_path / "1":
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(Killed):
            save(store, 1)
    assert store.steps() == []
    store.clean()
    assert os.listdir(tmp_path) == ["1"]
    assert store.open(1).step == 1


def test_messages_of_others_pass_while_orbax_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_orbax():
        logging.getLogger("absl").warning("a user's")
        logging.getLogger("asyncio").warning("another one")
        record = logging.LogRecord(
            "absl", logging.ERROR, "/x/orbax/checkpoint/a.py", 1, "its own", None, None
        )
        logging.getLogger("absl").handle(record)
        logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert caplog.messages == ["a user's", "another one"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("where", ["orbax", "manifest", "rename"])
def test_a_failing_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if where == "orbax":
            patch.setattr(module, "_write_item", fail)
        elif where == "manifest":
            patch.setattr(module, "sync_and_digest", fail)
        else:
            patch.setattr("os.rename", fail)
        with pytest.raises(CheckpointWriteError) as caught:
            save(store, 2)
    assert os.strerror(number) in str(caught.value)
    assert "step 1 is intact" in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert os.listdir(tmp_path) == ["1"]
    found = store.newest()
    assert found is not None
    assert_same_bits(found.restore("model", target(tree(1))), tree(1))
    save(store, 2)
    assert store.steps() == [1, 2]


def test_an_error_that_is_not_the_disks_is_not_called_that(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        CheckpointStore(tmp_path).save(1, {"model": {"x": object()}}, meta={}, config_toml="")
    assert not isinstance(caught.value, CheckpointWriteError)
    assert os.listdir(tmp_path) == []


REAL_DISK = """
import shutil, sys
from collections import namedtuple
import jax
from capibara.train.checkpoint import CheckpointStore
from capibara.train.errors import CheckpointWriteError

Usage = namedtuple("Usage", "free")
folder, limit = sys.argv[1], int(sys.argv[2])
if limit < 0:
    # Let the write itself find out.
    shutil.disk_usage = lambda folder: Usage(2**60)
store = CheckpointStore(folder)
small = {"x": jax.random.normal(jax.random.key(0), (100, 100))}
large = {str(n): jax.random.normal(jax.random.key(n), (400, 400)) for n in range(5)}
store.save(1, {"model": small}, meta={"seconds": 0}, config_toml="")
if limit > 0:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for _ in range(2):
    try:
        store.save(2, {"model": large}, meta={"seconds": 0}, config_toml="")
    except CheckpointWriteError as error:
        print(error)
assert store.newest().step == 1
store.save(3, {"model": small}, meta={"seconds": 0}, config_toml="")
print("steps", store.steps())
"""


@pytest.mark.slow
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    done = python("-c", REAL_DISK, str(tmp_path), "200000")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert "File too large" in lines[0]
    assert lines[2] == "steps [1, 3]"


@pytest.mark.thin(2)
@pytest.mark.parametrize("foreseen", [True, False])
def test_a_disk_that_is_really_full(tmp_path: Path, foreseen: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(REAL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    # A mount of its own namespace: nothing of it remains on the machine.
    mount = f'mount -t tmpfs -o size=1m none "{disk}"'
    inside = f'{mount} && exec "$0" -W error "{script}" "{disk}" {-1 + foreseen}'

    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    allowed = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(disk)], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip("this user may not mount a file system")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside, sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert "No space left on device" in lines[0]
    assert "step 1 is intact" in lines[1]
    assert lines[2] == "steps [1, 3]"
    if foreseen:
        assert "bytes are needed" in lines[0]
        assert "Traceback" not in done.stderr


def test_the_lock_keeps_others_out_and_a_stale_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("999999\n")
    held_by_me = pytest.raises(RunLockedError, match=f"process {os.getpid()}")
    with lock_run(tmp_path), held_by_me, lock_run(tmp_path):
        raise AssertionError("two holders")
    with lock_run(tmp_path):
        pass


def test_an_atomic_write_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def half(stream: Any) -> None:
        stream.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunWriteError, match=r"No space left.*unchanged"):
        atomic_write(path, half)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunWriteError, match="--directory"):
        prepare_folder(tmp_path / "file" / "run")


def test_readers_of_a_damaged_file_say_nothing_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums that fit the damage it is Orbax that stumbles, with one reader for each array."""
    many = {f"w{n}": jnp.full((64, 64), n, jnp.float32) for n in range(8)}
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": many}, meta={}, config_toml="")
    manifest = tmp_path / "1" / "manifest.json"
    recorded = json.loads(manifest.read_text())
    for file in (tmp_path / "1" / "model").rglob("d/*"):
        content = bytes(255 - byte for byte in file.read_bytes())
        file.write_bytes(content)
        name = file.relative_to(tmp_path / "1").as_posix()
        recorded["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    manifest.write_text(json.dumps(recorded))
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(CheckpointDamagedError, match="cannot be read: model"):
        store.open(1).restore("model", target(many))
    gc.collect()
    time.sleep(0.1)  # Its threads would find later that the loop of events has ended.
    assert not said
