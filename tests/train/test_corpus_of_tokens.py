"""A corpus in the tokens of a tokenizer."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from capibara.data import ByteTokenizer, train_tokenizer
from capibara.train import data as corpora
from capibara.train import load_corpus

TEXTS = ["Ein Text mit Ümläuten.\n" * 30, "x" * 700 + "😀" * 50, "The last one,\nof\nlines.\n" * 20]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = []
    for number, text in enumerate(TEXTS):
        found.append(tmp_path / f"{number}.txt")
        found[-1].write_text(text)
    return found


TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


@pytest.mark.parametrize("piece", [1 << 20, 64, 5])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7])
def test_documents_end_and_come_back(
    paths: list[Path], piece: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "_PIECE", piece)
    told: list[int] = []
    corpus = load_corpus(paths, validation_fraction=fraction, tokenizer=TOKENIZER, progress=told.append)
    tokens = np.concatenate([corpus.train, corpus.validation])
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == TOKENIZER.end_token)
    assert [TOKENIZER.decode(part) for part in np.split(tokens, ends + 1)] == [*TEXTS, ""]
    assert sum(told) == sum(len(text.encode()) for text in TEXTS)
    held = corpus.validation if fraction else corpus.train
    size = sum(len(text.encode()) for text in TEXTS) + 2 * len("\n\n")
    of_held = size - (size - int(size * fraction)) if fraction else size
    assert corpus.bytes_per_token * held.size == pytest.approx(of_held, abs=4)


def test_the_fingerprint_says_which_tokenizer(paths: list[Path]) -> None:
    in_bytes = load_corpus(paths)
    assert load_corpus(paths, tokenizer=ByteTokenizer()).fingerprint == in_bytes.fingerprint
    one = load_corpus(paths, tokenizer=TOKENIZER)
    other = load_corpus(paths, tokenizer=train_tokenizer(TEXTS, vocab_size=280))
    assert len({in_bytes.fingerprint, one.fingerprint, other.fingerprint}) == 3
    assert "tokens in 3 documents" in str(one)
    assert one.bytes_per_token > in_bytes.bytes_per_token == 1


def test_standard_input_is_a_document() -> None:
    corpus = load_corpus(["-"], stdin=io.BytesIO(b"a text"), validation_fraction=0, tokenizer=TOKENIZER)
    assert TOKENIZER.decode(corpus.train) == "a text"
    assert corpus.train[-1] == TOKENIZER.end_token
