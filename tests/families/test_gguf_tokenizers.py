"""Tokenizers in GGUF files: with and without ``tokenizer.huggingface.json`` they cut texts as the folder's does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.core import ModularCapibaraModel
from capibara.data import FileTokenizer
from capibara.families import FamilyError
from capibara.families.gguf import GgufFile
from capibara.families.gguf.tokens import gguf_tokenizer_files, tokenizer_metadata

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = (
    "Capibaras swim in the sun, and they're 1234567 strong.\n\n  Two spaces; tabs\tand ünïcödé — 水豚!",
    "swim",
    " swim  swim",
    "<|im_start|>user\nHello<|im_end|>",
    "🦫 don't WE'LL 3.14",
)
CORPUS = [
    "Capibaras swim in the sun and rest on the grass of the river.",
    "They're 1234 strong, don't swim 水豚",
] * 9
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(cut: str) -> dict[str, bytes]:
    """A small tokenizer of bytes whose texts are cut as those of GPT-2, Llama 3 or Qwen 2 are."""
    library: Any = tokenizers
    found = library.Tokenizer(library.models.BPE(ignore_merges=cut == "llama3"))
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut == "gpt2")
    if cut == "gpt2":
        found.pre_tokenizer = level
    else:
        regex = SPLIT if cut == "llama3" else SPLIT.replace("{1,3}", "")
        split = library.pre_tokenizers.Split(library.Regex(regex), "isolated")
        found.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    if cut == "qwen2":
        found.normalizer = library.normalizers.NFC()
    found.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator(CORPUS, trainer)
    return _files(found, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def sentencepiece(prefix: bool) -> dict[str, bytes]:
    """A small tokenizer as Llama 2's (or, without a prefix, Gemma's) is converted from SentencePiece."""
    library: Any = tokenizers
    special = ["<unk>", "<s>", "</s>"]
    trainer = library.trainers.BpeTrainer(vocab_size=420, show_progress=False)
    learned = library.Tokenizer(library.models.BPE())
    learned.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    learned.train_from_iterator(CORPUS, trainer)
    state = json.loads(learned.to_str())["model"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    # Ids in the order of merges, as converters give them.
    pairs = [tuple(one) for one in state["merges"]]
    joined = list(dict.fromkeys("".join(one) for one in pairs))
    single = sorted(set(state["vocab"]) - set(joined))
    vocab = {token: place for place, token in enumerate([*special, *bytes_, *joined, *single])}
    # A converted tokenizer merges every pair of tokens that is one.
    every = [
        (a, b)
        for token in joined
        for a, b in sorted(
            ((token[:cut], token[cut:]) for cut in range(1, len(token))),
            key=lambda one: (vocab.get(one[0], 0), vocab.get(one[1], 0)),
        )
        if a in vocab and b in vocab
    ]
    model = library.models.BPE(vocab, every, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    found = library.Tokenizer(model)
    spaced = library.normalizers.Replace(" ", "▁")
    parts = [library.normalizers.Prepend("▁"), spaced] if prefix else [spaced]
    found.normalizer = library.normalizers.Sequence(parts)
    back = [library.decoders.Replace("▁", " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    found.decoder = library.decoders.Sequence([*back, library.decoders.Strip(" ", 1, 0)] if prefix else back)
    found.post_processor = library.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    found.add_special_tokens(special)
    return _files(found, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def _files(tokenizer: Any, special: dict[str, str]) -> dict[str, bytes]:
    settings = special | {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


KINDS = {
    "gpt2": (lambda: byte_level("gpt2"), "gpt-2"),
    "llama3": (lambda: byte_level("llama3"), "llama-bpe"),
    "qwen2": (lambda: byte_level("qwen2"), "qwen2"),
    "sentencepiece": (lambda: sentencepiece(True), "default"),
    "without a prefix": (lambda: sentencepiece(False), "default"),
}


def written(files: dict[str, bytes], path: Path, *, original: bool) -> Path:
    """A file with nothing but a tokenizer."""
    found, notes = tokenizer_metadata(files, 512)
    assert notes == ()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in found.items():
        if key == "tokenizer.huggingface.json" and not original:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value))
        (add or writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", KINDS)
def test_texts_are_cut_as_before(name: str, tmp_path: Path) -> None:
    make, cut = KINDS[name]
    files = make()
    before = FileTokenizer(files)
    for original in (True, False):
        path = written(files, tmp_path / f"{original}.gguf", original=original)
        with GgufFile(path) as file:
            assert file.metadata["tokenizer.ggml.pre"] == cut
        found, notes = gguf_tokenizer_files(path)
        assert notes == ()
        assert (found["tokenizer.json"] == files["tokenizer.json"]) is original
        after = FileTokenizer(found)
        for text in TEXTS:
            np.testing.assert_array_equal(after.encode(text), before.encode(text))
            ids = before.encode(text, special=False)
            assert after.decode(ids) == before.decode(ids)
        assert after.stop_tokens == before.stop_tokens
        assert after.special_tokens == before.special_tokens
        assert after.template == TEMPLATE


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("name", [name for name in KINDS if name != "without a prefix"])
def test_transformers_cuts_texts_so(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = KINDS[name][0]()
    before = FileTokenizer(files)
    written(files, tmp_path / "a.gguf", original=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in TEXTS[:1] + TEXTS[4:]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert before.encode(text, special=False).tolist() == expected


def test_a_file_of_our_own_bytes(tmp_path: Path) -> None:
    from capibara.config import ModularModelConfig

    config = ModularModelConfig.from_toml(
        "demo", ["num_layers=1", "embed_dim=32", "mlp_dim=40", "model.head_dim=8"]
    )
    ModularCapibaraModel(config).save_pretrained(tmp_path / "own.gguf")
    back = ModularCapibaraModel.from_pretrained(tmp_path / "own.gguf")
    assert back.tokenizer.encode("añ").tolist() == list("añ".encode())


def test_a_published_model_without_a_tokenizer() -> None:
    assert tokenizer_metadata({}, 61) == ({"tokenizer.ggml.model": "none"}, ("it has no tokenizer",))


def test_tokenizers_that_llama_cpp_does_not_have() -> None:
    files = byte_level("gpt2")
    parsed = json.loads(files["tokenizer.json"])
    with pytest.raises(FamilyError, match="token id 316, expected ids below vocab_size = 100"):
        tokenizer_metadata(files, 100)
    parsed["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(FamilyError, match="pre_tokenizer"):
        tokenizer_metadata(files | {"tokenizer.json": json.dumps(parsed).encode()}, 512)
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0), ("b", -2.0)], 0, False))
    with pytest.raises(FamilyError, match="'Unigram'"):
        tokenizer_metadata({"tokenizer.json": unigram.to_str().encode()}, 512)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "is there twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["a b c", "d"]}, "merges"),
        ({"tokenizer.ggml.merges": ["a x"]}, "merges"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_vocabularies_that_do_not_fit(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
    } | changes
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FamilyError, match=told):
        gguf_tokenizer_files(tmp_path / "a.gguf")


def test_an_unknown_tokenizer_is_left_out(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "starcoder")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files, notes = gguf_tokenizer_files(tmp_path / "a.gguf")
    assert files == {}
    assert "(gpt2, starcoder) is not known" in notes[0]
