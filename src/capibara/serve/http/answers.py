"""Answers of the server: texts of an engine, whole or as events, in the forms of OpenAI's completions and chat."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from capibara.serve.http.errors import ApiError, error_body
from capibara.serve.http.metrics import Metrics
from capibara.serve.http.tools import Call, CallReader
from capibara.serve.requests import EngineProtocol, Piece, RequestError, ServeError, Stream, TokenScore
from capibara.serve.requests import Request as EngineRequest

__all__ = [
    "LOOK_S",
    "Form",
    "Timed",
    "answer",
    "chat_form",
    "completion_form",
    "event_json",
    "event_stream",
    "submitted",
    "usage_of",
    "while_connected",
    "whole",
]

_LEAST_LOGPROB = -9999.0
LOOK_S = 0.2
"""How often a server looks whether the client is still there."""


@dataclass(frozen=True)
class Form:
    """How answers look: the beginning of ids, the object's name, and what makes a choice of pieces."""

    prefix: str
    object: str
    model: str
    delta: Callable[..., dict[str, Any]]
    choice: Callable[..., dict[str, Any]]
    echoes: list[str]


class Timed:
    """The pieces of a stream, whose times are measured."""

    def __init__(self, stream: Stream, metrics: Metrics) -> None:
        self.stream, self._metrics = stream, metrics
        self.tokens = 0
        self._begun = self._last = time.perf_counter()

    async def pieces(self) -> AsyncIterator[Piece]:
        async for piece in self.stream:
            now = time.perf_counter()
            if piece.tokens:
                first = self.tokens == 0
                (self._metrics.first_token if first else self._metrics.between_tokens).observe(
                    now - self._last
                )
                self._last = now
                self.tokens += len(piece.tokens)
            if piece.finish == "error":
                raise (RequestError if piece.refused else ServeError)(piece.error or "the engine failed")
            if piece.finish is not None:
                self._metrics.whole.observe(now - self._begun)
            yield piece


async def submitted(engine: EngineProtocol, metrics: Metrics, asked: Sequence[EngineRequest]) -> list[Timed]:
    """Queue all of some requests, or none."""
    # Grammars are compiled here, which may take a while; who does not wait for it leaves texts that nobody reads.
    work = asyncio.ensure_future(asyncio.to_thread(engine.submit_all, asked))
    try:
        streams = await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_cancel_all)
        raise
    return [Timed(stream, metrics) for stream in streams]


def _cancel_all(work: asyncio.Future[Sequence[Stream]]) -> None:
    if not work.cancelled() and work.exception() is None:
        for stream in work.result():
            stream.cancel()


async def while_connected(http: Request, texts: Sequence[Timed]) -> list[Any]:
    """All of some texts; what the client does not wait for is cancelled."""
    every = [asyncio.create_task(whole(text)) for text in texts]
    left = set(every)
    try:
        while left:
            done, left = await asyncio.wait(left, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            if left and await http.is_disconnected():
                raise ApiError(499, "the client has gone")
        return [one.result() for one in every]
    finally:
        for text, one in zip(texts, every, strict=True):
            text.stream.cancel()
            one.cancel()
        await asyncio.gather(*every, return_exceptions=True)


def usage_of(prompts: Sequence[tuple[int, ...]], texts: Sequence[Timed]) -> tuple[int, int, int]:
    """Tokens that were read, how many of them from the prefix cache, and tokens that were written."""
    each = len(texts) // len(prompts)  # several texts of a prompt read what the first of them has put there
    cached = sum(min(t.stream.cached_tokens for t in texts[i * each :][:each]) for i in range(len(prompts)))
    return sum(map(len, prompts)), cached, sum(t.tokens for t in texts)


def event_json(content: Any) -> str:
    """The content of an event. Some clients take every line separator of Unicode for the end of a line."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    for separator in "\x85\u2028\u2029":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    """An answer of events."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def answer(
    engine: EngineProtocol,
    metrics: Metrics,
    body: Any,
    http: Request,
    asked: list[EngineRequest],
    prompts: list[tuple[int, ...]],
    form: Form,
) -> Response:
    """Submit, and answer whole or as a stream of events."""
    texts = await submitted(engine, metrics, asked)
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": form.model}

    def usage() -> dict[str, Any]:
        read, cached, written = usage_of(prompts, texts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    if body.stream:
        wanted = body.stream_options is not None and body.stream_options.include_usage
        return event_stream(_events(texts, form, head, usage if wanted else None, engine))
    found = await while_connected(http, texts)
    choices = [form.choice(engine, index, form.echoes[index], *one) for index, one in enumerate(found)]
    return JSONResponse({**head, "object": form.object, "choices": choices, "usage": usage()})


async def whole(text: Timed) -> tuple[str, list[TokenScore], str]:
    """A text, its scores, and why it ended."""
    pieces = [piece async for piece in text.pieces()]
    scores = [score for piece in pieces for score in (*piece.prompt_scores, *piece.scores)]
    return "".join(piece.text for piece in pieces), scores, _reason(pieces[-1])


def _reason(piece: Piece) -> str:
    return "stop" if piece.finish == "stop" else "length"


async def _events(
    texts: list[Timed],
    form: Form,
    head: dict[str, Any],
    usage: Callable[[], dict[str, Any]] | None,
    engine: EngineProtocol,
) -> AsyncIterator[str]:
    """Events of all texts in the order in which they come. The queue is short: who reads slowly waits himself."""
    queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue(maxsize=16)

    async def read(index: int, text: Timed) -> None:
        try:
            async for piece in text.pieces():
                await queue.put((index, piece))
        except ServeError as error:
            await queue.put((index, error))

    head = {**head, "object": form.object + (".chunk" if form.object.startswith("chat") else "")}
    if usage is not None:
        head["usage"] = None
    readers = [asyncio.create_task(read(index, text)) for index, text in enumerate(texts)]
    begun, left = set(), len(texts)
    try:
        while left:
            index, piece = await queue.get()
            if isinstance(piece, BaseException):
                status = 400 if isinstance(piece, RequestError) else 500
                yield f"data: {event_json(error_body(status, str(piece)))}\n\n"
                return
            left -= piece.finish is not None
            first = index not in begun
            if not (piece.text or piece.scores or piece.prompt_scores or piece.finish or first):
                continue
            begun.add(index)
            choice = form.delta(engine, index, form.echoes[index] if first else "", piece, first)
            yield f"data: {event_json({**head, 'choices': [choice]})}\n\n"
        if usage is not None:
            yield f"data: {event_json({**head, 'choices': [], 'usage': usage()})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for reader, text in zip(readers, texts, strict=True):
            reader.cancel()
            text.stream.cancel()


def _token_text(part: bytes) -> str:
    """A token as a text; of one that has part of a character the bytes, as OpenAI's API writes them."""
    try:
        return part.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


class _Offsets:
    """Where the tokens of a text begin in it, in characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._stream, self._characters = tokenizer.stream(), 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Of the next tokens; one that goes on with a character begins where this will be."""
        found = []
        for token in tokens:
            found.append(self._characters)
            self._characters += len(self._stream.push(token))
        return found


def _finite(logprob: float) -> float:
    """JSON has no infinities: what cannot be written has the number that OpenAI gives it."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def _completion_scores(engine: EngineProtocol, scores: Any, offsets: _Offsets) -> dict[str, Any] | None:
    if not scores:
        return None
    of = engine.tokenizer.token_bytes
    return {
        "tokens": [_token_text(of(score.token)) for score in scores],
        # Nothing comes before the first token of a prompt.
        "token_logprobs": [None if math.isnan(s.logprob) else _finite(s.logprob) for s in scores],
        "top_logprobs": [
            None
            if math.isnan(score.logprob)
            else {_token_text(of(t)): _finite(p) for t, p in reversed(score.top)}
            for score in scores
        ],
        "text_offset": offsets.of([score.token for score in scores]),
    }


def _completion(
    engine: EngineProtocol,
    index: int,
    echo: str,
    text: str,
    scores: Any,
    reason: str | None,
    *,
    offsets: Sequence[_Offsets],
) -> dict[str, Any]:
    found = _completion_scores(engine, scores, offsets[index])
    return {"index": index, "text": echo + text, "logprobs": found, "finish_reason": reason}


def _completion_delta(
    engine: EngineProtocol,
    index: int,
    echo: str,
    piece: Piece,
    first: bool,
    *,
    offsets: Sequence[_Offsets],
) -> dict[str, Any]:
    reason = None if piece.finish is None else _reason(piece)
    scores = (*piece.prompt_scores, *piece.scores)
    return _completion(engine, index, echo, piece.text, scores, reason, offsets=offsets)


def _chat_scores(engine: EngineProtocol, scores: Any) -> dict[str, Any] | None:
    def one(token: int, logprob: float) -> dict[str, Any]:
        part = engine.tokenizer.token_bytes(token)
        return {"token": _token_text(part), "logprob": _finite(logprob), "bytes": list(part)}

    if not scores:
        return None
    return {
        "content": [
            one(s.token, s.logprob) | {"top_logprobs": [one(*alternative) for alternative in s.top]}
            for s in scores
        ]
    }


def _chat_choice(
    engine: EngineProtocol,
    index: int,
    echo: str,
    text: str,
    scores: Any,
    reason: str,
    *,
    readers: Sequence[CallReader] = (),
    named: bool = False,
) -> dict[str, Any]:
    calls: list[Call] = []
    if readers:
        (text, calls), (more, last) = readers[index].push(text), readers[index].finish()
        text, calls = text + more, calls + last
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or None if calls else text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [call.to_json() for call in calls]
        reason = reason if named or reason == "length" else "tool_calls"
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_scores(engine, scores),
        "finish_reason": reason,
    }


def _chat_delta(
    engine: EngineProtocol,
    index: int,
    echo: str,
    piece: Piece,
    first: bool,
    *,
    readers: Sequence[CallReader] = (),
    named: bool = False,
) -> dict[str, Any]:
    text, reason = piece.text, None if piece.finish is None else _reason(piece)
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if readers:
        reader = readers[index]
        before = reader.called
        text, calls = reader.push(text)
        if reason is not None:
            more, last = reader.finish()
            text, calls = text + more, calls + last
        if calls:
            delta["tool_calls"] = [
                {"index": before + number, **call.to_json()} for number, call in enumerate(calls)
            ]
        if reason == "stop" and reader.called and not named:
            reason = "tool_calls"
    if text or "tool_calls" not in delta:
        delta["content"] = text
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_scores(engine, piece.scores),
        "finish_reason": reason,
    }


def completion_form(model: str, echoes: list[str], tokenizer: Any) -> Form:
    """The form of ``/v1/completions``. echoes: what each text begins with."""
    given: dict[str, Any] = {"offsets": [_Offsets(tokenizer) for _ in echoes]}
    delta, choice = partial(_completion_delta, **given), partial(_completion, **given)
    return Form("cmpl", "text_completion", model, delta, choice, echoes)


def chat_form(model: str, readers: Sequence[CallReader], count: int, *, named: bool = False) -> Form:
    """The form of ``/v1/chat/completions``.

    Args:
      readers: one for each text, if functions may be called. count: of texts.
      named: one function has to be called: then a call is no reason to end, as in OpenAI's API.
    """
    given: dict[str, Any] = {"readers": readers, "named": named}
    delta, choice = partial(_chat_delta, **given), partial(_chat_choice, **given)
    return Form("chatcmpl", "chat.completion", model, delta, choice, [""] * count)
