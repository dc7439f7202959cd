"""Many tensors at a time, files that were changed, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.compress.container import Archive, ArchiveWriter, Tensor, writer
from capibara.compress.container.pool import Buffers
from capibara.compress.container.room import LARGE, Room
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import from_float, get_format

RANDOM = np.random.default_rng(0)
F32, BF16 = get_format("F32"), get_format("BF16")


def tensors(count: int = 12) -> list[Tensor]:
    out = []
    for i in range(count):
        shape = (i + 1, 50)
        bits = RANDOM.normal(size=shape).astype(np.float32).view(np.uint32).reshape(-1)
        out.append(Tensor(f"t{i}", bits, F32, shape))
    return out


def test_many_are_the_same_as_one_after_another(tmp_path: Path) -> None:
    given, seen = tensors(), []
    with ArchiveWriter(tmp_path / "one.capi") as archive:
        for t in given:
            archive.add(t.name, t.bits, t.form, t.shape)
    with ArchiveWriter(tmp_path / "many.capi") as archive:
        entries = archive.add_many(iter(given), progress=lambda entry: seen.append(entry.name))
        assert archive.entries == entries
    assert seen == [t.name for t in given]
    assert (tmp_path / "one.capi").read_bytes() == (tmp_path / "many.capi").read_bytes()
    with Archive(tmp_path / "many.capi") as archive:
        found = dict(archive.read_many())
        assert list(found) == seen
        for t in given:
            np.testing.assert_array_equal(found[t.name].reshape(-1), t.bits)
        assert [name for name, _ in archive.read_many(["t3", "t1"])] == ["t3", "t1"]
        with pytest.raises(KeyError, match="no tensor 't99'"):
            list(archive.read_many(["t99"]))


def test_chunks_go_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 700)
    bits = RANDOM.normal(size=(101, 60)).astype(np.float32).view(np.uint32)
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        made = archive.add_many([Tensor(n, bits.reshape(-1), F32, bits.shape) for n in "ab"])
    assert [len(e.chunks) for e in made] == [10, 10]
    with Archive(tmp_path / "a.capi") as archive:
        for name, found in archive.read_many():
            np.testing.assert_array_equal(found, bits, err_msg=name)
        for first, last in [(0, 0), (3, 4), (10, 12), (11, 11), (9, 101), (0, 101), (50, 500)]:
            np.testing.assert_array_equal(archive.read("a", slice(first, last)), bits[first:last])


def test_small_tensors_share_memory_and_nothing_else(tmp_path: Path) -> None:
    given = [
        Tensor(f"t{i}", RANDOM.normal(size=90_000 + i).astype(np.float32).view(np.uint32), F32, (90_000 + i,))
        for i in range(16)
    ]
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        archive.add_many(given)
    with Archive(tmp_path / "a.capi") as archive:
        found = dict(archive.read_many())
    # Wherever they lie, writing to one changes no other.
    for i, t in enumerate(given):
        found[t.name][...] = i
    for i, t in enumerate(given):
        assert found[t.name].shape == t.shape
        assert (found[t.name] == i).all()
        assert found[t.name].flags.aligned


@pytest.mark.parametrize("length", [384, 321, 16, 40_000])
def test_so_many_that_they_go_past_the_caches(tmp_path: Path, length: int) -> None:
    """Together more bytes than from which on compiled code streams numbers: whole lines, and rows that begin in one."""
    rows = (1 << 20) // length
    scales = np.exp(RANDOM.normal(size=(rows, 1)))
    given = []
    for i, kind in enumerate(["F16", "BF16", "F32", "F64", "I32", "BF16", "F32", "F8_E4M3"]):
        form = get_format(kind)
        values = RANDOM.normal(size=(rows - i, length)) * scales[i:]
        bits = values.astype(np.int32).view(np.uint32) if kind == "I32" else from_float(values, form)
        given.append(Tensor(f"t{i}", bits.reshape(-1), form, values.shape))
    assert sum(t.bits.nbytes for t in given) > 1 << 24
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        archive.add_many(given)
    with Archive(tmp_path / "a.capi") as archive:
        assert all(e.coded_bytes < 0.97 * e.original_bytes for e in archive)
        for (name, found), t in zip(archive.read_many(), given, strict=True):
            np.testing.assert_array_equal(found.reshape(-1), t.bits, err_msg=name)


def test_memory_begins_with_a_line() -> None:
    room = Room(5 << 20)
    taken = [room.take(count, np.dtype(np.uint16)) for count in (40, 1000, 33, 1 << 20, 5, LARGE)]
    assert [len(x) for x in taken] == [40, 1000, 33, 1 << 20, 5, LARGE]
    assert all(x.ctypes.data % 64 == 0 for x in taken if x.nbytes >= 64)
    for i, x in enumerate(taken):
        x[...] = i
    assert all((x == i).all() for i, x in enumerate(taken))


def test_buffers_are_used_again() -> None:
    buffers = Buffers(most=1 << 16)
    first = buffers.take(5000)
    assert len(first) >= 5000
    second = buffers.take(5000)
    assert not np.shares_memory(first, second)
    buffers.give(first)
    assert buffers.take(6000) is first  # they come in steps
    large = buffers.take(1 << 20)
    buffers.give(large)
    assert buffers.take(1 << 20) is not large  # more than is kept


def test_what_comes_before_a_wrong_one_stays(tmp_path: Path) -> None:
    good = tensors(4)
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        with pytest.raises(CompressError, match="t1"):
            archive.add_many([*good[:2], good[1], good[3]])
        with pytest.raises(CompressError, match="expected 100 of uint32"):
            archive.add_many([good[2], Tensor("wrong", np.zeros(9, np.uint32), F32, (2, 50))])
        with pytest.raises(RuntimeError, match="of the caller"):
            archive.add_many(failing(good[3]))
    with Archive(tmp_path / "a.capi") as archive:
        assert list(archive.entries) == ["t0", "t1", "t2", "t3"]
        for t in good:
            np.testing.assert_array_equal(archive.read(t.name).reshape(-1), t.bits)


def failing(first: Tensor):
    yield first
    raise RuntimeError("an error of the caller")


def test_a_damaged_tensor_has_its_turn(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        archive.add_many(tensors(4))
    with Archive(tmp_path / "a.capi") as archive:
        at = archive["t2"].chunks[0].offset + 10
    data = bytearray((tmp_path / "a.capi").read_bytes())
    data[at] ^= 1
    (tmp_path / "a.capi").write_bytes(data)
    with Archive(tmp_path / "a.capi") as archive:
        many = archive.read_many()
        assert [next(many)[0], next(many)[0]] == ["t0", "t1"]
        with pytest.raises(DamagedError, match="t2"):
            next(many)


def damaged_files(tmp_path: Path, count: int) -> None:
    """Flips and cuts: each is found, or what is read is what was written."""
    wide = RANDOM.normal(size=(40, 50)).astype(np.float32)
    bits = {
        "exact": (wide.view(np.uint32).reshape(-1), F32, (40, 50), "lossless", {}),
        "near": (wide.view(np.uint32).reshape(-1), F32, (40, 50), "uniform", {"step": 0.1}),
        "fixed": ((wide.view(np.uint32) >> 16).astype(np.uint16).reshape(-1), BF16, (40, 50), "exponent", {}),
        "few": (np.arange(7, dtype=np.uint32), F32, (7,), "lossless", {}),
    }
    path = tmp_path / "a.capi"
    with ArchiveWriter(path, {"some": "text"}) as archive:
        for name, (numbers, form, shape, codec, settings) in bits.items():
            archive.add(name, numbers, form, shape, codec=codec, settings=settings)
    with Archive(path) as archive:
        want = {name: found.copy() for name, found in archive.read_many()}
    good, harmless = path.read_bytes(), 0
    for _ in range(count):
        bad = bytearray(good)
        if RANDOM.integers(8) == 0:
            del bad[RANDOM.integers(len(bad)) :]
        else:
            for _ in range(1 << RANDOM.integers(3)):
                bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        path.write_bytes(bad)
        try:
            with Archive(path) as archive:
                for name, found in archive.read_many():
                    np.testing.assert_array_equal(found, want[name])
            harmless += 1
        except ArchiveError:
            pass
    assert harmless < count / 50  # only the four unused bytes of the header, and flips that undo each other


def test_five_hundred_damaged_files(tmp_path: Path) -> None:
    damaged_files(tmp_path, 500)


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path: Path) -> None:
    damaged_files(tmp_path, 10_000)


MEMORY = """
import json, resource, sys, numpy as np
from pathlib import Path
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.formats import from_float, get_format
path, count, codec = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
settings = json.loads(sys.argv[5])
form = get_format("BF16")
source = np.memmap(path / "raw", np.uint16, "w+", shape=(count,))
rng = np.random.default_rng(0)
some = (rng.normal(size=1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
for at in range(0, count, 1 << 20):
    source[at : at + (1 << 20)] = some[: count - at]
del source

def check(found, first):
    # In pieces: a comparison of all of it would take memory, too.
    found = found.reshape(-1)
    if codec != "lossless":
        return
    for at in range(0, len(found), 1 << 20):
        assert (found[at : at + (1 << 20)] == source[first + at : first + at + (1 << 20)][: len(found) - at]).all()

def anonymous():
    # Pages of files come and go; what the process itself holds is this.
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

import threading
peak, stop = 0, threading.Event()

def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, anonymous())

with ArchiveWriter(path / "warm.capi") as archive:
    archive.add("x", some, form, some.shape, codec=codec, settings=settings)
with Archive(path / "warm.capi") as archive:
    archive.read("x")
thread = threading.Thread(target=watch)
before = anonymous()
thread.start()
source = np.memmap(path / "raw", np.uint16, "r")
with ArchiveWriter(path / "a.capi") as archive:
    archive.add("x", source, form, (count // 1024, 1024), codec=codec, settings=settings)
writing, peak = peak - before, 0
before = anonymous()
with Archive(path / "a.capi") as archive:
    if sys.argv[3] == "whole":
        found = archive.read("x")
        check(found, 0)
    else:
        for row in range(0, count // 1024, 1 << 16):
            found = archive.read("x", slice(row, row + 1024))
            check(found, row * 1024)
stop.set()
thread.join()
print(writing, peak - before)
"""


def memory(
    tmp_path: Path, count: int, how: str, codec: str = "lossless", settings: dict[str, Any] | None = None
) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(count), how, codec, json.dumps(settings or {})],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    writing, reading = map(int, done.stdout.split())
    return writing, reading


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_reading_takes_little_more_than_the_tensor(tmp_path: Path) -> None:
    size = 96 << 20
    writing, reading = memory(tmp_path, size // 2, "whole")
    assert writing < 0.5 * size  # some chunks of 2 MiB, whatever the tensor
    assert reading < 1.2 * size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("uniform", {"step": 0.1}),
        ("int8", {}),
        ("int4", {}),
        ("nf4", {}),
        ("sparse", {"density": 0.5}),
        ("sparse", {"pattern": "2:4"}),
    ],
)
def test_what_loses_something_takes_little_more_than_the_tensor(
    tmp_path: Path, codec: str, settings: dict[str, Any]
) -> None:
    size = 64 << 20
    writing, reading = memory(tmp_path, size // 2, "whole", codec, settings)
    assert writing < 1.2 * size
    assert reading < 1.2 * size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_tensor_of_more_than_two_gibibytes(tmp_path: Path) -> None:
    writing, reading = memory(tmp_path, (1 << 30) + (1 << 20), "rows")
    assert writing < 200 << 20
    assert reading < 200 << 20
