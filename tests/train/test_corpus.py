"""Reading text: what comes in comes out, and what is not text is refused with its place."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from capibara.train import data
from capibara.train.data import load_corpus, python_documentation, split_corpus
from capibara.train.errors import DataError, TextNotFoundError


def text_of(corpus: data.Corpus) -> bytes:
    return corpus.train.tobytes() + corpus.validation.tobytes()


def test_files_are_joined_by_a_blank_line_and_split_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Alpha ä.\n")
    (tmp_path / "b").write_text("Beta 水.\n")
    corpus = load_corpus([tmp_path / "a.txt", tmp_path / "b"], validation_fraction=0.25)
    expected = "Alpha ä.\n\n\nBeta 水.\n".encode()
    assert text_of(corpus) == expected
    assert corpus.validation.size == len(expected) // 4
    assert corpus.documents == 2
    assert corpus.train.dtype == np.uint8
    assert "held out" in str(corpus)


def test_a_folder_is_searched_recursively_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name in ("b.md", "a.txt", "z/c.rst", "z/d.py", "e.bin", ".git/f.txt", "__pycache__/g.py", ".h.txt"):
        (tmp_path / name).write_text(name)
    corpus = load_corpus([tmp_path], validation_fraction=0)
    assert text_of(corpus) == b"a.txt\n\nb.md\n\nz/c.rst\n\nz/d.py"


def test_standard_input() -> None:
    corpus = load_corpus(["-"], stdin=io.BytesIO(b"from a pipe"), validation_fraction=0)
    assert text_of(corpus) == b"from a pipe"
    assert corpus.name == "standard input"


def test_a_pipe_by_name(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"through a pipe")
    os.close(writer)
    try:
        assert text_of(load_corpus([f"/dev/fd/{reader}"], validation_fraction=0)) == b"through a pipe"
    finally:
        os.close(reader)


def test_characters_that_straddle_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHUNK", 5)
    content = ("é水🦫x" * 7).encode()
    (tmp_path / "a.txt").write_bytes(content)
    assert text_of(load_corpus([tmp_path / "a.txt"])) == content


@pytest.mark.parametrize("chunk", [3, 4, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\x00text", "byte 4 is NUL"),
        (b"caf\xe9 au lait", r"byte 3 \(0xe9\) can not be decoded"),
        ("水水".encode() + b"\xff", r"byte 6 \(0xff\)"),
        (b"cut off \xe6\xb0", r"byte 8 \(0xe6\)"),
        ("UTF-16".encode("utf-16-le"), "byte 1 is NUL.*UTF-16"),
    ],
)
def test_binary_files_are_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str, chunk: int
) -> None:
    monkeypatch.setattr(data, "_CHUNK", chunk)
    path = tmp_path / "strange.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_corpus([path])
    assert "strange.txt" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_what_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(TextNotFoundError, match=r"no text at '.*nothing\.txt' \(No such file"):
        load_corpus([tmp_path / "nothing.txt"])
    with pytest.raises(FileNotFoundError):
        load_corpus(["with\x00nul"])
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(TextNotFoundError, match=r"holds no text.*\*\.txt"):
        load_corpus([tmp_path])


def test_devices_are_not_text() -> None:
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus(["/dev/zero"])


@pytest.mark.parametrize(("content", "word"), [(b"", "empty"), (b" \n\t\n", "only white space")])
def test_empty_text(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=word):
        load_corpus([tmp_path / "a.txt"])


def test_too_much_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    with pytest.raises(DataError, match="larger than 99 bytes"):
        load_corpus([tmp_path / "a.txt"], max_bytes=99)
    load_corpus([tmp_path / "a.txt"], max_bytes=100)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range(fraction: float) -> None:
    with pytest.raises(DataError, match="validation_fraction"):
        split_corpus(b"abc", name="x", validation_fraction=fraction)


def test_the_fingerprint_tells_texts_and_splits_apart() -> None:
    prints = {
        split_corpus(text, name="any", validation_fraction=fraction).fingerprint
        for text in (b"abcdefghij", b"abcdefghiJ", b"abcdefghi")
        for fraction in (0.1, 0.2)
    }
    # Of 9 bytes, 0.1 and 0.2 hold out 0 and 1.
    assert len(prints) == 6
    same = split_corpus(bytearray(b"abcdefghij"), name="another name", validation_fraction=0.1)
    assert same.fingerprint in prints


def test_the_arrays_can_not_be_written() -> None:
    corpus = split_corpus(bytearray(b"abcdefghij"), name="x", validation_fraction=0.5)
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_the_documentation_is_real_and_its_held_out_part_is_not_in_the_training_text() -> None:
    corpus = load_corpus()
    assert corpus.train.size > 200_000
    train, held_out = (
        corpus.train.tobytes().decode(errors="replace"),
        corpus.validation.tobytes().decode(errors="replace"),
    )
    assert "context manager" in train
    known = {" ".join(paragraph.split()) for paragraph in train.split("\n\n")}
    # The first and last paragraph may be cut.
    paragraphs = [" ".join(paragraph.split()) for paragraph in held_out.split("\n\n")[1:-1]]
    long = [paragraph for paragraph in paragraphs if len(paragraph) >= 40]
    assert len(long) > 20
    assert not [paragraph for paragraph in long if paragraph in known]


def test_the_documentation_has_one_order() -> None:
    assert list(python_documentation()) == list(python_documentation())
    assert load_corpus().fingerprint == load_corpus().fingerprint
