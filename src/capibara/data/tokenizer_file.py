"""Tokenizers of published models: ``tokenizer.json``, through the package ``tokenizers``, and the files beside it.

A folder's files are untrusted: sizes are bounded before they are read, JSON is checked, and a chat template runs in a
process of its own (:mod:`capibara.data.chat`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capibara.data.chat import Rendered, render_chat, render_chats
from capibara.data.errors import ChatTemplateError, TokenizerError
from capibara.data.tokenizer_limits import check_limits
from capibara.data.tokens import TextStream, bytes_of
from capibara.errors import MissingExtraError, printable
from capibara.files import read_bounded

__all__ = [
    "CONFIG_FILE",
    "TOKENIZER",
    "TOKENIZER_FILES",
    "FileTokenizer",
    "byte_tokenizer_files",
    "load_tokenizer",
    "read_tokenizer_files",
]

TOKENIZER = "tokenizer.json"
CONFIG_FILE = "config.json"
_SETTINGS, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
TOKENIZER_FILES = {
    TOKENIZER: 256 << 20,
    _SETTINGS: 64 << 20,
    "special_tokens_map.json": 16 << 20,
    "added_tokens.json": 16 << 20,
    _TEMPLATE: 1 << 20,
    _GENERATION: 1 << 20,
    CONFIG_FILE: 16 << 20,  # which tokens end a text, where no other file says so
}
"""The files of a tokenizer, and the most bytes of each."""

_AGAIN = "Remedy: the file as it was published with the model"
_MAX_ID = 1 << 24
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A character has at most four bytes, so that this many tokens without a complete one are not text.
_MOST_HELD = 64


def read_tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Name → content of the tokenizer's files in a folder; nothing if it has no ``tokenizer.json``.

    Raises:
      TokenizerError: a file is too large, or cannot be read.
    """
    files = {}
    for name, most in TOKENIZER_FILES.items():
        path = Path(folder) / name
        try:
            files[name] = read_bounded(path, most)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TokenizerError(f"{path}: {reason}. {_AGAIN}") from None
    return files if TOKENIZER in files else {}


def load_tokenizer(folder: str | os.PathLike[str]) -> FileTokenizer:
    """Read the tokenizer of a folder.

    Args:
      folder: of a published model, or one that ``capibara tokenizer train`` wrote.

    Raises:
      TokenizerError: there is none, or a file is damaged or too large.
      MissingExtraError: the package ``tokenizers`` is not installed.
    """
    files = read_tokenizer_files(folder)
    if not files:
        old = [n for n in ("tokenizer.model", "vocab.json", "vocab.txt") if (Path(folder) / n).is_file()]
        found = f", but {old[0]}, an older format" if old else ""
        raise TokenizerError(
            f"{folder}: has no {TOKENIZER}{found}. Remedy: write one with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(other)"
        )
    return FileTokenizer(files, folder)


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for the bytes: those that print are themselves, the others follow 255."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printed]
    return {chr(value): value for value in printed} | {chr(256 + n): value for n, value in enumerate(others)}


def byte_tokenizer_files() -> dict[str, bytes]:
    """The files of a tokenizer whose tokens are bytes, for other programs."""
    vocab = _byte_characters()  # BPE without merges
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": dict(sorted(vocab.items(), key=lambda one: one[1])), "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        name: (json.dumps(value, indent=2) + "\n").encode()
        for name, value in ((TOKENIZER, tokenizer), (_SETTINGS, settings))
    }


class FileTokenizer:
    """A published model's tokenizer.

    Args:
      files: name → content, of :data:`TOKENIZER_FILES`; ``tokenizer.json`` at least.
      where: its place, for messages.

    Attributes:
      files: as given. vocab_size: one more than the largest token id. stop_tokens: the ids that end a text.
      end_token: the one that follows a document in training.
      special_tokens: ``"bos_token"`` … → text.

    Raises:
      TokenizerError: a file is damaged.
      MissingExtraError: the package ``tokenizers`` is not installed.
    """

    def __init__(self, files: Mapping[str, bytes], where: object = "tokenizer") -> None:
        self.files = dict(files)
        self._where = where
        self._settings = self._json(_SETTINGS)
        self._tokenizer = _parse(files[TOKENIZER], where)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids or max(ids) >= _MAX_ID:
            raise TokenizerError(
                f"{where}: {TOKENIZER} has {'no tokens' if not ids else f'the token id {max(ids)}'}, expected ids "
                f"from 0 to {_MAX_ID - 1}"
            )
        self.vocab_size = max(ids) + 1
        self.special_tokens = self._special_tokens()
        self.end_token: int | None = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        self.stop_tokens = self._stop_tokens()

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """The token ids of a text: int32 ``[tokens]``. An empty text becomes the token that begins or ends texts.

        Args:
          text: any text; bytes of the command line that were not UTF-8 become U+FFFD.
          special: add the tokens that the model expects around a text, such as one for its beginning. A text that
            came out of a chat template has them already.
        """
        ids = self._encode(text, special)
        begin = self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        if (
            special
            and begin is not None
            and self._settings.get("add_bos_token") is True
            and ids[:1] != [begin]
        ):
            ids = [begin, *ids]
        if special and not ids:  # there has to be something to continue
            first = self.end_token if begin is None else begin
            ids = [] if first is None else [first]
        return np.asarray(ids, np.int32)

    def encode_batch(self, texts: Sequence[str], *, most: int | None = None) -> list[np.ndarray]:
        """The token ids of each text, int32 ``[tokens]``, with those that the model expects around it.

        Args:
          texts: any texts, on several threads.
          most: tokens of a text; what is beyond loses its end, but not the tokens around it. None: all.

        Raises:
          TokenizerError: ``most`` leaves no place for a token of the text.
        """
        add = self._tokenizer.num_special_tokens_to_add(False)
        if most is not None and most <= add:
            raise TokenizerError(
                f"most={most}: {self._where} puts {add} tokens around a text, expected at least {add + 1}"
            )

        def compute() -> list[Any]:
            found = self._tokenizer.encode_batch(list(map(_clean, texts)), add_special_tokens=False)
            for one in found if most is not None else ():
                one.truncate(most - add)
            return [self._tokenizer.post_process(one) for one in found]

        return [np.asarray(one.ids, np.int32) for one in _guarded(self._where, compute)]

    def _encode(self, text: str, special: bool) -> list[int]:
        clean = _clean(text)
        return _guarded(self._where, lambda: self._tokenizer.encode(clean, add_special_tokens=special).ids)

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of a text that a chat template made, int32 ``[tokens]``, and where in it each begins."""
        found = _guarded(self._where, lambda: self._tokenizer.encode(text, add_special_tokens=False))
        starts = np.asarray([first for first, _ in found.offsets], np.int64)
        return np.asarray(found.ids, np.int32), starts

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """The text of token ids; ids without a token give nothing."""
        ids = [int(token) for token in tokens]
        return _guarded(self._where, lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def stream(self) -> TextStream:
        """A decoder of tokens that arrive one by one."""
        return _TokenStream(self.decode)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text in UTF-8, which may be part of a character; empty for ids without a token."""
        piece, kinds = self._tokenizer.id_to_token(token), self._decoders
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if "ByteLevel" in kinds and all(one in self._characters for one in piece):
            return bytes(self._characters[one] for one in piece)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        if kinds & {"Metaspace", "Replace"}:
            return piece.replace("\u2581", " ").encode()
        return self.decode([token], skip_special=False).encode()

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        """The ids of tokens that are no pieces of words."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @functools.cached_property
    def _characters(self) -> dict[str, int]:
        return _byte_characters()

    @functools.cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps that make a text of tokens."""
        decoder = self._json(TOKENIZER).get("decoder") or {}
        return frozenset(one["type"] for one in [decoder, *decoder.get("decoders", [])] if "type" in one)

    @property
    def template(self) -> str | None:
        """The chat template, if there is one."""
        if _TEMPLATE in self.files:
            try:
                return self.files[_TEMPLATE].decode()
            except UnicodeDecodeError as error:
                raise ChatTemplateError(f"{self._where}: {_TEMPLATE} is not UTF-8: {error.reason}") from None
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any) -> str:
        """A conversation as one text, as ``apply_chat_template`` of transformers gives it.

        Args:
          messages: ``[{"role": "user", "content": "…"}, …]``.
          generate: end with the beginning of an answer (``add_generation_prompt``).
          variables: others that the template reads, such as ``tools``.

        Raises:
          ChatTemplateError: there is no template, it refuses the messages, or it exceeds its limits.
        """
        with self._naming():
            return render_chat(self._needed_template, self._given(messages, generate, **variables))

    def chats(self, several: Sequence[tuple[Sequence[Mapping[str, Any]], bool]]) -> list[Rendered]:
        """Conversations, each with whether it ends with the beginning of an answer, as :meth:`chat`."""
        given = [self._given(messages, generate) for messages, generate in several]
        with self._naming():
            return render_chats(self._needed_template, given)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors say whose template it is."""
        try:
            yield
        except ChatTemplateError as error:
            if str(error).startswith("chat template:"):
                raise ChatTemplateError(f"{self._where}: {error}", error.number) from None
            raise

    @property
    def _needed_template(self) -> str:
        if (template := self.template) is None:
            raise ChatTemplateError(
                f"chat: {self._where} has no chat template. Give a prompt instead of messages (--prompt, "
                "/v1/completions), or take the folder of a model for conversations"
            )
        return template

    def _given(
        self, messages: Sequence[Mapping[str, Any]], generate: bool, **variables: Any
    ) -> dict[str, Any]:
        return {
            **self.special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": generate,
            **variables,
        }

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{self._where}: {name} is not JSON ({error!s:.200}). {_AGAIN}") from None
        if not isinstance(value, dict):
            raise TokenizerError(f"{self._where}: {name} holds {type(value).__name__}, expected an object")
        return value

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for source in (self._json("special_tokens_map.json"), self._settings):
            for key in _SPECIAL:
                value = source.get(key)
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    _guarded(f"{self._where}: {key}", value.encode)  # JSON can hold half of a character
                    found[key] = value
        return found

    def _stop_tokens(self) -> frozenset[int]:
        for name in (_GENERATION, CONFIG_FILE):
            given = self._json(name).get("eos_token_id")
            ids = given if isinstance(given, list) else [given]
            valid = [one for one in ids if isinstance(one, int) and 0 <= one < _MAX_ID]
            if valid and valid == ids:
                return frozenset(valid)
        return frozenset() if self.end_token is None else frozenset({self.end_token})


class _TokenStream:
    """What has not been given out is decoded with the tokens before it: a token's text depends on them."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._held: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        self._held.append(token)
        fresh = self._fresh()
        # An incomplete character at the end is U+FFFD.
        whole = fresh.rstrip("\ufffd")
        incomplete = len(whole) < len(fresh) and len(self._held) < _MOST_HELD
        text = whole if incomplete else fresh
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        if not incomplete:
            self._advance()
        return piece

    def finish(self) -> str:
        rest = self._fresh()[self._sent :]
        self._advance()
        return rest

    def _fresh(self) -> str:
        return self._decode([*self._before, *self._held])[len(self._decode(self._before)) :]

    def _advance(self) -> None:
        # Tokens without text (special ones) are not context for those after them.
        if self._fresh():
            self._before = self._held
        self._held, self._sent = [], 0


def _clean(text: str) -> str:
    """Text whose halves of characters, and bytes of the command line that were not UTF-8, are U+FFFD."""
    return bytes_of(text).decode("utf-8", "replace")


@functools.cache
def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "tokenizers":
            raise
        raise MissingExtraError("tokenizers", "text", f"reading {TOKENIZER}") from None
    return tokenizers


def _parse(content: bytes, where: object) -> Any:
    library = _library()
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError(f"holds {type(value).__name__}, expected an object")
        text = content.decode()
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{where}: {TOKENIZER} is not valid: {error!s:.200}. {_AGAIN}") from None
    check_limits(value, f"{where}: {TOKENIZER}")
    tokenizer = _guarded(f"{where}: {TOKENIZER}", lambda: library.Tokenizer.from_str(text))
    # A text is encoded whole: cutting it to a length is the caller's decision.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _guarded(where: object, compute: Callable[[], Any]) -> Any:
    """What the package computes; it raises plain exceptions, and panics, which are not Exceptions."""
    try:
        return compute()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{where}: {type(error).__name__}: {printable(error, 300)}. {_AGAIN}") from None
