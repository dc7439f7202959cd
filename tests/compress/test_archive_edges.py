"""What a reader of other people's files, and a writer in a hurry, may meet."""

from __future__ import annotations

import json
import os
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from capibara.cli import main
from capibara.compress.codecs import lossless
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter, index, writer
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import get_format, to_float

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"w": RANDOM.normal(size=(80, 90)).astype(np.float32)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_the_source_is_never_the_target(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["compress", str(model), str(model), "--ratio=4"]) == 2
    assert "source itself" in capsys.readouterr().err
    link = model.with_name("link.safetensors")
    link.symlink_to(model)
    assert main(["compress", str(model), str(link)]) == 2
    assert model.read_bytes() == before
    assert main(["compress", str(model), str(model.parent)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_no_file_of_a_folder_overwrites_another(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(model), str(model.with_name("m.capi"))]) == 0
    out = model.parent.parent / "out"
    for verb in ("compress", "decompress"):
        assert main([verb, str(model.parent), str(out)]) == 2
        assert "would overwrite" in capsys.readouterr().err
    (model.parent / "linked").symlink_to("/tmp", target_is_directory=True)
    assert main(["compress", str(model.parent), str(out)]) == 2
    assert not out.exists()


def test_after_a_failed_tensor_the_archive_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 4096)
    x = np.ones(12288, np.float32)
    x[-1] = np.nan
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        with pytest.raises(CompressError, match="NaN"):
            archive.add("a", x.view(np.uint32), F32, x.shape, codec="uniform", settings={"step": 0.1})
        archive.add("a", x.view(np.uint32), F32, x.shape)
    with Archive(tmp_path / "a.capi") as archive:
        np.testing.assert_array_equal(archive.read("a"), x.view(np.uint32))


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\ud800", "a\x1b[31m", "__metadata__"])
def test_names_that_could_not_be_read_back(tmp_path: Path, name: str) -> None:
    with ArchiveWriter(tmp_path / "a.capi") as archive, pytest.raises(CompressError, match="name: got"):
        archive.add(name, np.zeros(2, np.uint32), F32, (2,))


@pytest.mark.parametrize("shape", [(-2, -1), (1,) * 33 + (2,)])
def test_shapes_that_could_not_be_read_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with ArchiveWriter(tmp_path / "a.capi") as archive, pytest.raises(CompressError, match="shape: got"):
        archive.add("x", np.zeros(2, np.uint32), F32, shape)


def test_settings_and_shapes_of_other_types(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        archive.add("x", np.zeros(6, np.uint32), F32, np.array([2, 3]))
        with pytest.raises(CompressError, match="settings: got"):
            archive.add("y", np.zeros(6, np.uint32), F32, (6,), settings={"k": object()})
    with pytest.raises(CompressError, match="not open"):
        archive.add("z", np.zeros(6, np.uint32), F32, (6,))
    with Archive(tmp_path / "a.capi") as read:
        assert read["x"].shape == (2, 3)


@pytest.mark.parametrize(("name", "value", "step"), [("F16", 0x7BFF, 3000.0), ("BF16", 0x7F7F, 1e37)])
def test_rounding_makes_no_infinity(name: str, value: int, step: float) -> None:
    form = get_format(name)
    bits = np.array([value, value | 0x8000], np.uint16)
    payload = UNIFORM.encode(bits, form, (2,), {"step": step})
    assert np.isfinite(to_float(UNIFORM.decode(memoryview(payload), form, (2,), {}), form)).all()


def test_a_child_of_a_fork_decodes_too() -> None:
    x = RANDOM.normal(size=(1000, 300)).astype(np.float32).reshape(-1).view(np.uint32)
    payload = lossless.encode(x, F32, (1000, 300))
    lossless.decode(payload, F32, (1000, 300))  # the threads of this process are there now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and newer Pythons warn of forks in general
        child = os.fork()
    if child == 0:
        good = (lossless.decode(payload, F32, (1000, 300)) == x).all()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_tied_matrices_count_once(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(128, 128)).astype(np.float32)
    y = RANDOM.normal(size=(64, 128)).astype(np.float32)
    save_file({"a": x, "b": x.copy(), "c": y}, tmp_path / "m.safetensors")
    assert (
        main(["compress", str(tmp_path / "m.safetensors"), str(tmp_path / "m.capi"), "--ratio=4", "--json"])
        == 0
    )
    original = sum(v.nbytes for v in load_file(tmp_path / "m.safetensors").values())
    assert abs(original / (tmp_path / "m.capi").stat().st_size / 4 - 1) < 0.02


@pytest.mark.parametrize("length", [3, 300])
def test_many_small_matrices_meet_their_ratio(tmp_path: Path, length: int) -> None:
    tensors = {f"{i:0{length}}": RANDOM.normal(size=(64, 64)).astype(np.float32) for i in range(30)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert (
        main(["compress", str(tmp_path / "m.safetensors"), str(tmp_path / "m.capi"), "--ratio=6", "--json"])
        == 0
    )
    original = sum(v.nbytes for v in tensors.values())
    assert abs(original / (tmp_path / "m.capi").stat().st_size / 6 - 1) < 0.02


def test_big_endian_and_strided_numbers() -> None:
    big = np.arange(10000, dtype=">u4")
    for bits in (big, np.arange(20000, dtype="<u4")[::2]):
        payload = lossless.encode(bits, F32, (100, 100))
        np.testing.assert_array_equal(lossless.decode(payload, F32, (100, 100)), bits)


def test_a_damaged_payload_is_one_message(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = model.with_name("m.capi")
    assert main(["compress", str(model), str(small)]) == 0
    with Archive(small) as archive:
        chunk = archive["w"].chunks[0]
    payload = small.read_bytes()[chunk.offset : chunk.offset + chunk.length]
    forged = bytearray(small.read_bytes())
    at = chunk.offset + chunk.length - 1
    forged[at] ^= 1
    changed = bytes(forged[chunk.offset : chunk.offset + chunk.length])
    text = bytes(forged).replace(str(zlib.crc32(payload)).encode(), str(zlib.crc32(changed)).encode())
    offset = int.from_bytes(text[-32:-24], "little")
    body, size = text[offset:-32], len(text[offset:-32])
    foot = index.FOOTER.pack(offset, size, zlib.crc32(body), 1, b"CAPI-END")
    small.write_bytes(text[:-32] + foot)
    capsys.readouterr()
    assert main(["verify", str(small)]) == 1
    assert main(["decompress", str(small), str(model.with_name("out"))]) == 2
    assert "damaged" in capsys.readouterr().err


def test_an_empty_file_comes_back(tmp_path: Path) -> None:
    save_file({}, tmp_path / "m.safetensors")
    assert main(["compress", str(tmp_path / "m.safetensors"), str(tmp_path / "m.capi")]) == 0
    assert main(["decompress", str(tmp_path / "m.capi"), str(tmp_path / "back.safetensors")]) == 0
    assert load_file(tmp_path / "back.safetensors") == {}


def test_headers_too_long_are_refused_at_once() -> None:
    payload = bytes([1]) + (1 << 22).to_bytes(4, "little") + b"\xff" * (1 << 22)
    with pytest.raises(DamagedError, match="header"):
        lossless.decode(payload, F32, (64, 64))


def test_a_shape_of_a_hundred_thousand_axes(tmp_path: Path) -> None:
    text = json.dumps({"x": {"dtype": "F32", "shape": [3] * 100_000, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert main(["compress", str(path), str(tmp_path / "m.capi")]) == 2


def filled(unit: bytes, size: int = 1 << 18) -> bytes:
    head, tail = b'{"metadata":{},"tensors":[', b"0]}"
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


@pytest.mark.parametrize(
    "text",
    [
        *map(
            filled,
            [b"[],", b"[1000000],", b'{"a":0},', b'{"a":0,"b":1.5,"cd":"ef","g":2},', b'"ab",', b"9e9,"],
        ),
        b'{"tensors":[],"metadata":{' + b",".join(b'"%x":"xy"' % i for i in range(20_000)) + b"}}",
    ],
    ids=["lists", "longer lists", "objects", "longer objects", "texts", "numbers", "metadata"],
)
def test_an_index_does_not_become_far_more_memory(text: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            index.parse(text, 16, "x")
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text)
    finally:
        tracemalloc.stop()


def test_brackets_in_names_are_no_objects(tmp_path: Path) -> None:
    names = ["[{" * 1500 + str(i) for i in range(4)]
    with ArchiveWriter(tmp_path / "a.capi", {"{[": '{"a": [' * 1000}) as archive:
        for name in names:
            archive.add(name, np.zeros(2, np.uint32), F32, (2,))
    with Archive(tmp_path / "a.capi") as archive:
        assert list(archive.entries) == names
    with pytest.raises(ArchiveError, match="too many objects"), ArchiveWriter(tmp_path / "b.capi") as archive:
        archive.add("a", np.zeros(2, np.uint32), F32, (2,), settings={"k": [[]] * 5000})


def _held(value: object) -> np.ndarray:
    """Objects, lists and strings in a value of JSON."""
    if isinstance(value, dict):
        return sum((_held(one) for pair in value.items() for one in pair), np.array([1, 0, 0]))
    if isinstance(value, list):
        return sum(map(_held, value), np.array([0, 1, 0]))
    return np.array([0, 0, isinstance(value, str)])


_TEXTS = st.text(alphabet='{}[]"\\/ a,ñ\n')
_JSON = st.recursive(
    st.none() | _TEXTS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner), max_leaves=20
)


@given(value=_JSON, at_once=st.integers(1, 9), ascii_only=st.booleans())
def test_objects_of_an_index_are_counted_without_those_in_strings(
    value: object, at_once: int, ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_AT_ONCE", at_once)
        assert list(index._counted(text)) == _held(value).tolist()
