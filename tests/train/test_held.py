"""Copies of a state in the launcher's memory: exact, digested, of one step for all processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.launch.memory import held_memory
from capibara.train.held import HeldCopies
from capibara.train.processes import Processes

if not hasattr(os, "memfd_create"):
    pytest.skip("Linux alone has files in memory", allow_module_level=True)

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))


def tree(value: int) -> dict[str, Any]:
    key = jax.random.key(value)
    where = NamedSharding(MESH, PartitionSpec("data"))
    return {
        "model": {
            "w": jax.device_put(jax.random.normal(key, (40, 30)), where),
            "half": jax.random.normal(key, (7,)).astype(jnp.bfloat16),
            "empty": jnp.zeros((0, 3)),
        },
        "training": {"step": jnp.int32(value), "none": None},
    }


def described(items: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items)


@pytest.fixture
def files() -> Iterator[tuple[int, ...]]:
    with held_memory(1) as held:
        yield held[0]


def copies(files: tuple[int, ...], run: str = "run") -> HeldCopies:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    return HeldCopies(files, run=run, warn=refuse)


def remembered(files: tuple[int, ...], *steps: int) -> HeldCopies:
    held = copies(files)
    for step in steps:
        items = tree(step)
        held.remember(step, items, {"seconds": float(step)})
        jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)(items)
    held.settle()
    return held


def newest(files: tuple[int, ...], run: str = "run") -> int | None:
    found = copies(files, run).newest(described(tree(0)))
    return None if found is None else found.step


def test_the_newest_copy_comes_back_bit_for_bit(files: tuple[int, ...]) -> None:
    remembered(files, 10, 20, 30)
    held = copies(files)
    found = held.newest(described(tree(0)))
    assert found is not None
    assert (found.step, found.meta) == (30, {"seconds": 30.0})
    items = held.restore(30, described(tree(0)))
    wanted = tree(30)
    assert jax.tree.structure(items) == jax.tree.structure(wanted)
    for mine, other in zip(jax.tree.leaves(items), jax.tree.leaves(wanted), strict=True):
        assert (mine.dtype, mine.sharding) == (other.dtype, other.sharding)
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()
    # The next copy takes the place of the older one.
    held.remember(40, tree(40), {})
    held.settle()
    assert newest(files) == 40
    held.clear()
    assert newest(files) is None


def test_every_flipped_bit_leaves_the_copy_before(files: tuple[int, ...]) -> None:
    held = remembered(files, 10, 20)
    file = next(one for one in files if held._steps[one] == 20)
    size, random = os.fstat(file).st_size, np.random.default_rng(0)
    places = [*range(0, 48, 5), *random.integers(48, size, 60)]
    for place in map(int, places):
        (byte,) = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte ^ 1 << place % 8]), place)
        assert newest(files) == 10
        os.pwrite(file, bytes([byte]), place)
    assert newest(files) == 20
    os.ftruncate(file, size - 1)
    assert newest(files) == 10


def test_a_kill_while_one_is_written_leaves_the_other(
    files: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real, left = remembered(files, 10, 20), os.pwrite, [3]

    class Killed(BaseException):
        pass

    def killed(*arguments: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", killed)
        with pytest.raises(Killed):
            held._write_parts(min(files, key=held._steps.__getitem__), 30, tree(30), {})
    assert newest(files) == 20


def test_copies_of_something_else_are_not_taken(
    files: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered(files, 10)
    assert newest(files, run="another") is None
    other = tree(0)
    other["model"]["w"] = jnp.zeros((40, 31))
    assert copies(files).newest(described(other)) is None
    assert newest(files) == 10
    # Of several processes each has to have it.
    held = copies(files)
    for others, expected in (([[10], [10, 5]], 10), ([[10], [5]], None)):
        held._processes = Processes(1, 0)
        monkeypatch.setattr(Processes, "all_say", lambda _, value, others=others: [value, *others[1:]])
        found = held.newest(described(tree(0)))
        assert (None if found is None else found.step) == expected
    held._processes = Processes(2, 1)
    assert held.newest(described(tree(0))) is None


def test_without_room_training_goes_on_without_copies(
    files: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    held = HeldCopies(files, run="run", warn=warnings.append)
    monkeypatch.setattr("capibara.train.held.available_memory", lambda: 1000)
    for step in (1, 2):
        held.remember(step, tree(step), {})
        held.settle()
    (text,) = warnings
    assert "no longer copied" in text
    assert "1,000 are available" in text
    assert newest(files) is None
    assert all(os.fstat(file).st_size == 0 for file in files)


def test_without_room_on_the_devices_training_goes_on_without_copies(
    files: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    held = HeldCopies(files, run="run", warn=warnings.append)

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(held._copier, "copy", full)
    for step in (1, 2):
        held.remember(step, tree(step), {})
        held.settle()
    assert len(warnings) == 1
    assert "no longer copied to the launcher's memory: RESOURCE_EXHAUSTED" in warnings[0]
    assert newest(files) is None


def test_what_is_in_the_files_is_not_trusted(files: tuple[int, ...]) -> None:
    for content in (b"CAPIHELD" + (1 << 60).to_bytes(8, "little") + bytes(40), b"CAPIHELD", os.urandom(500)):
        os.ftruncate(files[0], 0)
        os.pwrite(files[0], content, 0)
        assert newest(files) is None


@pytest.mark.parametrize("change", [("offset", 1 << 40), ("offset", -1), ("count", 1), ("offset", "0")])
def test_places_outside_of_a_file_with_the_right_digest_are_not_read(
    files: tuple[int, ...], change: tuple[str, Any]
) -> None:
    remembered(files, 10)
    (file,) = [one for one in files if os.fstat(one).st_size]
    content = os.pread(file, 1 << 20, 0)
    length = int.from_bytes(content[8:16], "little")
    fields = json.loads(content[48 : 48 + length])
    (largest,) = [part for part in fields["parts"] if "'w'" in part[0]]
    largest[-2 if change[0] == "offset" else -1] = change[1]
    header = json.dumps(fields).encode()
    body = header + content[48 + length :]
    os.ftruncate(file, 0)
    os.pwrite(file, b"CAPIHELD" + len(header).to_bytes(8, "little") + hashlib.sha256(body).digest() + body, 0)
    assert newest(files) is None


def test_an_unknown_failure_of_a_copy_is_told(
    files: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: a device is gone.")

    warnings: list[str] = []
    held = HeldCopies(files, run="run", warn=warnings.append)
    monkeypatch.setattr("capibara.train.held._parts", fail)
    held.remember(1, tree(1), {})
    held.settle()
    assert warnings == ["the state is no longer copied to the launcher's memory: INTERNAL: a device is gone"]


def test_settings_ask_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[int, ...]
) -> None:
    from tiny_run import tiny_config

    notes: list[str] = []
    config = tiny_config(tmp_path)
    monkeypatch.setenv("CAPIBARA_MEMORY", "")
    assert HeldCopies.of_launcher(config, "x", note=notes.append, warn=notes.append) is None
    assert notes == []
    config = tiny_config(tmp_path, "checkpoint.memory_every_steps=3")
    assert HeldCopies.of_launcher(config, "x", note=notes.append, warn=notes.append) is None
    assert "capibara launch --restarts" in notes[0]
    monkeypatch.setenv("CAPIBARA_MEMORY", ",".join(map(str, files)))
    assert HeldCopies.of_launcher(config, "x", note=notes.append, warn=notes.append) is not None
