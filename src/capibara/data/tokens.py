"""What every tokenizer does, and the one that needs no file: a token is a byte."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from capibara.data.chat import Rendered
from capibara.data.errors import ChatTemplateError

__all__ = [
    "BYTE_VALUES",
    "ByteTokenizer",
    "TextStream",
    "Tokenizer",
    "Utf8Stream",
    "bytes_of",
    "decode_stream",
]

BYTE_VALUES = 256
_NO_TEMPLATE = (
    "chat: the tokenizer is bytes, without a chat template. Use prompts, or a model whose folder has one"
)


class TextStream(Protocol):
    """Decodes tokens one by one; a character is held back until it is complete."""

    def push(self, token: int, /) -> str:
        """Add a token; return the characters that are now complete."""
        ...

    def finish(self) -> str:
        """Return what was held back, with U+FFFD in place of an incomplete character."""
        ...


# Surrogates but for those that Python has in the place of bytes that are not UTF-8.
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def bytes_of(text: str) -> bytes:
    """A text in UTF-8: halves of characters become U+FFFD, bytes of the command line that were not UTF-8 come back."""
    return _HALVES.sub("\ufffd", text).encode("utf-8", "surrogateescape")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The token ids that end a text."""
        ...

    @property
    def end_token(self) -> int | None:
        """The token id that follows a document in training, if there is one."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Name → content of the files that it is read from."""
        ...

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """The token ids of a text ``[tokens]``; with ``special`` also those that the model expects around it."""
        ...

    def encode_batch(self, texts: Sequence[str], *, most: int | None = None) -> list[np.ndarray]:
        """The token ids of each text, with those around it, at most so many."""
        ...

    def stream(self) -> TextStream:
        """A decoder of tokens that arrive one by one."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text in UTF-8, which may be part of a character."""
        ...

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of a text that a chat template made, and the character where each begins."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any) -> str:
        """A conversation as one text, through the chat template."""
        ...

    def chats(self, several: Sequence[tuple[Sequence[Mapping[str, Any]], bool]]) -> list[Rendered]:
        """Conversations, each with whether it ends with the beginning of an answer, through the chat template."""
        ...


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they arrive, in whole characters."""
    stream = tokenizer.stream()
    for token in tokens:
        if piece := stream.push(token):
            yield piece
    if piece := stream.finish():
        yield piece


class Utf8Stream:
    """Decodes bytes incrementally, holding back a character until all its bytes have arrived.

    Invalid UTF-8 becomes U+FFFD, as in ``bytes.decode(errors="replace")``.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Add bytes; return the characters that are now complete."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the remainder: U+FFFD if the text ended within a character, otherwise an empty string."""
        return self._decoder.decode(b"", final=True)


class _ByteStream(Utf8Stream):
    def push(self, data: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().push(bytes([data]))


class ByteTokenizer:
    """A token is a byte of the text's UTF-8 form: nothing to train, ship or lose."""

    vocab_size = BYTE_VALUES
    stop_tokens: frozenset[int] = frozenset()
    end_token: int | None = None
    files: Mapping[str, bytes] = {}

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """uint8 ``[bytes]``. An empty text becomes a line break, so that there is something to continue."""
        del special
        return np.frombuffer(bytes_of(text) or b"\n", np.uint8)

    def encode_batch(self, texts: Sequence[str], *, most: int | None = None) -> list[np.ndarray]:
        """The bytes of each text, at most so many."""
        return [self.encode(text)[:most] for text in texts]

    def stream(self) -> TextStream:
        """A decoder of bytes that arrive one by one."""
        return _ByteStream()

    def token_bytes(self, token: int) -> bytes:
        """The byte; empty for ids that are none."""
        return bytes([token]) if token < BYTE_VALUES else b""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any) -> str:
        """Not possible: bytes have no chat template.

        Raises:
          ChatTemplateError: always.
        """
        raise ChatTemplateError(_NO_TEMPLATE)

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of a text, and the character that each belongs to."""
        data = self.encode(text)
        return data, np.cumsum((data & 0xC0) != 0x80) - 1

    def chats(self, several: Sequence[tuple[Sequence[Mapping[str, Any]], bool]]) -> list[Rendered]:
        """Not possible, as :meth:`chat`."""
        raise ChatTemplateError(_NO_TEMPLATE)
