"""Documents in memory, in tokens: what a source of records becomes before it is packed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from capibara.data.conversations import Example
from capibara.data.errors import DocumentError

__all__ = ["Documents"]


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source.

    Attributes:
      name: of the source, for messages.
      tokens: ids of all, one document after another, ``[n]``.
      answers: bool ``[n]``: the tokens to be learnt; None: all.
      starts: int64 ``[count + 1]``: where each begins, and the end.
      size: bytes of their text.
      digest: SHA-256 over all of it, in hexadecimal.
    """

    name: str
    tokens: np.ndarray
    answers: np.ndarray | None
    starts: np.ndarray
    size: int
    digest: str

    @classmethod
    def of(
        cls,
        name: str,
        examples: Iterable[Example],
        *,
        most_bytes: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Documents:
        """Take documents into memory; those of fewer than two tokens, in which nothing can be predicted, are left out.

        Args:
          name: of the source. most_bytes: refuse more text than this.
          progress: called with the bytes of each document.

        Raises:
          DocumentError: there is no document, or too much text.
        """
        parts: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        lengths, size, marked = [0], 0, False
        for example in examples:
            size += example.size
            if most_bytes is not None and size > most_bytes:
                raise DocumentError(
                    f"{name}: has more than {most_bytes:,} bytes of text, the limit for tokens held in memory. "
                    "Give less text"
                )
            if progress is not None:
                progress(example.size)
            if example.tokens.size < 2 or not (example.answers is None or example.answers[1:].any()):
                continue
            parts.append(example.tokens.astype(np.int32))
            marked |= example.answers is not None
            answers.append(np.ones(example.tokens.size, bool) if example.answers is None else example.answers)
            lengths.append(example.tokens.size)
        if not parts:
            raise DocumentError(f"{name}: contains no document with at least two tokens to train on")
        tokens, counted = np.concatenate(parts), np.concatenate(answers) if marked else None
        starts = np.cumsum(lengths, dtype=np.int64)
        digest = hashlib.sha256()
        for array in (starts, tokens, counted):
            if array is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
        return cls(name, tokens, counted, starts, size, digest.hexdigest())

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each: int64 ``[count]``."""
        return np.diff(self.starts)
