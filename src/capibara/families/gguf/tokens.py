"""Tokenizers in GGUF files: ``tokenizer.json`` ↔ llama.cpp's vocabulary, merges and kinds of tokens.

llama.cpp has two forms of byte-pair encoding: ``gpt2``, whose tokens are bytes in GPT-2's characters, merged in the
order of a list; and ``llama``, SentencePiece's, whose tokens have scores: the pair with the highest goes first. How a
text is split before that is known by a name. A file that has ``tokenizer.huggingface.json``, as those
written here, is read with that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.data import FileTokenizer
from capibara.data.tokenizer_file import TOKENIZER
from capibara.errors import printable
from capibara.families.errors import FamilyError
from capibara.families.gguf.file import GgufFile
from capibara.families.gguf.metadata import value_of

__all__ = ["gguf_tokenizer_files", "tokenizer_metadata"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_LONGEST = 128  # characters of a token that pairs are looked for in
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's names for how a text is split; None: as GPT-2 does, a part of ByteLevel. The first of a kind is written.
_CUTS: dict[str, str | None] = {
    "gpt-2": None,
    "gpt2": None,
    "dbrx": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is not merged
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(files: Mapping[str, bytes], vocab_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of a file for a tokenizer's files, and notes.

    Args:
      files: name → content; may be empty. vocab_size: rows of the embedding table.

    Raises:
      FamilyError: llama.cpp has no such tokenizers.
      TokenizerError: a file is damaged.
    """
    if not files:
        return {"tokenizer.ggml.model": "none"}, ("it has no tokenizer",)
    tokenizer = FileTokenizer(files)
    parsed = json.loads(files[TOKENIZER])
    model = parsed.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise FamilyError(
            f"tokenizer.json: got a model of type {model.get('type')!r:.40}, expected BPE for GGUF"
        )
    added = parsed.get("added_tokens") or []
    tokens, kinds = _tokens(model, added, max(vocab_size, tokenizer.vocab_size))
    if tokenizer.vocab_size > vocab_size:
        raise FamilyError(
            f"tokenizer.json has token id {tokenizer.vocab_size - 1}, expected ids below vocab_size = {vocab_size}"
        )
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or []]
    found: dict[str, Any] = {}
    if _has(parsed.get("decoder"), "ByteLevel"):
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _cut_name(parsed, merges)}
        if merges:
            found["tokenizer.ggml.merges"] = merges
    elif model.get("byte_fallback"):
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        ranks = {"".join(one.split(" ", 1)): rank for rank, one in reversed(list(enumerate(merges)))}
        found["tokenizer.ggml.scores"] = [float(-1 - ranks.get(token, len(merges))) for token in tokens]
        found["tokenizer.ggml.add_space_prefix"] = _prepends(parsed)
        kinds = [
            _UNKNOWN if token == model.get("unk_token") else _BYTE if _is_byte(token) else kind
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    else:
        raise FamilyError(
            "tokenizer.json: expected a decoder ByteLevel, or byte_fallback, as llama.cpp's tokenizers have"
        )
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    ids: dict[str, int] = {token: place for place, token in enumerate(tokens)}
    for name, theirs in _SPECIAL.items():
        if (place := ids.get(tokenizer.special_tokens.get(name, ""))) is not None:
            found[f"tokenizer.ggml.{theirs}_token_id"] = place
    encoded = tokenizer.encode("a").tolist()
    for name, place in (("bos", 0), ("eos", -1)):
        own = found.get(f"tokenizer.ggml.{name}_token_id")
        found[f"tokenizer.ggml.add_{name}_token"] = own is not None and encoded[place] == own
    if tokenizer.template is not None:
        found["tokenizer.chat_template"] = tokenizer.template
    found["tokenizer.huggingface.json"] = files[TOKENIZER].decode()
    return found, ()


def _tokens(model: Mapping[str, Any], added: list[Any], count: int) -> tuple[list[str], list[int]]:
    """The tokens by their ids, and their kinds."""
    tokens = [f"[PAD{place}]" for place in range(count)]
    kinds = [_UNUSED] * count
    for token, place in (model.get("vocab") or {}).items():
        tokens[place], kinds[place] = token, _NORMAL
    for one in added:
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = _CONTROL if one.get("special") else _USER_DEFINED
    return tokens, kinds


def _has(part: Any, kind: str) -> bool:
    """Whether a normalizer, decoder … of a ``tokenizer.json`` is, or contains, one of this type."""
    return any(one.get("type") == kind for one in _members(part))


def _members(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    for key in ("pretokenizers", "normalizers", "decoders"):
        if isinstance(part.get(key), list):
            return [one for inner in part[key] for one in _members(inner)]
    return [part]


def _prepends(parsed: Mapping[str, Any]) -> bool:
    spaces = [one for one in _members(parsed.get("pre_tokenizer")) if one.get("type") == "Metaspace"]
    return _has(parsed.get("normalizer"), "Prepend") or any(
        one.get("prepend_scheme", "always") != "never" for one in spaces
    )


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _cut_name(parsed: Mapping[str, Any], merges: list[str]) -> str:
    """llama.cpp's name for how a text is cut before it is merged."""
    cuts = _members(parsed.get("pre_tokenizer"))
    split = [one for one in cuts if one.get("type") == "Split"]
    level = [one for one in cuts if one.get("type") == "ByteLevel"]
    if not merges:
        return "gpt-2"  # where nothing is merged, cutting changes nothing
    regex = None
    if len(cuts) == len(split) + len(level) and len(split) <= 1 and len(level) == 1:
        if split and not level[0].get("use_regex", True):
            pattern = split[0].get("pattern") or {}
            regex = pattern.get("Regex") if split[0].get("behavior") == "Isolated" else None
        elif not split and level[0].get("use_regex", True) and not level[0].get("add_prefix_space"):
            return "gpt-2"
    whole = bool((parsed.get("model") or {}).get("ignore_merges"))
    for name, known in _CUTS.items():
        if regex is not None and known == regex and (name in _WHOLE_WORDS) == whole:
            return name
    raise FamilyError(
        f"tokenizer.json: pre_tokenizer: got one that llama.cpp has no name for here ({str(regex or cuts)!s:.200}). "
        "Remedy: another format, such as compressed-tensors"
    )


def gguf_tokenizer_files(path: str | os.PathLike[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a GGUF file's tokenizer, name → content, and notes; no files if it has none that is known here.

    Raises:
      FamilyError: not a GGUF file, or a damaged one.
    """
    with GgufFile(path) as file:
        metadata = file.metadata
    tokens = value_of(metadata, "tokenizer.ggml.tokens", list, path)
    if not tokens:
        return {}, ("it has no tokenizer",)
    kind, cut = (value_of(metadata, f"tokenizer.ggml.{key}", str, path) for key in ("model", "pre"))
    content = value_of(metadata, "tokenizer.huggingface.json", str, path)
    if content is None:
        if kind == "llama":
            built = _sentencepiece(metadata, tokens, path)
        elif kind == "gpt2" and cut is not None and cut in _CUTS:
            built = _byte_level(metadata, tokens, cut, path)
        else:
            shown = ", ".join(printable(one, 40) for one in (kind, cut))
            return {}, (f"its tokenizer ({shown}) is not known here and left out",)
        content = json.dumps(built, ensure_ascii=False)
    files = {TOKENIZER: content.encode("utf-8", "replace")}
    special = {name: _special(metadata, tokens, theirs, path) for name, theirs in _SPECIAL.items()}
    settings: dict[str, Any] = {name: tokens[place] for name, place in special.items() if place is not None}
    begins = value_of(metadata, "tokenizer.ggml.add_bos_token", bool, path)
    begins = kind == "llama" if begins is None else begins
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins}
    if (template := value_of(metadata, "tokenizer.chat_template", str, path)) is not None:
        settings["chat_template"] = template
    ends = [special["eos_token"], _special(metadata, tokens, "eot", path)]
    generation = {"eos_token_id": list(dict.fromkeys(one for one in ends if one is not None))}
    for name, value in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        files[name] = (json.dumps(value, indent=2) + "\n").encode()
    return files, ()


def _special(metadata: Mapping[str, Any], tokens: list[str], name: str, where: object) -> int | None:
    place = value_of(metadata, f"tokenizer.ggml.{name}_token_id", int, where)
    return place if place is not None and 0 <= place < len(tokens) else None


def _vocabulary(
    metadata: Mapping[str, Any], tokens: list[str], where: object
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Token → id, and the tokens that are found before anything is merged."""
    kinds = value_of(metadata, "tokenizer.ggml.token_type", np.ndarray, where)
    kinds = np.full(len(tokens), _NORMAL) if kinds is None else kinds
    if len(kinds) != len(tokens):
        raise FamilyError(
            f"{where}: tokenizer.ggml.token_type: expected {len(tokens)} integers, one for each token"
        )
    vocab: dict[str, int] = {}
    added = []
    for place, (token, kind) in enumerate(zip(tokens, kinds.tolist(), strict=True)):
        if kind == _UNUSED:
            continue
        if token in vocab:
            raise FamilyError(f"{where}: tokenizer.ggml.tokens: {token!r:.80} is there twice")
        vocab[token] = place
        if kind in (_CONTROL, _USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": place, "content": token, "special": kind == _CONTROL, **flags})
    return vocab, added


def _pairs(metadata: Mapping[str, Any], vocab: Mapping[str, int], where: object) -> list[list[str]] | None:
    """The merges that a file has, each as two tokens."""
    merges = value_of(metadata, "tokenizer.ggml.merges", list, where)
    if merges is None:
        return None
    found = [one.split(" ") for one in merges]
    if not all(len(one) == 2 and {*one, "".join(one)} <= vocab.keys() for one in found):
        raise FamilyError(
            f"{where}: tokenizer.ggml.merges: expected pairs of tokens whose concatenation is a token"
        )
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], cut: str, where: object) -> dict[str, Any]:
    vocab, added = _vocabulary(metadata, tokens, where)
    regex = _CUTS[cut]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex is None}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if regex == _QWEN2 else None,
        "pre_tokenizer": level if regex is None else {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _pairs(metadata, vocab, where) or [],
            "ignore_merges": cut in _WHOLE_WORDS,
        },
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], where: object) -> dict[str, Any]:
    gemma = (value_of(metadata, "general.architecture", str, where) or "").startswith("gemma")
    if gemma:  # its runs of spaces may be stored as such
        tokens = [_SPACE * len(one) if one and not one.strip(" ") else one for one in tokens]
    vocab, added = _vocabulary(metadata, tokens, where)
    merges = _pairs(metadata, vocab, where)
    if merges is None:
        scores = value_of(metadata, "tokenizer.ggml.scores", np.ndarray, where)
        if scores is None or len(scores) != len(tokens):
            raise FamilyError(
                f"{where}: tokenizer.ggml.scores: expected {len(tokens)} numbers, one for each token"
            )
        # Gemma's scores do not follow the order of its merges; its ids do.
        merges = _implied(vocab, -np.arange(len(tokens), dtype=np.float64) if gemma else scores)
    prefix = value_of(metadata, "tokenizer.ggml.add_space_prefix", bool, where)
    prefix = not gemma if prefix is None else prefix
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] * prefix + [spaced]
    back = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
    back += [{"type": "Fuse"}]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special(metadata, tokens, "unknown", where)
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _implied(vocab: Mapping[str, int], scores: np.ndarray) -> list[list[str]]:
    """Pairs of tokens that are a token, those of the highest score first."""
    found = []
    for token, place in vocab.items():
        if len(token) > _LONGEST:
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(vocab[a], vocab[b], [a, b]) for a, b in halves if a in vocab and b in vocab]
        found += [(-float(scores[place]), *one) for one in sorted(pairs, key=lambda one: one[:2])]
    found.sort(key=lambda one: one[0])
    return [one[-1] for one in found]
