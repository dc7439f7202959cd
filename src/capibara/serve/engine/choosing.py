"""The tokens that follow a step's logits, by what each text asks for."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from capibara.serve.engine.programs import MOST_SCORES, Programs, no_changes
from capibara.serve.engine.sequences import Sequence
from capibara.serve.engine.several import Written
from capibara.serve.requests import RequestError, TokenScore
from capibara.serve.row_sampling import Changes, Chosen, rows_of
from capibara.serve.sampling import GREEDY

__all__ = ["Asked", "Choice", "choose_tokens", "start_choice"]


class Asked(NamedTuple):
    """A token that is asked for.

    Attributes:
      place: of its logits. sequence: the text. after: the tokens that are taken to follow the text before this one.
    """

    place: int
    sequence: Sequence
    after: tuple[int, ...] = ()

    @property
    def written(self) -> int:
        """How many tokens of the text were generated before it."""
        return self.sequence.written + len(self.after)


def choose_tokens(
    programs: Programs, logits: Any, asked: Row[Asked], vocabulary: int
) -> list[tuple[int, TokenScore | None]]:
    """A token, and its score if the request wants it, for each that is asked for.

    The token is -1 where the grammar does not go on after ``after``. What cannot be chosen otherwise is in
    ``sequence.failure`` afterwards.
    """
    return start_choice(programs, logits, asked, vocabulary).read()


@dataclass(frozen=True)
class Choice:
    """Tokens that the device chooses.

    Attributes:
      chosen: one for each place of some logits; those of places that nobody asks for mean nothing. Without scores where
        no request wants any.
      asked: what is asked for. ended: the places where nothing may follow.
    """

    chosen: Chosen
    asked: Row[Asked]
    ended: frozenset[int]

    def read(self) -> list[tuple[int, TokenScore | None]]:
        """Wait for them: as :func:`choose_tokens`."""
        arrays: list[Any] = [None if array is None else np.asarray(array) for array in self.chosen]
        tokens, logprobs, top_tokens, top_logprobs = arrays
        found: list[tuple[int, TokenScore | None]] = []
        for place, sequence, _ in self.asked:
            if place in self.ended:
                found.append((-1, None))
                continue
            score = None
            if (number := sequence.request.logprobs) is not None:
                likeliest = zip(top_tokens[place, :number], top_logprobs[place, :number], strict=True)
                top = tuple((int(t), float(p)) for t, p in likeliest)
                score = TokenScore(int(tokens[place]), float(logprobs[place]), top)
            found.append((int(tokens[place]), score))
        return found


def start_choice(
    programs: Programs, logits: Any, asked: Row[Asked], vocabulary: int, *, written: Written | None = None
) -> Choice:
    """As :func:`choose_tokens`, without waiting for the tokens.

    Args:
      written: what the program of the step has chosen.
    """
    if written is not None and all(one.sequence.is_plain for one in asked):
        return Choice(Chosen(written.last, None, None, None), asked, frozenset())
    size = logits.shape[0]
    by_place: list[Asked | None] = [None] * size
    for one in asked:
        by_place[one.place] = one
    settings = rows_of(
        [one.sequence.request.sampling if one else GREEDY for one in by_place],
        [one.sequence.seed if one else 0 for one in by_place],
        [one.written if one else 0 for one in by_place],
    )
    changed = [one if one is not None and one.sequence.changes_logits else None for one in by_place]
    changes, ended = None, frozenset[int]()
    if any(changed):
        changes, ended = _changes(changed, vocabulary, programs.writable)
    wanted = any(one.sequence.request.logprobs is not None for one in asked)
    chosen = programs.choose(logits, settings, changes, top=MOST_SCORES if wanted else 0)
    return Choice(chosen, asked, ended)


def _changes(asked: Row[Asked | None], vocabulary: int, writable: int) -> tuple[Changes, frozenset[int]]:
    """What is done to the logits of each row, and the rows of guesses after which nothing may follow."""
    changes, ended = no_changes(len(asked), vocabulary), set[int]()
    for row, one in enumerate(asked):
        if one is None:
            continue
        sequence = one.sequence
        s, bias = sequence.request.sampling, changes.bias[row]
        changes.presence[row], changes.frequency[row] = s.presence_penalty, s.frequency_penalty
        changes.repetition[row] = s.repetition_penalty
        for token, value in s.logit_bias:
            bias[token] += value
        if sequence.counts is not None:
            changes.generated[row], changes.seen[row] = sequence.counts, sequence.seen
            for token in one.after:
                changes.generated[row, token] += 1
                changes.seen[row, token] = True
        if sequence.grammar is not None:
            try:
                bias[~sequence.grammar.allowed(one.after)] = -np.inf
            except RequestError as error:
                sequence.failure = error
            except Exception as error:
                sequence.failure = f"grammar: {type(error).__name__}: {error!s:.500}"
        if one.written < sequence.request.min_tokens:
            bias[[token for token in sequence.ends if token < vocabulary]] = -np.inf
        # Without a grammar only the ends wait for min_tokens: of later tokens no fewer may follow.
        if (one.after and sequence.grammar is None) or not np.isneginf(bias[:writable]).all():
            continue
        # The lowest id would be chosen, which is not allowed either.
        if one.after:
            ended.add(row)
        elif sequence.grammar is not None and sequence.grammar.may_end:
            sequence.complete = True
        else:
            sequence.failure = sequence.failure or RequestError(
                "no token may follow: the grammar, stop_tokens with min_tokens, and logit_bias leave none"
            )
    return changes, frozenset(ended)
