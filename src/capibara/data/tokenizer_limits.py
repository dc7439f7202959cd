"""Limits of a ``tokenizer.json``: what its parts may add to a text.

A tokenizer is a chain of parts that the file describes: some replace text, some put text or tokens before and after it.
A few lines can ask for a terabyte of text (``a`` becomes ten of it, twenty times), and the package ``tokenizers`` ends
the program when memory is exhausted. So what the parts can add at most is computed before they are used.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from capibara.data.errors import TokenizerError

__all__ = ["check_limits"]

_MOST_GROWTH = 1500  # times; ALBERT and XLNet have 18 (NFKD) · 18 (SentencePiece's table) · 2 · 2
_MOST_ADDED = 4096  # characters of a text, or tokens around it
_MOST_TOKEN = 16_384  # characters
_MOST_WORD = 1000  # characters that WordPiece searches, in time that is their square and more
_MOST_PARTS = 1000
# Section → the key of a sequence's parts, and the types. The package reads parts of other types by their keys: what
# they do could not be told from their type.
_SECTIONS = {
    "normalizer": (
        "normalizers",
        "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence Strip "
        "StripAccents",
    ),
    "pre_tokenizer": (
        "pretokenizers",
        "BertPreTokenizer ByteLevel CharDelimiterSplit Delimiter Digits FixedLength Metaspace Punctuation Sequence "
        "Split UnicodeScripts Whitespace WhitespaceSplit",
    ),
    "decoder": (
        "decoders",
        "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Replace Sequence Strip WordPiece",
    ),
    "post_processor": (
        "processors",
        "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
    ),
}
# Characters that one character becomes at most. No form makes the decomposition longer that bounds all of them, so that
# several in a row count as the largest, as long as nothing else stands between them.
_FORMS = {"Lowercase": 2, "NFC": 4, "NFD": 4, "NFKC": 18, "NFKD": 18}
_BETWEEN = ("Nmt", "Sequence", "Strip", "StripAccents")  # these only remove characters, or make spaces


def check_limits(value: dict[str, Any], where: str) -> None:
    """Refuse a ``tokenizer.json`` whose output or work is not in proportion to its input.

    Raises:
      TokenizerError: the message names the part.
    """
    _bound(value, ("normalizer", "pre_tokenizer"), where)
    _bound(value, ("decoder",), where)
    name = "post_processor"
    added = sum(_tokens_added(part, f"{where}: {name}") for part in _parts(value, name, where))
    if added > _MOST_ADDED:
        raise TokenizerError(
            f"{where}: {name}: adds {added} tokens to each text, expected at most {_MOST_ADDED}"
        )
    model = value.get("model")
    for token in _tokens(value, model):
        if isinstance(token, str) and len(token) > _MOST_TOKEN:
            raise TokenizerError(
                f"{where}: the token {token[:40]!r}… has {len(token)} characters, expected at most {_MOST_TOKEN}"
            )
    word = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(word, int) and word > _MOST_WORD:
        raise TokenizerError(
            f"{where}: max_input_chars_per_word: got {word!r:.40}, expected at most {_MOST_WORD}"
        )


def _bound(value: dict[str, Any], names: tuple[str, ...], where: str) -> tuple[float, float]:
    """How many times as long, and how many characters longer, sections make a text at most; a decoder, each token."""
    factor, added, forms = 1.0, 0.0, 1.0
    for name, part in ((one, part) for one in names for part in _parts(value, one, where)):
        kind = part["type"]
        if kind in _FORMS:
            times, more = max(1.0, _FORMS[kind] / forms), 0
            forms = max(forms, _FORMS[kind])
        else:
            times, more = _growth(part, name)
            forms = forms if kind in _BETWEEN else 1.0
        factor, added = factor * times, added * times + more
        if factor > _MOST_GROWTH or added > _MOST_ADDED:
            raise TokenizerError(
                f"{where}: {name}: makes texts more than {_MOST_GROWTH} times as long, or {_MOST_ADDED} characters "
                "longer. Remedy: the tokenizer.json that was published with the model"
            )
    return factor, added


def _parts(value: dict[str, Any], name: str, where: str) -> Iterator[dict[str, Any]]:
    """The part of a section, and those of a sequence, in order; each has a known type."""
    key, known = _SECTIONS[name]
    left = [] if value.get(name) is None else [value[name]]
    for _ in range(_MOST_PARTS):
        if not left:
            return
        part = left.pop()
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in known.split():
            got = "the type" if isinstance(part, dict) else "the part"
            raise TokenizerError(
                f"{where}: {name}: got {got} {kind!r:.80}, expected one of {', '.join(known.split())}"
            )
        yield part
        if kind == "Sequence" and isinstance(part.get(key), list):
            left += reversed(part[key])
    if left:
        raise TokenizerError(f"{where}: {name}: has more than {_MOST_PARTS} parts, expected at most that")


def _growth(part: dict[str, Any], name: str) -> tuple[float, float]:
    """:func:`_bound` of one part."""
    kind = part["type"]
    if (
        name == "pre_tokenizer"
    ):  # a text can have been split between any two characters, and each piece gets a space
        return {"ByteLevel": 5, "Metaspace": 2}.get(kind, 1), 0
    if kind == "ByteLevel":
        return (4 if name == "normalizer" else 1), 0
    if kind == "BertNormalizer":
        return 3, 0  # spaces around a Chinese character, each time
    if kind == "Prepend":
        return 1, _length(part.get("prepend"))
    if kind == "Precompiled":
        return max(1, _longest(part.get("precompiled_charsmap"))), 0
    if kind == "WordPiece":
        return 1, 1
    if kind in ("BPEDecoder", "CTC"):  # a space in place of it: of nothing, between any two characters
        gone = part.get("suffix" if kind == "BPEDecoder" else "word_delimiter_token")
        return (1, 0) if _length(gone) else (2, 1)
    if kind == "Replace":
        pattern, content = part.get("pattern"), _length(part.get("content"))
        known = _length(pattern.get("String")) if isinstance(pattern, dict) else 0
        # An expression may match between any two characters.
        return (max(1.0, content / known), 0) if known else (1 + content, content)
    return 1, 0


def _longest(charsmap: Any) -> int:
    """Characters of the longest replacement of SentencePiece's table: a trie, then texts that end with a zero."""
    try:
        table = base64.b64decode(charsmap)
    except (TypeError, ValueError, binascii.Error):
        return 1  # the package refuses it
    texts = table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", "replace")
    return max(map(len, texts.split("\0")))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _tokens_added(part: dict[str, Any], where: str) -> int:
    """Tokens around a text. A template may not have the text itself several times.

    The package recognises a template by its keys.
    """
    count = 4  # of other kinds than templates
    for name, most in (("single", 1), ("pair", 2)):
        for piece in part[name] if isinstance(part.get(name), list) else ():
            kind, held = next(iter(piece.items())) if isinstance(piece, dict) and piece else (None, None)
            if kind == "Sequence":
                most -= 1
                continue
            special = part.get("special_tokens")
            token = held.get("id") if kind == "SpecialToken" and isinstance(held, dict) else None
            own = special.get(token) if isinstance(special, dict) and isinstance(token, str) else None
            if not isinstance(own, dict) or not isinstance(own.get("ids"), list):
                raise TokenizerError(
                    f"{where}: {name}: got {piece!r:.80}, expected a Sequence, or one of special_tokens with its ids"
                )
            count += len(own["ids"])
        if most < 0:
            raise TokenizerError(
                f"{where}: {name}: has a text more than once, expected "
                f"{'Sequence A' if name == 'single' else 'Sequence A and Sequence B'} once"
            )
    return count


def _tokens(value: dict[str, Any], model: Any) -> Iterator[Any]:
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab
    elif isinstance(vocab, list):
        yield from (one[0] for one in vocab if isinstance(one, list) and one)
    added = value.get("added_tokens")
    if isinstance(added, list):
        yield from (one.get("content") for one in added if isinstance(one, dict))
