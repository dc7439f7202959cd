"""Safetensors files as other writers make them come back byte by byte: spaces, order, escapes, types not known here."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.cli import main
from capibara.compress import Archive, ArchiveError, ArchiveWriter, DamagedError, SafetensorsFile
from capibara.compress.archive_files import (
    compress_files,
    decompress_files,
    plan_compress,
    plan_decompress,
)
from capibara.compress.formats import FORMATS
from capibara.compress.safetensors_file import HEADER_KEY


def lay_out(path: Path, header: bytes, data: bytes) -> bytes:
    content = len(header).to_bytes(8, "little") + header + data
    path.write_bytes(content)
    return content


def there_and_back(folder: Path, source: Path) -> bytes:
    compress_files(plan_compress(source, folder / "a.capi"))
    decompress_files(plan_decompress(folder / "a.capi", folder / "back.safetensors"))
    return (folder / "back.safetensors").read_bytes()


def tensor(kind: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


DATA = bytes(range(48))
A = b'"a":{"dtype":"F32","shape":[12],"data_offsets":[0,48]}}'
UNUSUAL = {
    "spaces": json.dumps({"a": tensor("F32", [12], 0, 48)}, indent=2).encode(),
    "padding at the end": json.dumps({"a": tensor("F32", [12], 0, 48)}).encode() + b" " * 13,
    "another order": json.dumps(
        {"b": tensor("U8", [16], 32, 48), "a": tensor("F32", [8], 0, 32), "__metadata__": {"x": "y"}}
    ).encode(),
    "half of a surrogate pair": rb'{"__metadata__":{"x":"\ud83d"},' + A,
    "half of one in spaces": rb'{"__metadata__" : {"\udc00":"\ud83d"}, ' + A,
    "escapes": rb'{"\u00e4":{"dtype":"F32","shape":[12],"data_offsets":[0,48]}}',
    "empty metadata": b'{"__metadata__":{},"a":{"dtype":"F32","shape":[12],"data_offsets":[0,48]}}',
    "more keys": b'{"a":{"dtype":"F32","shape":[12],"data_offsets":[0,48],"note":[1]}}',
    "scales of eight bits": json.dumps(
        {"a": tensor("F8_E8M0", [16], 0, 16), "b": tensor("F32", [8], 16, 48)}
    ).encode(),
    "complex numbers": json.dumps({"a": tensor("C64", [2, 3], 0, 48)}).encode(),
    "four bits": json.dumps({"a": tensor("F4", [96], 0, 48)}).encode(),
    "our own key": json.dumps(
        {"__metadata__": {HEADER_KEY: "x"}, "a": tensor("F32", [12], 0, 48)}, separators=(",", ":")
    ).encode(),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_files_come_back_byte_by_byte(tmp_path: Path, what: str) -> None:
    source = tmp_path / "a.safetensors"
    content = lay_out(source, UNUSUAL[what], DATA)
    assert there_and_back(tmp_path, source) == content


def test_usual_files_need_no_header(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    header = json.dumps({"a": tensor("F32", [12], 0, 48)}, separators=(",", ":")).encode()
    content = lay_out(source, header + b" " * (-len(header) % 8), DATA)
    assert there_and_back(tmp_path, source) == content
    with Archive(tmp_path / "a.capi") as archive:
        assert archive.metadata == {}


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.text("ab./é\U0001f600", min_size=1, max_size=6), unique=True, max_size=4),
    metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_header_comes_back(tmp_path_factory, names, metadata, indent, ascii_only, seed) -> None:
    rng = np.random.default_rng(seed)
    header: dict[str, object] = {"__metadata__": metadata} if rng.integers(2) else {}
    at = 0
    for name in names:
        kind = ["F32", "BF16", "F8_E8M0", "C64"][rng.integers(4)]
        width = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "C64": 8}[kind]
        count = int(rng.integers(5))
        header[name] = tensor(kind, [count], at, at + width * count)
        at += width * count
    items = list(header.items())
    rng.shuffle(items)
    try:
        text = json.dumps(dict(items), indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        text = json.dumps(dict(items), indent=indent).encode()
    folder = tmp_path_factory.mktemp("any")
    content = lay_out(folder / "a.safetensors", text, rng.bytes(at))
    assert there_and_back(folder, folder / "a.safetensors") == content


def test_a_folder_with_unknown_types_is_compressed_and_the_rest_of_it_loses(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(64, 64)).astype("<f4").tobytes()
    scales = bytes(rng.integers(0, 255, 256, dtype=np.uint8))
    header = json.dumps(
        {"s": tensor("F8_E8M0", [256], 0, 256), "w": tensor("F32", [64, 64], 256, 256 + 16384)}
    )
    (tmp_path / "model").mkdir()
    lay_out(tmp_path / "model" / "a.safetensors", header.encode(), scales + weights)
    argv = ["compress", "--strategy", "int8", str(tmp_path / "model"), str(tmp_path / "small")]
    assert main(argv) == 0
    assert main(["decompress", str(tmp_path / "small"), str(tmp_path / "back")]) == 0
    back = (tmp_path / "back" / "a.safetensors").read_bytes()
    assert back[8 : 8 + len(header)] == header.encode()
    assert back[8 + len(header) : 8 + len(header) + 256] == scales
    found = np.frombuffer(back[8 + len(header) + 256 :], "<f4")
    assert 0 < np.abs(found - np.frombuffer(weights, "<f4")).max() < 0.1


@pytest.mark.parametrize(
    "kept",
    [
        "no base64",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(b"{}")).decode(),
        base64.b64encode(zlib.compress(b"no json")).decode(),
        base64.b64encode(zlib.compress(json.dumps({"a": tensor("F32", [13], 0, 52)}).encode())).decode(),
        base64.b64encode(zlib.compress(json.dumps({"b": tensor("F32", [12], 0, 48)}).encode())).decode(),
        base64.b64encode(zlib.compress(json.dumps({"a": tensor("F32", [12], 0, 48)}).encode())[:-3]).decode(),
        base64.b64encode(zlib.compress(bytes(101_000_000))).decode(),
    ],
    ids=range(8),
)
def test_headers_that_lie_are_refused(tmp_path: Path, kept: str) -> None:
    with ArchiveWriter(tmp_path / "a.capi", {HEADER_KEY: kept}) as archive:
        archive.add("a", np.arange(12, dtype="<u4"), FORMATS["F32"], (12,))
    with pytest.raises(ArchiveError):
        decompress_files(plan_decompress(tmp_path / "a.capi", tmp_path / "out.safetensors"))
    assert sorted(os.listdir(tmp_path)) == ["a.capi"]


@pytest.mark.parametrize("filling", [b"[],", b"{},"])
def test_a_header_that_would_take_a_multiple_of_its_size_is_refused(tmp_path: Path, filling: bytes) -> None:
    text = b'{"a":{"dtype":"F32","shape":[12],"data_offsets":[0,48],"note":[' + filling * 100_000 + b"0]}}"
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + DATA)
    with pytest.raises(DamagedError, match="more objects and lists"):
        SafetensorsFile(tmp_path / "a.safetensors")
    kept = base64.b64encode(zlib.compress(text, 9)).decode()
    with ArchiveWriter(tmp_path / "a.capi", {HEADER_KEY: kept}) as archive:
        archive.add("a", np.frombuffer(DATA, "<u4"), FORMATS["F32"], (12,))
    with pytest.raises(DamagedError, match="more objects and lists"):
        decompress_files(plan_decompress(tmp_path / "a.capi", tmp_path / "b.safetensors"))
    assert not (tmp_path / "b.safetensors").exists()


def test_a_source_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    lay_out(source, json.dumps({"a": tensor("F32", [1 << 20], 0, 4 << 20)}).encode(), bytes(4 << 20))
    with SafetensorsFile(source) as file:
        os.truncate(source, 1 << 20)
        with pytest.raises(DamagedError, match="were there when it was opened"):
            file.read("a")
    with pytest.raises(ArchiveError, match="closed"):
        file.read("a")


@pytest.mark.parametrize("many", [False, True])
def test_an_archive_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, many: bool) -> None:
    path = tmp_path / "a.capi"
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    with ArchiveWriter(path) as archive:
        archive.add("a", bits, FORMATS["U32"], bits.shape)
    with Archive(path) as archive:
        os.truncate(path, 1 << 12)
        with pytest.raises(DamagedError, match="were there when it was opened"):
            list(archive.read_many()) if many else archive.read("a")


def test_a_tensor_larger_than_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """A few megabytes of factors may claim a product of any size."""
    rows, columns = 1, 1 << 41
    weight = np.random.default_rng(0).normal(size=(64, 32)).astype("<f4")
    path = tmp_path / "a.capi"
    with ArchiveWriter(path) as archive:
        archive.add(
            "a",
            weight.view("<u4").reshape(-1),
            FORMATS["F32"],
            weight.shape,
            codec="low_rank",
            settings={"rank": 2},
        )
    content = path.read_bytes()
    offset, length, _, version = _footer(content)
    index = json.loads(content[offset : offset + length])
    one = index["tensors"][0]
    one["shape"] = [rows, columns]
    one["chunks"] = [[rows, *one["chunks"][0][1:]]]
    text = json.dumps(index, separators=(",", ":")).encode()
    tail = (
        offset.to_bytes(8, "little")
        + len(text).to_bytes(8, "little")
        + zlib.crc32(text).to_bytes(4, "little")
    )
    path.write_bytes(content[:offset] + text + tail + version.to_bytes(4, "little") + b"CAPI-END")
    assert main(["decompress", str(path), str(tmp_path / "out.safetensors")]) == 2
    with (
        Archive(path) as archive,
        pytest.raises(ArchiveError, match=r"8,796\.1 GB, this machine has .* GB of memory"),
    ):
        archive.read("a")
    assert sorted(os.listdir(tmp_path)) == ["a.capi"]


def _footer(content: bytes) -> tuple[int, int, int, int]:
    tail = content[-32:]
    return (
        int.from_bytes(tail[:8], "little"),
        int.from_bytes(tail[8:16], "little"),
        int.from_bytes(tail[16:20], "little"),
        int.from_bytes(tail[20:24], "little"),
    )
