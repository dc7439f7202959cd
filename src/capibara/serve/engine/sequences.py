"""A text in the engine: its tokens, what of it is in the cache, and what has been said of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capibara.serve.engine.streams import PieceStream, StoppingText
from capibara.serve.requests import FinishReason, Piece, Request, RequestError, TokenScore

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """One request while it waits and runs.

    Attributes:
      request: what was asked. stream: where its pieces go. number: of its arrival.
      tokens: the prompt and what was written. most: how many may be written.
      seed: its random numbers'. ends: the token ids that end it.
      writer: its text. grammar: what it has to follow, if anything (:mod:`capibara.serve.grammar`).
      computed: how many tokens' keys and values are in its pages. pages: those it holds. slot: its recurrent state.
      drafted: how many tokens' keys and values a draft model has there. earlier: what guesses from the text itself.
      prompt_scores: of the prompt's tokens so far.
      adapter: that it is written with, if any (:class:`capibara.serve.engine.adapters.LoadedAdapter`).
      digest, remembered: of the pages that the prefix cache knows, and how many tokens they hold.
      counts, seen: of each token, for penalties; ``None`` where the request has none.
      submitted: when it came, in ``time.monotonic`` seconds. admitted: when it first had a place in a step.
      cancelled: the reader has gone.
      complete: its grammar allows it to end, and no token that can be written.
      finished: why it ended. failure: what went wrong with this text alone.
    """

    request: Request
    stream: PieceStream
    number: int
    tokens: list[int]
    most: int
    seed: int
    ends: frozenset[int]
    writer: StoppingText
    salt: bytes
    grammar: Any = None
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    drafted: int = 0
    earlier: Any = None
    adapter: Any = None
    prompt_scores: list[TokenScore] = field(default_factory=list)
    digest: bytes = b""
    remembered: int = 0
    counts: np.ndarray | None = None
    seen: np.ndarray | None = None
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    cancelled: bool = False
    complete: bool = False
    finished: FinishReason | None = None
    failure: str | RequestError | None = None

    @property
    def written(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def scoring(self) -> bool:
        """Whether tokens of its prompt are still to be scored."""
        return self.request.prompt_logprobs is not None and len(self.prompt_scores) < len(self.request.prompt)

    @property
    def turn(self) -> tuple[int, bool]:
        """Of texts that share a step: the number of their adapter, 0 without one, and whether prompts are scored."""
        return (0 if self.adapter is None else self.adapter.number), self.scoring

    @property
    def order(self) -> tuple[int, int]:
        """The lowest runs first."""
        return self.request.priority, self.number

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        limit = self.request.deadline_s
        return limit is not None and time.monotonic() - self.submitted > limit

    @property
    def changes_logits(self) -> bool:
        """Whether its logits are changed before a token is chosen."""
        few = self.written < self.request.min_tokens and bool(self.ends)
        return self.request.sampling.changes_logits or self.grammar is not None or few

    @property
    def is_plain(self) -> bool:
        """Whether its next token is chosen from the model's own logits, and nobody wants a score of it."""
        return self.request.logprobs is None and not self.changes_logits

    def add(self, token: int, score: TokenScore | None) -> FinishReason | None:
        """Take the next token, and tell the reader; the reason why the text ends with it, if it does."""
        if token in self.ends and self.written >= self.request.min_tokens:
            return self.end("stop")
        self.tokens.append(token)
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True
        text = self.writer.push(token, stopping=self.written >= self.request.min_tokens)
        scores = () if score is None else (score,)
        done = False
        if self.grammar is not None:
            try:
                done = not self.grammar.accept(token)
            except RequestError as error:
                return self.end("error", Piece(text, (token,), scores), error=error)
        if self.writer.stopped or done:
            return self.end("stop", Piece(text, (token,), scores))
        if self.written >= self.most:
            return self.end("length", Piece(text, (token,), scores))
        self.stream.put(Piece(text, (token,), scores))
        return None

    def end(
        self, reason: FinishReason, last: Piece | None = None, *, error: str | RequestError | None = None
    ) -> FinishReason:
        """Tell the reader that the text ends, with a last piece."""
        last = last or Piece()
        try:
            text = last.text + self.writer.finish()
        except Exception as failure:
            # What was held back of its text is lost; that it has ended is not.
            text = last.text
            if error is None and reason in ("stop", "length"):
                reason, error = "error", f"{type(failure).__name__}: {failure!s:.500}"
        self.finished = reason
        refused, said = isinstance(error, RequestError), None if error is None else str(error)
        self.stream.put(Piece(text, last.tokens, last.scores, finish=reason, error=said, refused=refused))
        return reason
