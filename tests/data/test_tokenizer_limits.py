"""Limits of a ``tokenizer.json``, against what the package ``tokenizers`` makes of texts."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.data import FileTokenizer, TokenizerError
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.data.tokenizer_limits import _BETWEEN, _FORMS, _SECTIONS, _bound, _growth, check_limits

tokenizers = pytest.importorskip("tokenizers")

SEPARATOR = "ක"  # composes with nothing, and nothing becomes it
# The planes that have characters, without surrogates; those of private use are themselves in every form.
CODES = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)]
CHARACTERS = [chr(code) for code in CODES if chr(code) != SEPARATOR]
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
ISOLATED = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
BERT = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), True)
TEXT, OTHER = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
BEGIN = {"SpecialToken": {"id": "a", "type_id": 0}}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(single: Any, pair: Any = (TEXT, OTHER), **others: Any) -> dict[str, Any]:
    own = {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": list(pair),
        "special_tokens": own,
    } | others


def several(section: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", _SECTIONS[section][0]: parts}


def library(section: str, part: Any) -> Any:
    """The section of the package's tokenizer."""
    value = json.loads(byte_tokenizer_files()["tokenizer.json"])
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(value | {section: part})), section)


def each(part: Any, texts: list[str]) -> list[str]:
    """What a normalizer makes of each."""
    return library("normalizer", part).normalize_str(SEPARATOR.join(texts)).split(SEPARATOR)


def test_no_character_becomes_more_than_is_said() -> None:
    """Every character there is; and what bounds several forms in a row: none makes the decomposition longer."""
    lengths = {}
    for kind, most in _FORMS.items():
        found = each({"type": kind}, CHARACTERS)
        lengths[kind] = [len(one) for one in found]
        assert max(lengths[kind]) == (3 if kind == "NFC" else most)
    lower = each({"type": "Lowercase"}, CHARACTERS)
    assert max(map(len, each({"type": "Lowercase"}, lower))) == 2
    for kind in ("NFD", "NFKD"):
        decomposed = each({"type": kind}, CHARACTERS)
        assert each({"type": kind}, decomposed) == decomposed
        assert all(
            after <= before
            for before, after in zip(lengths[kind], map(len, each({"type": kind}, lower)), strict=True)
        )
    # What stands between forms: characters are removed or become one space.
    for kind in _BETWEEN[:1] + _BETWEEN[3:]:
        made = each({"type": kind}, CHARACTERS)
        assert all(new in ("", old, " ") for old, new in zip(CHARACTERS, made, strict=True))
    assert len(library("normalizer", {"type": "ByteLevel"}).normalize_str("🏊")) == 4
    bert = library("normalizer", {"type": "BertNormalizer"} | BERT | {"clean_text": False})
    spaced = bert.normalize_str(SEPARATOR.join(CHARACTERS)).split(SEPARATOR)
    assert max(map(len, spaced)) == _growth({"type": "BertNormalizer"}, "normalizer")[0]


PARTS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        *({"type": kind} for kind in ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents")),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "BertNormalizer"} | BERT,
        {"type": "ByteLevel"},
        {"type": "Prepend", "prepend": "ﷺİ"},
        replace("a", "ﷺ"),
        replace("a", "aa"),
        replace("", "İ", "Regex"),
        replace(".", "株a", "Regex"),
    ],
    "pre_tokenizer": [
        META,
        META | {"replacement": "x"},
        LEVEL,
        LEVEL | {"use_regex": True},
        ISOLATED,
        ISOLATED | {"pattern": {"Regex": "x*"}, "behavior": "Removed"},
        {"type": "Whitespace"},
        {"type": "WhitespaceSplit"},
        {"type": "BertPreTokenizer"},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": True},
        {"type": "UnicodeScripts"},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "FixedLength", "length": 1},
    ],
    "decoder": [
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "BPEDecoder", "suffix": "a"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "#", "word_delimiter_token": "", "cleanup": True},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": False},
        META,
        LEVEL,
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        replace("a", "aaa"),
        replace("", "b", "Regex"),
    ],
}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_nothing_grows_more_than_is_said(data: st.DataObject) -> None:
    """Parts in any order, several times: the package's results are not longer than the bound."""
    section = data.draw(st.sampled_from(sorted(PARTS)))
    part = several(section, data.draw(st.lists(st.sampled_from(PARTS[section]), max_size=6)))
    try:
        factor, added = _bound({section: part}, (section,), "here")
    except TokenizerError:
        return
    letters = st.sampled_from("aAİ x▁#|.1ﷺ株각ᾂ🏊\u0301")
    made = library(section, part)
    texts = data.draw(st.lists(st.text(letters, min_size=1, max_size=8), min_size=1, max_size=4))
    try:
        if section == "decoder":
            size = len(made.decode(texts))
        elif section == "normalizer":
            texts = texts[:1]
            size = len(made.normalize_str(texts[0]))
        else:
            size = sum(len(piece) for text in texts for piece, _ in made.pre_tokenize_str(text))
    except BaseException as error:  # some chains are too much for the package itself
        if type(error).__name__ != "PanicException":
            raise
        return
    assert size <= sum(factor * len(one) + added for one in texts)


def test_pieces_of_one_character_grow_as_is_said() -> None:
    for part, text, want in ((META, "aaa", 2), (LEVEL, "🏊", 5)):
        assert _bound({"pre_tokenizer": part}, ("pre_tokenizer",), "here") == (want, 0)
        found = library("pre_tokenizer", several("pre_tokenizer", [ISOLATED, part])).pre_tokenize_str(text)
        assert sum(len(piece) for piece, _ in found) == want * len(text)


@pytest.mark.parametrize(
    ("section", "part", "match"),
    [
        ("normalizer", [*[replace("ا", "ﷺ"), {"type": "NFKC"}] * 3], "more than 1500 times"),
        ("normalizer", [replace("i", "İ"), {"type": "Lowercase"}] * 12, "more than 1500 times"),
        ("normalizer", [{"type": "BertNormalizer"} | BERT] * 7, "more than 1500 times"),
        ("normalizer", [{"type": "Prepend", "prepend": "ﷺ" * 300}, {"type": "NFKD"}], "4096 characters"),
        ("normalizer", [replace("a", "a" * 1000) | {"normalizers": []}] * 2, "more than 1500 times"),
        ("normalizer", {"prepend": "a" * 10_000}, "got the type None, expected one of BertNormalizer"),
        ("normalizer", {"type": "Foo", "prepend": "a" * 10_000}, "got the type 'Foo'"),
        ("normalizer", [["a" * 10_000]], r"got the part \['aaa"),
        ("pre_tokenizer", [META, META | {"replacement": "x"}] * 20, "pre_tokenizer: makes texts more than"),
        ("pre_tokenizer", [ISOLATED, LEVEL] * 5, "more than 1500 times"),
        (
            "pre_tokenizer",
            several("pre_tokenizer", [ISOLATED, LEVEL] * 5) | {"normalizers": []},
            "more than 1500 times",
        ),
        ("decoder", [{"type": "BPEDecoder", "suffix": ""}] * 30, "decoder: makes texts more than"),
        (
            "decoder",
            [{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}] * 30,
            "more than 1500 times",
        ),
        ("decoder", [{"suffix": ""}] * 30, "got the type None"),
        ("post_processor", template([BEGIN, TEXT, TEXT]), "single: has a text more than once"),
        ("post_processor", template([TEXT], [TEXT, TEXT, OTHER]), "pair: has a text more than once"),
        ("post_processor", template([TEXT] * 9, type="Sequence", processors=[]), "more than once"),
        ("post_processor", template([TEXT] * 9, type="Other"), "got the type 'Other'"),
        (
            "post_processor",
            template([TEXT, {"SpecialToken": ["a", 0]}]),
            "one of special_tokens with its ids",
        ),
        ("post_processor", template([TEXT, BEGIN], special_tokens={"a": ["a", [0] * 9, ["a"]]}), "its ids"),
    ],
)
def test_what_would_exhaust_memory_is_refused(section: str, part: Any, match: str) -> None:
    value = json.loads(byte_tokenizer_files()["tokenizer.json"])
    value[section] = several(section, part) if isinstance(part, list) else part
    with pytest.raises(TokenizerError, match=f"tokenizer.json: {section}: .*{match}|{match}"):
        FileTokenizer({"tokenizer.json": json.dumps(value).encode()})


def test_what_is_published_is_read() -> None:
    """The largest: ALBERT and XLNet; CLIP; BERT."""
    table = base64.b64encode(b"\0\0\0\0" + "صلى الله عليه وسلم\0a\0".encode()).decode()
    space = replace(" {2,}", " ", "Regex")
    before = [replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}]
    before += [{"type": "Lowercase"}, {"type": "Precompiled", "precompiled_charsmap": table}, space]
    albert = {
        "normalizer": several("normalizer", before),
        "pre_tokenizer": several("pre_tokenizer", [{"type": "WhitespaceSplit"}, META]),
        "post_processor": template([BEGIN, TEXT, BEGIN]),
        "decoder": META,
    }
    assert _bound(albert, ("normalizer", "pre_tokenizer"), "here")[0] == 18 * 18 * 2 * 2
    clip = {
        "normalizer": several(
            "normalizer", [{"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}]
        ),
        "pre_tokenizer": several("pre_tokenizer", [ISOLATED, LEVEL]),
        "post_processor": {"type": "RobertaProcessing"},
    }
    bert = {
        "normalizer": {"type": "BertNormalizer"},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece"},
    }
    for value in (albert, clip, bert):
        check_limits(value, "here")


def test_every_part_of_the_package_is_known() -> None:
    modules = {
        "normalizer": tokenizers.normalizers,
        "pre_tokenizer": tokenizers.pre_tokenizers,
        "decoder": tokenizers.decoders,
        "post_processor": tokenizers.processors,
    }
    for section, module in modules.items():
        base = {"Normalizer", "PreTokenizer", "Decoder", "PostProcessor", "DecodeStream"}
        names = {name for name, one in vars(module).items() if isinstance(one, type)} - base
        assert names
        assert names <= set(_SECTIONS[section][1].split())
        for part in PARTS.get(section, []):  # and the package reads them by these names
            assert library(section, part) is not None
