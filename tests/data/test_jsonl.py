"""Documents in JSON Lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from capibara.data import DocumentError, read_jsonl
from capibara.train import DataError, load_corpus

TEXTS = ["One é 😀", "", "Two\nlines", " last "]


def written(path: Path, lines: list[bytes]) -> Path:
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_line_is_a_document(tmp_path: Path, name: str) -> None:
    lines = [
        json.dumps({"id": 3, "text": text}, ensure_ascii=number == 0).encode()
        for number, text in enumerate(TEXTS)
    ]
    path = written(tmp_path / name, [*lines[:2], b"", b"  \r", *lines[2:]])
    assert list(read_jsonl(path)) == TEXTS
    (tmp_path / "b.txt").write_text("plain")
    corpus = load_corpus([path, tmp_path / "b.txt"], validation_fraction=0)
    assert corpus.documents == 4
    np.testing.assert_array_equal(corpus.train, list("\n\n".join([*filter(None, TEXTS), "plain"]).encode()))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 is not JSON"),
        (b"[1]", "line 2 holds list"),
        (b'{"messages": []}', r"expected a string under 'text', got the keys \['messages'\]"),
        (b'{"text": 3}', "expected a string under 'text', got int"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b"\xff", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_what_is_no_document_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = written(tmp_path / "a.jsonl", [b'{"text": "x"}', line])
    with pytest.raises(DocumentError, match=words):
        list(read_jsonl(path))
    with pytest.raises(DataError, match=words):
        load_corpus([path])


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl.gz", [b'{"text": "x"}'] * 1000)
    whole = path.read_bytes()
    for damaged in (whole[:-12], b"plain", whole[:20] + b"\x00\xff" + whole[22:]):
        path.write_bytes(damaged)
        with pytest.raises(DocumentError, match=r"a\.jsonl\.gz: (damaged gzip|line)"):
            list(read_jsonl(path))


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl.gz", [b'{"text": "' + b"x" * 100_000 + b'"}'] * 50)
    with pytest.raises(DataError, match="larger than"):
        load_corpus([path], max_bytes=1_000_000)
