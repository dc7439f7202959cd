"""The application: the API of OpenAI over an engine."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from capibara.data import decode_stream
from capibara.serve.http.access import Keys, LimitBodies
from capibara.serve.http.errors import ApiError, error_body, handle_errors
from capibara.serve.http.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from capibara.serve.http.metrics import Metrics
from capibara.serve.requests import EngineProtocol, Piece, ServeError, Stream, TokenScore
from capibara.serve.requests import Request as EngineRequest

__all__ = ["ServerSettings", "create_app"]

_MOST_TEXTS = 256  # of one request
_STALLED_S = 5.0
_LEAST_LOGPROB = -9999.0
_LOOK_S = 0.2  # whether the client is still there


@dataclass(frozen=True)
class ServerSettings:
    """How a server behaves.

    Attributes:
      keys: who may ask.
      most_bytes: of a body.
      timeout_s: seconds after which a text is ended; ``None``: never.
      temperature: where a request has none.
    """

    keys: Keys
    most_bytes: int = 4 << 20
    timeout_s: float | None = None
    temperature: float = 1.0


def _salt(http: Request, authorization: Annotated[str | None, Header()] = None) -> str:
    """The salt of the key that asks, if it may."""
    return http.app.state.keys.check(authorization)


_Salt = Annotated[str, Depends(_salt)]


def create_app(engine: EngineProtocol, settings: ServerSettings | None = None) -> FastAPI:
    """The application for one engine, which is closed when the application ends.

    Args:
      engine: :class:`capibara.serve.Engine`, or another that does what
        :class:`~capibara.serve.requests.EngineProtocol` says.
    """
    settings = ServerSettings(Keys()) if settings is None else settings
    metrics, begun = Metrics(engine), int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="Capibara", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.keys = settings.keys
    app.add_middleware(LimitBodies, most=settings.most_bytes)
    handle_errors(app)

    def check_model(name: str | None) -> None:
        if name is not None and name != engine.name:
            raise ApiError(404, f"model {name[:100]!r} does not exist; there is {engine.name!r}.", "model")

    @app.get("/health")
    def health() -> Response:
        """Whether steps finish: 503 if none has for five seconds although there is something to do."""
        stalled = engine.stalled_s()
        if stalled <= _STALLED_S:
            return JSONResponse({"status": "ok"})
        why = "the engine has failed" if stalled == float("inf") else f"no step finished for {stalled:.0f} s"
        return JSONResponse(error_body(503, why), 503)

    @app.get("/metrics")
    def read_metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models(_: _Salt) -> dict[str, Any]:
        """The model that there is."""
        one = {"id": engine.name, "object": "model", "created": begun, "owned_by": "capibara"}
        return {"object": "list", "data": [one | {"max_model_len": engine.max_length}]}

    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest, _: _Salt) -> dict[str, Any]:
        """The token ids of a text."""
        check_model(body.model)
        tokens = engine.tokenizer.encode(body.prompt, special=body.add_special_tokens).tolist()
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_length}

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest, _: _Salt) -> dict[str, Any]:
        """The text of token ids."""
        check_model(body.model)
        if wrong := [token for token in body.tokens if token >= engine.tokenizer.vocab_size]:
            raise ApiError(
                400, f"tokens has {wrong[0]}, ids are below {engine.tokenizer.vocab_size}.", "tokens"
            )
        return {"prompt": "".join(decode_stream(engine.tokenizer, body.tokens))}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request, salt: _Salt) -> Response:
        """Texts that continue prompts."""
        check_model(body.model)
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs: prompts are not scored. Leave one of them out.", "echo")
        prompts = await asyncio.to_thread(_prompts, body.prompt, engine)
        given: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
        asked = _asked(body, prompts, salt, settings, given)
        echoes = [""] * len(asked)
        if body.echo:
            echoes = [_text_of(engine, prompts[i // body.n]) for i in range(len(asked))]
        form = _Form("cmpl", "text_completion", engine.name, _completion_delta, _completion, echoes)
        return await _answer(engine, metrics, body, http, asked, prompts, form)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request, salt: _Salt) -> Response:
        """The next message of a conversation."""
        check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
        messages = body.conversation()

        def rendered() -> tuple[int, ...]:
            text = engine.tokenizer.chat(messages)
            return tuple(engine.tokenizer.encode(text, special=False).tolist())

        prompts = [await asyncio.to_thread(rendered)]
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        asked = _asked(body, prompts, salt, settings, {"max_tokens": most, "logprobs": logprobs})
        form = _Form("chatcmpl", "chat.completion", engine.name, _chat_delta, _chat_choice, [""] * len(asked))
        return await _answer(engine, metrics, body, http, asked, prompts, form)

    return app


def _prompts(given: Any, engine: EngineProtocol) -> list[tuple[int, ...]]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "prompt is empty: send a text, token ids, or several of them.", "prompt")
    if len(given) > _MOST_TEXTS:
        raise ApiError(400, f"prompt has {len(given)} texts, expected at most {_MOST_TEXTS}.", "prompt")
    return [tuple(engine.tokenizer.encode(one).tolist() if isinstance(one, str) else one) for one in given]


def _text_of(engine: EngineProtocol, tokens: tuple[int, ...]) -> str:
    return "".join(decode_stream(engine.tokenizer, tokens))


def _asked(
    body: Any, prompts: list[tuple[int, ...]], salt: str, settings: ServerSettings, given: dict[str, Any]
) -> list[EngineRequest]:
    if len(prompts) * body.n > _MOST_TEXTS:
        raise ApiError(400, f"n: {len(prompts) * body.n} texts are asked for, at most {_MOST_TEXTS}.", "n")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true.", "stream_options")
    more = {"temperature": settings.temperature, "salt": salt, "deadline_s": settings.timeout_s}
    return [body.request(prompt, number, **given, **more) for prompt in prompts for number in range(body.n)]


@dataclass(frozen=True)
class _Form:
    """How answers look: the beginning of ids, the object's name, and what makes a choice of pieces."""

    prefix: str
    object: str
    model: str
    delta: Callable[..., dict[str, Any]]
    choice: Callable[..., dict[str, Any]]
    echoes: list[str]


class _Timed:
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
                raise ServeError(piece.error or "the engine failed")
            if piece.finish is not None:
                self._metrics.whole.observe(now - self._begun)
            yield piece


async def _answer(
    engine: EngineProtocol,
    metrics: Metrics,
    body: Any,
    http: Request,
    asked: list[EngineRequest],
    prompts: list[tuple[int, ...]],
    form: _Form,
) -> Response:
    """Submit, and answer whole or as a stream of events; what the client does not wait for is cancelled."""
    texts: list[_Timed] = []
    try:
        for request in asked:
            # Grammars are compiled here, which may take a while.
            stream = await asyncio.to_thread(engine.submit, request)
            texts.append(_Timed(stream, metrics))
    except BaseException:
        for text in texts:
            text.stream.cancel()
        raise
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": form.model}

    def usage() -> dict[str, Any]:
        read, written = sum(map(len, prompts)), sum(text.tokens for text in texts)
        cached = sum(text.stream.cached_tokens for text in texts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": min(cached, read)},
        }

    if body.stream:
        wanted = body.stream_options is not None and body.stream_options.include_usage
        events = _events(texts, form, head, usage if wanted else None, engine)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
    work = asyncio.ensure_future(asyncio.gather(*(_whole(text) for text in texts)))
    try:
        while not (await asyncio.wait([work], timeout=_LOOK_S))[0]:
            if await http.is_disconnected():
                raise ApiError(499, "the client has gone")
        found = work.result()
    finally:
        work.cancel()
        for text in texts:
            text.stream.cancel()
    choices = [form.choice(engine, index, form.echoes[index], *one) for index, one in enumerate(found)]
    return JSONResponse({**head, "object": form.object, "choices": choices, "usage": usage()})


async def _whole(text: _Timed) -> tuple[str, list[TokenScore], str]:
    pieces = [piece async for piece in text.pieces()]
    scores = [score for piece in pieces for score in piece.scores]
    return "".join(piece.text for piece in pieces), scores, _reason(pieces[-1])


def _reason(piece: Piece) -> str:
    return "stop" if piece.finish == "stop" else "length"


async def _events(
    texts: list[_Timed],
    form: _Form,
    head: dict[str, Any],
    usage: Callable[[], dict[str, Any]] | None,
    engine: EngineProtocol,
) -> AsyncIterator[str]:
    """Events of all texts in the order in which they come. The queue is short: who reads slowly waits himself."""
    queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue(maxsize=16)

    async def read(index: int, text: _Timed) -> None:
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
                yield f"data: {json.dumps(error_body(500, str(piece)))}\n\n"
                return
            left -= piece.finish is not None
            first = index not in begun
            if not (piece.text or piece.scores or piece.finish or first):
                continue
            begun.add(index)
            choice = form.delta(engine, index, form.echoes[index] if first else "", piece, first)
            yield f"data: {json.dumps({**head, 'choices': [choice]}, ensure_ascii=False)}\n\n"
        if usage is not None:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage()})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for reader, text in zip(readers, texts, strict=True):
            reader.cancel()
            text.stream.cancel()


def _token_text(engine: EngineProtocol, token: int) -> str:
    return "".join(decode_stream(engine.tokenizer, [token]))


def _finite(logprob: float) -> float:
    """JSON has no infinities: what cannot be written has the number that OpenAI gives it."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def _completion_scores(engine: EngineProtocol, scores: Any) -> dict[str, Any] | None:
    if not scores:
        return None
    texts = [_token_text(engine, score.token) for score in scores]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(score.logprob) for score in scores],
        "top_logprobs": [
            {_token_text(engine, t): _finite(p) for t, p in reversed(score.top)} for score in scores
        ],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }


def _completion(
    engine: EngineProtocol, index: int, echo: str, text: str, scores: Any, reason: str
) -> dict[str, Any]:
    found = _completion_scores(engine, scores)
    return {"index": index, "text": echo + text, "logprobs": found, "finish_reason": reason}


def _completion_delta(
    engine: EngineProtocol, index: int, echo: str, piece: Piece, first: bool
) -> dict[str, Any]:
    reason = None if piece.finish is None else _reason(piece)
    return _completion(engine, index, echo, piece.text, piece.scores, reason)  # type: ignore[arg-type]


def _chat_scores(engine: EngineProtocol, scores: Any) -> dict[str, Any] | None:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(engine, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    if not scores:
        return None
    return {
        "content": [
            one(s.token, s.logprob) | {"top_logprobs": [one(*alternative) for alternative in s.top]}
            for s in scores
        ]
    }


def _chat_choice(
    engine: EngineProtocol, index: int, echo: str, text: str, scores: Any, reason: str
) -> dict[str, Any]:
    message = {"role": "assistant", "content": echo + text, "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_scores(engine, scores),
        "finish_reason": reason,
    }


def _chat_delta(engine: EngineProtocol, index: int, echo: str, piece: Piece, first: bool) -> dict[str, Any]:
    delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
    reason = None if piece.finish is None else _reason(piece)
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_scores(engine, piece.scores),
        "finish_reason": reason,
    }
