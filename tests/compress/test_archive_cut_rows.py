"""Rows that are longer than a chunk may be are cut, in files of a version of their own."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container import Archive, ArchiveWriter, index, writer
from capibara.compress.container.index import FOOTER, HEADER
from capibara.compress.curves import coded_size, measure
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.compress.formats import get_format
from capibara.compress.stored_codes import stored_parts
from capibara.compress.system.result import CompressedTensor
from capibara.compress.writing import change_metadata

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 100)
    monkeypatch.setattr(index, "CHUNK", 100)


def bits(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint32)


def write(path: Path, x: np.ndarray, codec: str = "lossless", **given: Any) -> Any:
    with ArchiveWriter(path) as archive:
        return archive.add("x", bits(x), F32, x.shape, codec=codec, settings=given)


def versions(data: bytes) -> tuple[int, int]:
    return HEADER.unpack(data[: HEADER.size])[1], FOOTER.unpack(data[-FOOTER.size :])[3]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("shape", "coded_as", "rows"),
    [
        ((1, 250), (250,), [100, 100, 50]),
        ((3, 101), (303,), [100, 100, 100, 3]),
        ((2, 30, 20), (60, 20), [5] * 12),
        ((1, 7, 3, 10), (21, 10), [10, 10, 1]),
        ((2, 2, 150), (600,), [100] * 6),
        ((2, 3, 100), (6, 100), [1] * 6),
        ((250,), None, [100, 100, 50]),
        ((3, 100), None, [1, 1, 1]),
        ((9, 20), None, [5, 4]),
        ((), None, [1]),
        ((0, 500), None, [0]),
        ((500, 0), None, [500]),
    ],
)
def test_how_rows_are_cut(tmp_path: Path, shape: tuple[int, ...], coded_as: Any, rows: list[int]) -> None:
    x = RANDOM.normal(size=shape).astype(np.float32)
    path = tmp_path / "a.capi"
    entry = write(path, x)
    assert (entry.shape, entry.coded_as, [c.rows for c in entry.chunks]) == (shape, coded_as, rows)
    assert versions(path.read_bytes()) == ((1, 1) if coded_as is None else (2, 2))
    with Archive(path) as archive:
        assert archive["x"] == entry
        found = archive.read("x")
        assert found.shape == shape
        np.testing.assert_array_equal(found.view(np.float32), x)
        assert [found.tolist() for _, found in archive.read_many()] == [found.tolist()]
        assert list(archive.verify()) == [(entry, None)]
        assert sum(math.prod(s) for s, _ in archive.payloads("x")) == x.size
    back = CompressedTensor.load(path)
    np.testing.assert_array_equal(back.decode(), bits(x))
    assert versions(back.to_bytes()) == versions(path.read_bytes())
    change_metadata(path, {"a": "b"})
    with Archive(path) as archive:
        assert archive.metadata == {"a": "b"}
        np.testing.assert_array_equal(archive.read("x").view(np.float32), x)
    assert coded_size("lossless", {}, bits(x), F32, shape) == entry.coded_bytes


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    chunk=st.integers(1, 40),
    first=st.integers(-10, 10),
    last=st.integers(-10, 10),
    codec=st.sampled_from(["lossless", "uniform", "exponent"]),
)
@settings(max_examples=80, deadline=None)
def test_rows_of_any_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...], chunk: int, first: int, last: int, codec: str,
) -> None:  # fmt: skip
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 4
    path = tmp_path_factory.mktemp("rows") / "a.capi"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHUNK", chunk)
        patch.setattr(index, "CHUNK", chunk)
        entry = write(path, x, codec, **({"step": 0.25} if codec == "uniform" else {}))
        with ArchiveWriter(path.with_name("b.capi")) as archive:
            archive.add("x", bits(x), F32, shape)
            tied = archive.add_tied("y", "x")
        with Archive(path) as archive:
            np.testing.assert_array_equal(archive.read("x").view(np.float32), x)
            some = archive.read("x", slice(first, last)).view(np.float32)
        with Archive(path.with_name("b.capi")) as archive:
            again = archive.read("y", slice(first, last)).view(np.float32)
    np.testing.assert_array_equal(some, x[first:last])
    np.testing.assert_array_equal(again, x[first:last])
    assert tied.coded_as is None
    if codec != "exponent":  # which cuts no rows
        assert max(c.rows * math.prod(entry.coded_shape[1:]) for c in entry.chunks) <= chunk
    else:
        assert entry.coded_as is None


@pytest.mark.usefixtures("short_chunks")
def test_codecs_of_groups_and_matrices_keep_rows_whole(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(2, 256)).astype(np.float32)
    for codec, settings_ in (
        ("int8", {}),
        ("nf4", {}),
        ("sparse", {"pattern": "2:4"}),
        ("low_rank", {"rank": 1}),
    ):
        entry = write(tmp_path / "a.capi", x, codec, **settings_)
        assert entry.coded_as is None
        assert [c.rows for c in entry.chunks] == [1, 1]
        assert versions((tmp_path / "a.capi").read_bytes()) == (1, 1)


@pytest.mark.usefixtures("short_chunks")
def test_what_is_measured_is_what_is_written(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(2, 30, 20)).astype(np.float32)
    point = measure("uniform", {"step": 0.1}, bits(x), F32, x.shape)
    assert point.size == write(tmp_path / "a.capi", x, "uniform", step=0.1).coded_bytes


def test_long_rows_as_they_are(tmp_path: Path) -> None:
    # Nothing replaced: a row that is longer than any chunk may be.
    x = np.zeros((1, (1 << 24) + 5), np.uint8)
    x[0, ::1000] = 7
    form = get_format("U8")
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        entry = archive.add("x", x.reshape(-1), form, x.shape)
    assert len(entry.chunks) == 17
    with Archive(tmp_path / "a.capi") as archive:
        np.testing.assert_array_equal(archive.read("x"), x)


def forged(path: Path, version: int, change: Any) -> Path:
    """An archive of eight bytes of zeros as [1, 8] in two chunks, but as ``change`` has it; with right checksums."""
    payload = b"\0" + bytes(4)
    crc = zlib.crc32(payload)
    tensor = {"name": "x", "dtype": "U8", "shape": [1, 8], "codec": "lossless", "coded_as": [8],
              "chunks": [[4, 16, 5, crc], [4, 21, 5, crc]]}  # fmt: skip
    found = {"metadata": {}, "tensors": [tensor]}
    change(found["tensors"])
    text = json.dumps(found).encode()
    head = b"\x89CAPI\r\n\x1a" + struct.pack("<II", version, 0)
    foot = FOOTER.pack(26, len(text), zlib.crc32(text), version, b"CAPI-END")
    path.write_bytes(head + payload * 2 + text + foot)
    return path


def test_an_index_that_does_not_lie(tmp_path: Path) -> None:
    for coded_as, rows in (([8], 4), ([4, 2], 2), ([2, 4], 1), ([8, 1, 1], 4)):

        def change(tensors: Any, coded_as: Any = coded_as, rows: int = rows) -> None:
            tensors[0]["coded_as"] = coded_as
            for chunk in tensors[0]["chunks"]:
                chunk[0] = rows

        with Archive(forged(tmp_path / "a.capi", 2, change)) as archive:
            np.testing.assert_array_equal(archive.read("x"), np.zeros((1, 8)))


TWIN = {"name": "y", "dtype": "U8", "shape": [1, 8], "codec": "lossless", "same_as": "x"}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[0].update(coded_as=[7]),
        lambda t: t[0].update(coded_as=[]),
        lambda t: t[0].update(coded_as=None),
        lambda t: t[0].update(coded_as=8),
        lambda t: t[0].update(coded_as=[8.0]),
        lambda t: t[0].update(coded_as=[-8]),
        lambda t: t[0].update(coded_as=[8, 1 << 60]),
        lambda t: t[0].update(coded_as=[1] * 40),
        lambda t: t[0].update(coded_as=[0]),
        lambda t: t[0].update(coded_as=[1, 8]),
        lambda t: t[0].update(coded_as=[2, 4]),
        lambda t: t[0].update(shape=[0, 8]),
        lambda t: t[0].update(shape=[2, 4], coded_as=[1, 8], chunks=[[1, 16, 10, 0]]),
        lambda t: t[0].update(shape=[4, 2], coded_as=[2, 4]),
        lambda t: t.append({**TWIN, "coded_as": [8]}),
        lambda t: t[0].update(shape=[1, 1 << 25], coded_as=[1 << 25], chunks=[[1 << 25, 16, 10, 0]]),
        lambda t: t[0].update(shape=[1, 1 << 25], coded_as=[1, 1 << 25], chunks=[[1, 16, 10, 0]]),
    ],
)  # fmt: skip
def test_an_index_that_lies(tmp_path: Path, change: Any) -> None:
    with pytest.raises(DamagedError, match="index is damaged"):
        Archive(forged(tmp_path / "a.capi", 2, change))


def test_versions_tell_what_there_may_be(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="a tensor's keys"):
        Archive(forged(tmp_path / "a.capi", 1, lambda t: None))
    # As readers of version 1 do with version 2, so does this one with what is newer.
    with pytest.raises(ArchiveError, match="format version 3, this Capibara reads 1 and 2"):
        Archive(forged(tmp_path / "a.capi", 3, lambda t: None))
    data = bytearray(forged(tmp_path / "a.capi", 2, lambda t: None).read_bytes())
    data[8] = 1  # the header's version is not the footer's
    (tmp_path / "a.capi").write_bytes(data)
    with pytest.raises(DamagedError, match="footer"):
        Archive(tmp_path / "a.capi")


def test_more_numbers_than_bytes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    def change(tensors: Any) -> None:
        tensors[0].update(shape=[1, 1 << 25], coded_as=[1 << 25])
        for chunk in tensors[0]["chunks"]:
            chunk[0] = 1 << 24

    with (
        Archive(forged(tmp_path / "a.capi", 2, change)) as archive,
        pytest.raises(DamagedError, match="5 bytes cannot hold 16777216 numbers"),
    ):
        archive.read("x")


def test_quantized_products_refuse_cut_rows(tmp_path: Path) -> None:
    payload = get_codec("int8").encode(np.zeros(4, np.uint32), F32, (1, 4), {})
    path = tmp_path / "a.capi"
    tensor = {"name": "x", "dtype": "F32", "shape": [1, 4], "codec": "int8", "coded_as": [1, 4],
              "chunks": [[1, 16, len(payload), zlib.crc32(payload)]]}  # fmt: skip
    text = json.dumps({"metadata": {}, "tensors": [tensor]}).encode()
    foot = FOOTER.pack(16 + len(payload), len(text), zlib.crc32(text), 2, b"CAPI-END")
    path.write_bytes(HEADER.pack(index.MAGIC, 2, 0) + payload + text + foot)
    with Archive(path) as archive:
        assert archive.read("x").tolist() == [[0] * 4]
        assert stored_parts(archive, "x") == "stored as int8 with the shape (1, 4)"
