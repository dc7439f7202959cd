"""What an engine is asked for, and what it answers: the contract between the engine and its faces.

A :class:`Request` is one text to be written. :meth:`EngineProtocol.submit` takes it and gives a :class:`Stream` at
once, from which its :class:`Piece` objects are read as they are written, by a ``for`` loop or by ``async for``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from capibara.errors import CapibaraError
from capibara.serve.sampling import Sampling

__all__ = [
    "EngineClosedError",
    "EngineProtocol",
    "EngineStatistics",
    "FinishReason",
    "Grammar",
    "Piece",
    "QueueFullError",
    "Request",
    "RequestError",
    "ServeError",
    "Stream",
    "TokenScore",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]


class ServeError(CapibaraError):
    """A request that was not answered, or an engine that cannot run."""


class RequestError(ServeError, ValueError):
    """A request that cannot be answered as it is; the message names the argument and the remedy."""


class EngineClosedError(ServeError):
    """The engine does not take requests any more: it is shutting down, a step has failed, or a program cannot be
    compiled."""


class QueueFullError(ServeError):
    """There are as many waiting requests, or tokens in them, as the engine is allowed to hold, or another would wait
    longer than it may.

    Attributes:
      retry_after_s: seconds after which there is likely to be room.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Grammar:
    """What a text must be.

    Attributes:
      kind: ``"json"`` (any JSON object), ``"json_schema"``, ``"regex"``, ``"lark"`` or ``"choice"`` (one string a
        line).
      text: the schema, expression, grammar or choices; empty for ``"json"``.
    """

    kind: Literal["json", "json_schema", "regex", "lark", "choice"]
    text: str = ""


@dataclass(frozen=True)
class Request:
    """One text to be written.

    Attributes:
      prompt: at least one token id.
      max_tokens: how many to write at most; ``None``: as many as fit.
      min_tokens: before so many are written, what ends a text is not chosen, and a stop string does not end it.
      sampling: how tokens are chosen.
      seed: 0 to 2^32 - 1; the same request and seed give the same text, whatever else runs. ``None``: a random one.
      stop: strings that end the text; they are not part of it.
      stop_tokens: token ids that end the text, beside those of the tokenizer; they are not part of it.
      ignore_eos: do not end at the tokenizer's own tokens.
      logprobs: how many alternatives are given with each token, 0 to 20; 0 gives the token's own alone, ``None``
        nothing.
      prompt_logprobs: how many alternatives are given with each token of the prompt, as ``logprobs``; with it
        ``max_tokens`` may be 0.
      grammar: what the text must be.
      adapter: the name of a loaded adapter; empty: the model itself.
      salt: entries of the prefix cache are shared among requests of the same salt only.
      priority: requests of a lower number run first; equal ones in the order in which they came.
      deadline_s: seconds after which the request is ended, from when it was submitted; ``None``: never.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = 16
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True)
class TokenScore:
    """A token and its natural logarithm of probability, under the model's own distribution.

    Attributes:
      token: its id.
      logprob: before temperature, penalties and masks.
      top: the likeliest tokens and theirs, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What was written since the last piece.

    Attributes:
      text: whole characters; what could become a stop string is held back.
      tokens: their ids; a piece may have tokens and no text yet.
      scores: one for each token, if the request asks for them.
      prompt_scores: in the first piece, one for each token of the prompt, if the request asks for them; the first
        token's logarithm is NaN, since nothing comes before it.
      finish: why the text ends here; ``None`` while it goes on.
      error: what failed, where ``finish`` is ``"error"``.
      refused: the request is the cause of that, such as a grammar that takes too much work, and not the engine.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    refused: bool = False


@runtime_checkable
class Stream(Protocol):
    """A text that is being written. It is read once, from one place; it ends with a piece that has ``finish``."""

    @property
    def request(self) -> Request: ...

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were read from the prefix cache; known by the first piece."""
        ...

    def __iter__(self) -> Iterator[Piece]: ...

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def cancel(self) -> None:
        """End it: its pages are free after the step that runs now. Without effect on a text that has ended."""
        ...


@dataclass(frozen=True)
class EngineStatistics:
    """Counts of an engine; those that only grow are totals since its start.

    Attributes:
      running, waiting: requests. waiting_tokens: those of waiting prompts.
      pages_used, pages_total: of the cache; pages that only the prefix cache holds are not counted as used.
      prompt_tokens, generated_tokens, cached_prompt_tokens: totals.
      finished: totals by reason. preemptions, steps, compilations: totals; compilations after the warm-up only.
      guessed_tokens, right_guesses: of speculation, totals.
      programs_left: how many are still to be compiled beside the steps, after a start with ``warm="first"``; it
        stays above 0 once one of them cannot be compiled.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    generated_tokens: int
    cached_prompt_tokens: int
    finished: dict[str, int]
    preemptions: int
    steps: int
    compilations: int
    guessed_tokens: int = 0
    right_guesses: int = 0
    programs_left: int = 0


@runtime_checkable
class EngineProtocol(Protocol):
    """What the pipeline and the HTTP server ask of an engine. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        ...

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
          RequestError: it cannot be answered; QueueFullError: later perhaps; EngineClosedError: never.
        """
        ...

    def submit_all(self, requests: Sequence[Request]) -> Sequence[Stream]:
        """Queue all of some requests, or none: as :meth:`submit`."""
        ...

    def statistics(self) -> EngineStatistics: ...

    def stalled_s(self) -> float:
        """Seconds since a step finished, while there is something to do; 0 when there is nothing. Infinite once the
        engine has failed: its thread has ended without being asked to, or a program cannot be compiled. The time that a
        step waits for a program to be compiled does not count, up to ten minutes."""
        ...

    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        ...

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter, which requests name from then on.

        Raises:
          CapibaraError: it cannot be used; the message says why.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; texts that have begun with it go on.

        Raises:
          CapibaraError: it is not loaded.
        """
        ...

    def full_for_s(self) -> float:
        """Seconds after which a request is likely to be taken, where as many wait as may, or as long; 0 where there is
        room. It takes no time."""
        ...

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests; let those that run finish for so many seconds; end the rest; free the cache."""
        ...
