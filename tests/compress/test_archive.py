"""Archives: what goes in comes out, rows at a time too; damage is found; writing is all or nothing."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from capibara.cli import main
from capibara.compress.archive_files import compress_files, decompress_files, plan_compress, plan_decompress
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter, writer
from capibara.compress.container.index import FOOTER
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import get_format

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


def bits(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint32)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    table = RANDOM.normal(size=(300, 64)).astype(np.float32)
    return {
        "table": table,
        "head": table.copy(),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "half": RANDOM.normal(size=(40, 8)).astype(np.float16),
        "positions": np.arange(512),
        "mask": RANDOM.random((9, 9)) < 0.5,
    }


@pytest.fixture
def archive(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compress_files(plan_compress(tmp_path / "model.safetensors", tmp_path / "model.capi"))
    return tmp_path / "model.capi"


def test_a_file_comes_back_byte_by_byte(archive: Path, tensors: dict[str, np.ndarray]) -> None:
    decompress_files(plan_decompress(archive, archive.with_name("back.safetensors")))
    assert (
        archive.with_name("back.safetensors").read_bytes()
        == archive.with_name("model.safetensors").read_bytes()
    )
    back = load_file(archive.with_name("back.safetensors"))
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value)
    with Archive(archive) as opened:
        assert opened.metadata == {"format": "pt"}
        assert sum(e.same_as is not None for e in opened) == 1  # table and head are stored once


@pytest.mark.parametrize(
    "rows", [slice(0, 10), slice(7, 8), slice(95, 217), slice(290, None), slice(5, 5), slice(-3, None)]
)
def test_rows_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice) -> None:
    monkeypatch.setattr(writer, "CHUNK", 64 * 100)
    x = RANDOM.normal(size=(301, 8, 8)).astype(np.float32)
    with ArchiveWriter(tmp_path / "a.capi") as file:
        entry = file.add("x", bits(x), F32, x.shape)
    assert [c.rows for c in entry.chunks] == [100, 100, 100, 1]
    with Archive(tmp_path / "a.capi") as opened:
        np.testing.assert_array_equal(opened.read("x", rows).view(np.float32), x[rows])
        np.testing.assert_array_equal(opened.read("x").view(np.float32), x)


def test_every_flipped_byte_is_found_or_harmless(archive: Path, tensors: dict[str, np.ndarray]) -> None:
    good = archive.read_bytes()
    bad_path = archive.with_name("bad.capi")
    for _ in range(300):
        bad = bytearray(good)
        bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        bad_path.write_bytes(bad if RANDOM.random() < 0.8 else bad[: RANDOM.integers(len(bad))])
        try:
            with Archive(bad_path) as opened:
                for name in tensors:
                    same = opened.read(name).tobytes() == tensors[name].tobytes()
                    assert same, name
        except ArchiveError:
            pass


INDEX: dict[str, Any] = {
    "metadata": {},
    "tensors": [{"name": "x", "dtype": "F32", "shape": [2], "codec": "lossless", "chunks": [[2, 16, 9, 0]]}],
}
TWIN = {"name": "y", "dtype": "F32", "shape": [2], "codec": "lossless", "same_as": "x"}


def forged(path: Path, change: Any) -> Path:
    """An archive whose index says ``change``, with right checksums."""
    payload = b"\0" + bytes(8)
    index = json.loads(json.dumps(INDEX))
    index["tensors"][0]["chunks"][0][3] = zlib.crc32(payload)
    change(index)
    text = json.dumps(index).encode()
    head = b"\x89CAPI\r\n\x1a" + struct.pack("<II", 1, 0)
    foot = FOOTER.pack(16 + len(payload), len(text), zlib.crc32(text), 1, b"CAPI-END")
    path.write_bytes(head + payload + text + foot)
    return path


def put(key: str, value: Any):
    return lambda index: index["tensors"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        put("name", ""),
        put("name", 3),
        put("name", "x" * 5000),
        put("dtype", "F31"),
        put("dtype", None),
        put("codec", 1),
        put("shape", [-2]),
        put("shape", [2.0]),
        put("shape", [True]),
        put("shape", "2"),
        put("shape", [1 << 40, 1 << 40]),
        put("shape", [1] * 40),
        put("chunks", []),
        put("chunks", [[2, 16, 9]]),
        put("chunks", [[2, 0, 9, 0]]),
        put("chunks", [[2, 16, 1 << 50, 0]]),
        put("chunks", [[2, 16, -9, 0]]),
        put("chunks", [[1, 16, 9, 0]]),
        put("chunks", [[2, 16, 8, 0]]),
        put("chunks", None),
        put("same_as", "x"),
        put("settings", 3),
        put("more", 3),
        lambda index: index["tensors"].append(index["tensors"][0]),
        lambda index: index["tensors"].append({**TWIN, "shape": [3]}),
        lambda index: index["tensors"].append({**TWIN, "same_as": "z"}),
        lambda index: index["tensors"].append(3),
        lambda index: index.__setitem__("metadata", {"a": 1}),
        lambda index: index.__setitem__("tensors", {}),
        lambda index: index.pop("metadata"),
    ],
)  # fmt: skip
def test_an_index_that_lies(tmp_path: Path, change: Any) -> None:
    with pytest.raises(DamagedError):
        Archive(forged(tmp_path / "a.capi", change))


def test_an_index_that_does_not_lie(tmp_path: Path) -> None:
    with Archive(forged(tmp_path / "a.capi", lambda index: None)) as opened:
        assert opened.read("x").tolist() == [0, 0]
        with pytest.raises(KeyError, match="no tensor 'y'"):
            opened.read("y")
    with (
        Archive(forged(tmp_path / "b.capi", put("codec", "newer"))) as opened,
        pytest.raises(ArchiveError, match="newer Capibara"),
    ):
        opened.read("x")


def test_a_shape_too_large_for_its_payload_allocates_nothing(tmp_path: Path) -> None:
    def huge(index: Any) -> None:
        index["tensors"][0].update(shape=[1, 1 << 40], chunks=[[1, *index["tensors"][0]["chunks"][0][1:]]])

    with Archive(forged(tmp_path / "a.capi", huge)) as opened, pytest.raises(DamagedError):
        opened.read("x")


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\x89CAPI\r\n\x1a", b"\0" * 100, b"\x89CAPI\r\n\x1a" + struct.pack("<II", 7, 0) + bytes(40)],
)
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.capi").write_bytes(content)
    with pytest.raises(ArchiveError):
        Archive(tmp_path / "a.capi")


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.capi"
    path.write_bytes(b"before")

    def fail() -> None:
        with ArchiveWriter(path) as file:
            file.add("x", np.zeros(4, np.uint32), F32, (4,))
            with pytest.raises(CompressError, match="expected text that no earlier"):
                file.add("x", np.zeros(4, np.uint32), F32, (4,))
            file.add("y", np.zeros(4, np.uint32), F32, (5,))

    with pytest.raises(CompressError, match=r"shape \(5,\)"):
        fail()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.capi"]


HEADERS: dict[str, Any] = {
    "no JSON": b"{",
    "a list": [],
    "no offsets": {"x": {"dtype": "F32", "shape": [2]}},
    "another size": {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "past the end": {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
    "a hole": {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "a negative size": {"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "a type that is not a name": {"x": {"dtype": "F 4", "shape": [2], "data_offsets": [0, 8]}},
    "no text": {"__metadata__": {"a": 1}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("what", HEADERS)
def test_safetensors_files_that_lie(tmp_path: Path, what: str) -> None:
    text = HEADERS[what] if isinstance(HEADERS[what], bytes) else json.dumps(HEADERS[what]).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ArchiveError):
        compress_files(plan_compress(path, tmp_path / "a.capi"))
    assert not (tmp_path / "a.capi").exists()


def test_a_folder_keeps_its_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model"
    (source / "deep").mkdir(parents=True)
    (source / "config.json").write_text('{"a": 1}')
    save_file({"x": np.ones((70, 70), np.float32)}, source / "deep" / "part.safetensors")
    assert main(["compress", str(source), str(tmp_path / "small"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    made = tmp_path / "small" / "deep" / "part.capi"
    assert report["sizes"] == {str(made): made.stat().st_size}
    assert (tmp_path / "small" / "config.json").read_text() == '{"a": 1}'
    assert main(["decompress", str(tmp_path / "small"), str(tmp_path / "back")]) == 0
    for name in ("config.json", "deep/part.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (3, "Remedy: slice(3, 4)."),
        (-1, "Remedy: slice(-1, None)."),
        ([1, 2], "Remedy: slice(0, 10)."),
        (slice(0, 4, 2), "Remedy: slice(0, 10)."),
        (slice(0, 4, 0), "Remedy: slice(0, 10)."),
        (slice(0.5, 2), "Remedy: slice(0, 10)."),
        ("all", "Remedy: slice(0, 10)."),
    ],
)
def test_rows_that_are_none(archive: Path, rows: Any, remedy: str) -> None:
    with Archive(archive) as opened:
        message = (
            f"rows: got {rows!r} for the shape (40, 8), expected a slice of integers with step 1. {remedy}"
        )
        with pytest.raises(ArchiveError, match=re.escape(message)):
            opened.read("half", rows)


def test_a_scalar_has_no_rows(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.capi") as out:
        out.add("x", np.zeros(1, np.uint32), get_format("F32"), ())
    with (
        Archive(tmp_path / "a.capi") as opened,
        pytest.raises(ArchiveError, match=r"for the shape \(\).*Remedy: leave it out"),
    ):
        opened.read("x", slice(0, 1))


def test_a_tensor_in_the_codes_of_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNIFORM, "chunk", 30 * 40, raising=False)
    x = np.random.default_rng(0).normal(size=(100, 40)).astype(np.float32)
    with ArchiveWriter(tmp_path / "a.capi") as out:
        out.add("before", np.zeros(9, np.uint8), get_format("U8"), (9,))
        out.add(
            "x",
            x.reshape(-1).view(np.uint32),
            get_format("F32"),
            x.shape,
            codec="uniform",
            settings={"step": 0.1},
        )
        out.add_tied("y", "x")
    with Archive(tmp_path / "a.capi") as one:
        with ArchiveWriter(tmp_path / "b.capi") as out:
            assert out.add_coded("z", one, "y").coded_bytes == one["x"].coded_bytes
            with pytest.raises(CompressError, match="no earlier tensor has"):
                out.add_coded("z", one, "x")
            with pytest.raises(KeyError, match="no tensor 'w'"):
                out.add_coded("w", one, "w")
        with Archive(tmp_path / "b.capi") as two:
            assert len(two["z"].chunks) == 4
            assert (two["z"].codec, two["z"].settings) == ("uniform", {"step": 0.1})
            np.testing.assert_array_equal(two.read("z"), one.read("x"))
            assert [problem for _, problem in two.verify()] == [None]


def test_a_damaged_tensor_is_not_copied_in_its_codes(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    with Archive(archive) as opened:
        data[opened["half"].chunks[0].offset + 5] ^= 4
    archive.write_bytes(data)
    with Archive(archive) as opened, ArchiveWriter(tmp_path / "b.capi") as out:
        with pytest.raises(DamagedError, match="does not have its checksum"):
            out.add_coded("half", opened, "half")
        out.add("half", np.zeros(4, np.uint8), get_format("U8"), (4,))
    with Archive(tmp_path / "b.capi") as found:
        assert not found.read("half").any()


def test_the_commands(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(archive)]) == 0
    assert "7 tensors" in capsys.readouterr().out
    assert main(["inspect", str(archive), "--json"]) == 0
    listed = {t["name"]: t for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert listed["half"]["dtype"] == "F16"
    assert listed["half"]["shape"] == [40, 8]
    assert main(["verify", str(archive)]) == 0
    assert "as they were written" in capsys.readouterr().out
    data = bytearray(archive.read_bytes())
    with Archive(archive) as opened:
        data[opened["half"].chunks[0].offset + 5] ^= 4
    archive.write_bytes(data)
    assert main(["verify", str(archive)]) == 1
    assert "damaged" in (out := capsys.readouterr().out)
    assert "half" in out
    assert main(["decompress", str(archive), str(archive.with_name("out.safetensors"))]) == 2
    assert not archive.with_name("out.safetensors").exists()


@pytest.mark.parametrize("verb", ["compress", "decompress"])
def test_bad_arguments(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([verb, str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is inside" in capsys.readouterr().err
    (tmp_path / "in").mkdir()
    assert main([verb, str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "no *." in capsys.readouterr().err


def test_without_jax_and_without_torch(archive: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'torch', 'ml_dtypes'):\n"
        "    sys.modules[name] = None\n"
        "from capibara.cli import main\n"
        "sys.exit(main(['verify', sys.argv[1]]) or main(['decompress', sys.argv[1], sys.argv[1] + '.back'])\n"
        "         or main(['compress', sys.argv[1] + '.back', sys.argv[1] + '.again']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(archive)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(f"{archive}.again").read_bytes() == archive.read_bytes()
