"""Damaged and malicious folders: a clear error within limits, or a model. ``make fuzz-folders`` tries 20,000."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

for package in ("tokenizers", "jinja2", "pyarrow", "grain", "orbax.checkpoint"):
    pytest.importorskip(package)

from fuzz_folders import WEIGHTS, run

from capibara.data import FileTokenizer, TokenizerError, read_tokenizer_files
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.families import FamilyError, TensorFiles, read_config
from capibara.files import read_bounded


def test_a_folder_is_read_or_refused() -> None:
    ends, findings = run(150, seed=2, bases=2)
    assert findings == []
    assert {end.partition(":")[0] for end in ends} == set(WEIGHTS)
    assert sum(ends.values()) == 150


def test_an_index_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map":[' + b"{}," * (1 << 21) + b"{}]}")
    tracemalloc.start()
    with pytest.raises(FamilyError, match=r"index\.json: has more objects and lists than a writer makes"):
        TensorFiles(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The most that an index may have is reserved; as objects it would be 144 MiB.
    assert peak < 80 << 20
    (tmp_path / "config.json").write_bytes(b'{"x":[' + b"[]," * (1 << 20) + b"[]]}")
    with pytest.raises(FamilyError, match="more objects and lists"):
        read_config(tmp_path)


def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(FamilyError, match=r"config\.json: is not a regular file"):
        read_config(tmp_path)
    pipe.unlink()
    pipe.symlink_to("/dev/zero")
    with pytest.raises(FamilyError, match=r"config\.json: is not a regular file"):
        read_config(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: is not a regular file"):
        read_tokenizer_files(tmp_path)
    # As in a cache of Hugging Face: a link to where the content is.
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert read_bounded(tmp_path / "link", 2) == b"{}"
    with pytest.raises(OSError, match="is too large, expected at most 1 bytes"):
        read_bounded(tmp_path / "link", 1)


def test_panics_of_the_package_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rust's panics reach Python as a BaseException, which `except Exception` lets through.
    from tokenizers import Tokenizer

    found = FileTokenizer(byte_tokenizer_files(), "here")
    before = Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())

    class Panic(BaseException):
        pass

    class Broken:
        def __getattr__(self, name: str) -> object:
            def panic(*_: object, **__: object) -> None:
                raise Panic("index out of bounds")

            return panic if name in ("encode", "decode") else getattr(before, name)

    monkeypatch.setattr(found, "_tokenizer", Broken())
    for call in (lambda: found.encode("x"), lambda: found.decode([1]), lambda: found.encode_places("x")):
        with pytest.raises(TokenizerError, match="here: Panic: index out of bounds"):
            call()
