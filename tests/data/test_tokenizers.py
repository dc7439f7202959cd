"""Tokenizers: text to tokens and back, one token at a time, and what files of strangers can do."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.data import (
    ByteTokenizer,
    FileTokenizer,
    TokenizerError,
    decode_stream,
    load_tokenizer,
    train_tokenizer,
)
from capibara.data.tokenizer_file import byte_tokenizer_files

tokenizers = pytest.importorskip("tokenizers")

LEARNED = train_tokenizer([topics["with"], topics["for"]], vocab_size=400, special_tokens=["<|user|>"])
BYTES = FileTokenizer(byte_tokenizer_files())


def of_bytes(tokens: dict[str, int], **settings: object) -> FileTokenizer:
    """Words, and bytes where there is none, as Llama 2 and Gemma have."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)} | tokens
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token=None, byte_fallback=True, fuse_unk=True)
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    files = {
        "tokenizer.json": library.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    return FileTokenizer(files)


@pytest.mark.parametrize(
    "tokenizer", [LEARNED, BYTES, ByteTokenizer()], ids=["learned", "bytes file", "bytes"]
)
@given(text=st.text(st.characters(codec=None, categories=["Cs", "Lu", "Zs", "So"]), min_size=1))
def test_halves_of_characters_are_replaced(tokenizer: FileTokenizer, text: str) -> None:
    """What Python has in the place of bytes that are not UTF-8 (U+DC80 to U+DCFF) are these bytes again."""
    whole = "".join(
        one if not 0xD800 <= ord(one) <= 0xDFFF or 0xDC80 <= ord(one) <= 0xDCFF else "\ufffd" for one in text
    )
    given_bytes = whole.encode("utf-8", "surrogateescape")
    assert "".join(decode_stream(tokenizer, tokenizer.encode(text))) == given_bytes.decode("utf-8", "replace")
    assert (tokenizer.encode_batch([text])[0] == tokenizer.encode(text)).all()


@pytest.mark.parametrize(
    "tokenizer", [LEARNED, BYTES, ByteTokenizer()], ids=["learned", "bytes file", "bytes"]
)
@given(text=st.text(min_size=1))
@settings(max_examples=40, deadline=None)
def test_text_comes_back_in_whole_characters(tokenizer: FileTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    pieces = list(decode_stream(tokenizer, tokens))
    assert "".join(pieces) == text
    # Nothing incomplete was given out: U+FFFD is there only where the text has it.
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_characters_wait_for_their_last_byte() -> None:
    stream, tokens = BYTES.stream(), BYTES.encode("é😀")
    assert [stream.push(int(token)) for token in tokens] == ["", "é", "", "", "", "😀"]
    stream = BYTES.stream()
    assert stream.push(int(tokens[0])) == ""
    assert stream.finish() == "\ufffd"
    # What never becomes a character does not hold back the rest.
    stream = BYTES.stream()
    pushed = [stream.push(0xFF) for _ in range(200)]
    assert "\ufffd" in "".join(pushed)
    assert stream.push(ord("a")).endswith("a")


def test_spaces_that_a_decoder_strips_stay_between_tokens() -> None:
    tokenizer = of_bytes({"▁the": 256, "▁with": 257, "x": 258})
    tokens = [256, 257, 0xC3, 0xA9, 258, 257]
    assert "".join(decode_stream(tokenizer, tokens)) == tokenizer.decode(tokens) == "the withéx with"
    assert list(decode_stream(tokenizer, tokens)) == ["the", " with", "é", "x", " with"]


@pytest.mark.parametrize(
    "tokenizer", [LEARNED, BYTES, ByteTokenizer()], ids=["learned", "bytes file", "bytes"]
)
@given(text=st.text(min_size=1))
@settings(max_examples=40, deadline=None)
def test_tokens_are_bytes_of_their_text(tokenizer: FileTokenizer, text: str) -> None:
    parts = [tokenizer.token_bytes(int(token)) for token in tokenizer.encode(text, special=False)]
    assert b"".join(parts) == text.encode()


def test_bytes_of_tokens_that_are_none() -> None:
    words = of_bytes({"▁the": 256, "x▁": 257, "<0xZZ>": 258})
    assert [words.token_bytes(n) for n in (256, 257, 258, 0xC3, 999)] == [
        b" the",
        b"x ",
        b"<0xZZ>",
        b"\xc3",
        b"",
    ]
    user = int(LEARNED.encode("<|user|>", special=False)[0])
    assert LEARNED.token_bytes(user) == b"<|user|>"
    assert ByteTokenizer().token_bytes(256) == b""


def test_bytes_of_a_file_are_their_own_numbers() -> None:
    text = "a\tÿ😀\x00\n"
    np.testing.assert_array_equal(BYTES.encode(text), list(text.encode()))
    assert BYTES.vocab_size == 256


def test_special_tokens_begin_and_end_texts() -> None:
    assert LEARNED.stop_tokens == {0}
    user = LEARNED.encode("<|user|>hi")[0]
    assert LEARNED.decode([user]) == ""
    assert LEARNED.decode([user], skip_special=False) == "<|user|>"
    files = dict(LEARNED.files)
    files["tokenizer_config.json"] = json.dumps(
        {"bos_token": {"content": "<|user|>"}, "eos_token": "<|endoftext|>", "add_bos_token": True}
    ).encode()
    begins = FileTokenizer(files)
    assert begins.encode("hi")[0] == user
    assert begins.encode("hi", special=False)[0] != user
    np.testing.assert_array_equal(begins.encode("<|user|>hi"), begins.encode("hi"))
    assert begins.stop_tokens == {0}
    assert FileTokenizer(files | {"config.json": b'{"eos_token_id": 7}'}).stop_tokens == {7}
    both = files | {
        "config.json": b'{"eos_token_id": 7}',
        "generation_config.json": b'{"eos_token_id": [3, 4]}',
    }
    assert FileTokenizer(both).stop_tokens == {3, 4}


def test_a_text_is_never_cut_or_padded() -> None:
    library = tokenizers.Tokenizer.from_str(LEARNED.files["tokenizer.json"].decode())
    library.enable_truncation(3)
    library.enable_padding(length=9)
    tokenizer = FileTokenizer({"tokenizer.json": library.to_str().encode()})
    np.testing.assert_array_equal(
        tokenizer.encode("the with statement"), LEARNED.encode("the with statement")
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"[]", "holds list"),
        ("tokenizer.json", b"{", "not valid"),
        ("tokenizer.json", b"\xff{}", "not valid"),
        ("tokenizer.json", b'{"a": ' * 100_000, "not valid"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 99999999}, "merges": []}}', "99999999"),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
            "tokenizer.json",
        ),
        ("tokenizer_config.json", b"3", "holds int"),
        ("tokenizer_config.json", b"{", "not JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    for file, whole in LEARNED.files.items():
        (tmp_path / file).write_bytes(whole)
    assert load_tokenizer(tmp_path).encode("the").tolist() == LEARNED.encode("the").tolist()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)


def test_a_folder_without_one_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"vocab\.json, an older format"):
        load_tokenizer(tmp_path)


@given(at=st.integers(0, 3000), bits=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_are_refused_or_read(at: int, bits: int) -> None:
    content = bytearray(LEARNED.files["tokenizer.json"])
    content[at % len(content)] ^= bits
    try:
        tokenizer = FileTokenizer({"tokenizer.json": bytes(content)})
        tokenizer.decode(tokenizer.encode("the with statement"))
    except TokenizerError:
        pass


def test_learning_refuses_what_cannot_be() -> None:
    with pytest.raises(TokenizerError, match="at least 257"):
        train_tokenizer(["a"], vocab_size=256)
    with pytest.raises(TokenizerError, match="different texts"):
        train_tokenizer(["a"], vocab_size=300, special_tokens=["<|endoftext|>"])


def test_it_is_what_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for tokenizer in (LEARNED, BYTES):
        for file, content in tokenizer.files.items():
            (tmp_path / file).write_bytes(content)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "with é 😀 statement <|user|>\n"
        assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(
            tokenizer.encode(text), skip_special=False
        )
