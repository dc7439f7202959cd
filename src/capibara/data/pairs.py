"""Preferences: a prompt with a chosen and a rejected answer, as one row with two segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.data.batches import Batch, endless_order
from capibara.data.conversations import Example, examples_of
from capibara.data.errors import DocumentError
from capibara.data.tokens import Tokenizer

__all__ = ["Pair", "PairedBatches", "is_pair", "pair_rows", "pairs_of"]

Pair = tuple[Example, Example]
"""The prompt with the chosen answer, and with the rejected one."""


def is_pair(record: Mapping[str, Any]) -> bool:
    """Whether a record is a preference."""
    return "chosen" in record and "rejected" in record


def pairs_of(records: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: Tokenizer) -> list[Pair]:
    """The pairs of records with ``prompt``, ``chosen`` and ``rejected``: strings, or lists of messages.

    Without ``prompt``, ``chosen`` and ``rejected`` are whole conversations, of which the last answers count.

    Raises:
      DocumentError, ChatTemplateError: as :func:`capibara.data.examples_of`.
    """
    both = []
    for where, record in records:
        if not is_pair(record):
            raise DocumentError(
                f"{where} has the keys {sorted(record)!s:.200}, expected 'prompt', 'chosen' and 'rejected'"
            )
        for key in ("chosen", "rejected"):
            answer = record[key]
            if isinstance(answer, list) and "prompt" not in record:
                parts = {"prompt": answer[:-1], "completion": answer[-1:]}
            elif isinstance(answer, list) and isinstance(record.get("prompt"), str):
                parts = {"prompt": [{"role": "user", "content": record["prompt"]}], "completion": answer}
            else:
                parts = {"prompt": record.get("prompt", ""), "completion": answer}
            both.append((f"{where}: {key}", parts))
    found = list(examples_of(both, tokenizer))
    return list(zip(found[::2], found[1::2], strict=True))


class PairedBatches:
    """An endless sequence of batches of pairs: a pure function of the step, for any number of readers.

    Args:
      pairs: of them those that are used. batch_size: pairs of a batch.
      sequence_length: positions of a row, which holds both answers with their prompts; each has half of it, and what is
        longer loses its end.
      seed: of the order, 0 to 2^32 - 1.

    Attributes:
      reference: float32 ``[pairs, 2]``, what the batches have under ``"reference"``, once it is set.

    Raises:
      DocumentError: there are no pairs, or no answer is left of one that is cut.
      MissingExtraError: the package ``grain`` is not installed.
    """

    def __init__(
        self, pairs: Sequence[Pair], *, batch_size: int, sequence_length: int, seed: int = 0
    ) -> None:
        if not pairs:
            raise DocumentError("pairs: expected at least one")
        self.pairs, self.batch_size, self.sequence_length = list(pairs), batch_size, sequence_length
        self.reference: np.ndarray | None = None
        half = (sequence_length + 1) // 2
        for number, pair in enumerate(pairs):
            if not all(one.answers is not None and one.answers[1:half].any() for one in pair):
                raise DocumentError(
                    f"pair {number + 1}: {half} tokens, half of a row, leave no room for an answer after the prompt. "
                    "Raise train.sequence_length, or leave the pair out"
                )
        self._order = endless_order([len(pairs)], None, seed)

    def passes(self, step: int) -> float:
        """How often the pairs were read before a step."""
        return step * self.batch_size / len(self.pairs)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0, as :func:`pair_rows` gives it, and ``reference`` if it is set."""
        first = step * self.batch_size
        numbers = [self._order[place][1] for place in range(first, first + self.batch_size)]
        batch = pair_rows([self.pairs[number] for number in numbers], self.sequence_length)
        return batch if self.reference is None else {**batch, "reference": self.reference[numbers]}


def pair_rows(pairs: Sequence[Pair], sequence_length: int) -> Batch:
    """Rows ``[pairs, sequence_length + 1]``: ``tokens``, ``segments`` (1 chosen, 2 rejected, 0 padding), ``positions``
    and ``weights`` (1 on answers).
    """
    shape = len(pairs), sequence_length + 1
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    half = (sequence_length + 1) // 2
    for row, pair in enumerate(pairs):
        end = 0
        for number, one in enumerate(pair, start=1):
            count = min(half, one.tokens.size)
            here = slice(end, end + count)
            tokens[row, here], segments[row, here] = one.tokens[:count], number
            positions[row, here] = np.arange(count)
            weights[row, here] = 1.0 if one.answers is None else one.answers[:count]
            weights[row, end] = 0
            end += count
    return {"tokens": tokens, "segments": segments, "positions": positions, "weights": weights}
