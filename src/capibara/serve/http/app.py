"""The application: the API of OpenAI over an engine."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response

from capibara.data import decode_stream
from capibara.serve.http.access import RefuseWhenFull
from capibara.serve.http.answers import answer, chat_form, completion_form
from capibara.serve.http.base import Salt, ServerSettings, base_app, check_model
from capibara.serve.http.chat_page import add_page
from capibara.serve.http.errors import ApiError
from capibara.serve.http.fields import AdapterRequest, ChatRequest, CompletionRequest, called_tools
from capibara.serve.http.keys import Keys
from capibara.serve.http.metrics import Metrics
from capibara.serve.http.responses import ResponsesRequest, rendered, respond
from capibara.serve.http.tools import CallReader, calls_grammar, tool_form
from capibara.serve.requests import EngineProtocol
from capibara.serve.requests import Request as EngineRequest

__all__ = ["create_app"]

_MOST_TEXTS = 256  # of one request


def create_app(engine: EngineProtocol, settings: ServerSettings | None = None) -> FastAPI:
    """The application for one engine, which is closed when the application ends.

    Args:
      engine: :class:`capibara.serve.Engine`, or another that does what
        :class:`~capibara.serve.requests.EngineProtocol` says.
    """
    settings = ServerSettings(Keys()) if settings is None else settings
    metrics = Metrics(engine)
    app = base_app(engine, settings, metrics.text)
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    if settings.page:
        add_page(app, engine)
    app.add_middleware(RefuseWhenFull, paths=paths, full_for_s=lambda: engine.full_for_s())

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request, salt: Salt) -> Response:
        """Texts that continue prompts."""
        adapter = _adapter(engine, body.model)
        prompts = await asyncio.to_thread(_prompts, body.prompt, engine)
        given: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "adapter": adapter}
        given["prompt_logprobs"] = body.logprobs if body.echo else None
        asked = _asked(body, prompts, salt, settings, given)
        echoes = [""] * len(asked)
        if body.echo:
            texts = await asyncio.to_thread(_texts_of, prompts, engine)
            echoes = [texts[i // body.n] for i in range(len(asked))]
        form = completion_form(adapter or engine.name, echoes, engine.tokenizer)
        return await answer(engine, metrics, body, http, asked, prompts, form)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request, salt: Salt) -> Response:
        """The next message of a conversation."""
        adapter = _adapter(engine, body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
        functions = body.functions
        forced = called_tools(functions, body.named, required=body.tool_choice == "required")
        prompts = [await rendered(engine, body.conversation(), functions)]
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        given: dict[str, Any] = {
            "max_tokens": most,
            "adapter": adapter,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        form = tool_form(getattr(engine.tokenizer, "template", None))
        if forced is not None:
            if body.grammar() is not None:
                raise ApiError(
                    400, "tool_choice and response_format: only one of them can be given.", "tools"
                )
            given["grammar"] = calls_grammar(forced, form, several=body.parallel_tool_calls is not False)
        asked = _asked(body, prompts, salt, settings, given)
        readers = [CallReader(form, [f.name for f in functions]) for _ in asked] if functions else []
        named = body.named is not None
        chosen = chat_form(adapter or engine.name, readers, len(asked), named=named)
        return await answer(engine, metrics, body, http, asked, prompts, chosen)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, http: Request, salt: Salt) -> Response:
        """The next items of a conversation, in the form of OpenAI's Responses."""
        adapter = _adapter(engine, body.model)
        limits = {"adapter": adapter, "deadline_s": settings.timeout_s, "temperature": settings.temperature}
        return await respond(engine, metrics, body, http, salt, **limits)

    if settings.load_adapters:

        @app.post("/v1/load_lora_adapter")
        def load(body: AdapterRequest, _: Salt) -> dict[str, str]:
            """Read an adapter from a folder of the server."""
            if not body.lora_path or "\0" in body.lora_path:
                raise ApiError(400, "lora_path is missing: name the adapter's folder.", "lora_path")
            engine.load_adapter(body.lora_name, body.lora_path)
            return {"status": "ok", "loaded": body.lora_name}

        @app.post("/v1/unload_lora_adapter")
        def unload(body: AdapterRequest, _: Salt) -> dict[str, str]:
            """Forget an adapter."""
            engine.unload_adapter(body.lora_name)
            return {"status": "ok", "unloaded": body.lora_name}

    return app


def _adapter(engine: EngineProtocol, name: str | None) -> str:
    """The adapter that a request names as its model; empty: the model itself."""
    if name is not None and name in engine.adapters():
        return name
    check_model(engine, name)
    return ""


def _prompts(given: Any, engine: EngineProtocol) -> list[tuple[int, ...]]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "prompt is empty: send a text, token ids, or several of them.", "prompt")
    if len(given) > _MOST_TEXTS:
        raise ApiError(400, f"prompt has {len(given)} texts, expected at most {_MOST_TEXTS}.", "prompt")
    return [tuple(engine.tokenizer.encode(one).tolist() if isinstance(one, str) else one) for one in given]


def _texts_of(prompts: list[tuple[int, ...]], engine: EngineProtocol) -> list[str]:
    """The texts of prompts that can be answered; longer ones are not decoded only to be refused."""
    known = engine.tokenizer.vocab_size
    for prompt in prompts:
        if len(prompt) > engine.max_length:
            raise ApiError(
                400, f"prompt has {len(prompt)} tokens, expected at most {engine.max_length}.", "prompt"
            )
        if wrong := [token for token in prompt if token >= known]:
            raise ApiError(400, f"prompt has token {wrong[0]}: echo needs ids below {known}.", "prompt")
    return ["".join(decode_stream(engine.tokenizer, prompt)) for prompt in prompts]


def _asked(
    body: Any, prompts: list[tuple[int, ...]], salt: str, settings: ServerSettings, given: dict[str, Any]
) -> list[EngineRequest]:
    if len(prompts) * body.n > _MOST_TEXTS:
        raise ApiError(400, f"n: {len(prompts) * body.n} texts are asked for, at most {_MOST_TEXTS}.", "n")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true.", "stream_options")
    more = {"temperature": settings.temperature, "salt": salt, "deadline_s": settings.timeout_s}
    return [body.request(prompt, number, **given, **more) for prompt in prompts for number in range(body.n)]
