"""What every server has: keys, limits, the state of health, figures, the model's name and its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse

from capibara.data import decode_stream
from capibara.serve.http.access import Keys, LimitBodies
from capibara.serve.http.errors import ApiError, error_body, handle_errors
from capibara.serve.http.fields import DetokenizeRequest, TokenizeRequest

__all__ = ["Salt", "Served", "ServerSettings", "base_app", "check_model"]

_STALLED_S = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """How a server behaves.

    Attributes:
      keys: who may ask.
      most_bytes: of a body.
      timeout_s: seconds after which a text is ended; ``None``: never.
      temperature: where a request has none.
      page: whether ``/`` is a page for the browser.
      load_adapters: whether who may ask may also load adapters, from folders of the server, and unload them.
    """

    keys: Keys
    most_bytes: int = 4 << 20
    timeout_s: float | None = None
    temperature: float = 1.0
    page: bool = True
    load_adapters: bool = False


class Served(Protocol):
    """What answers: an engine, or what makes vectors."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_length(self) -> int: ...

    def stalled_s(self) -> float: ...

    def close(self) -> None: ...


def _salt(http: Request, authorization: Annotated[str | None, Header()] = None) -> str:
    """The salt of the key that asks, if it may."""
    return http.app.state.keys.check(authorization)


Salt = Annotated[str, Depends(_salt)]


def check_model(served: Served, name: str | None) -> None:
    """Refuse a request for another model."""
    if name is not None and name != served.name:
        raise ApiError(404, f"model {name[:100]!r} does not exist; there is {served.name!r}.", "model")


def base_app(served: Served, settings: ServerSettings, figures: Callable[[], bytes]) -> FastAPI:
    """An application with all but what answers; it closes what is served when it ends.

    Args:
      figures: what Prometheus reads.
    """
    begun = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.close)

    app = FastAPI(title="Capibara", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.keys = settings.keys
    app.add_middleware(LimitBodies, most=settings.most_bytes)
    handle_errors(app)

    @app.get("/health")
    def health() -> Response:
        """Whether steps finish: 503 if none has for five seconds although there is something to do."""
        stalled = served.stalled_s()
        if stalled <= _STALLED_S:
            return JSONResponse({"status": "ok"})
        why = "the engine has failed" if stalled == float("inf") else f"no step finished for {stalled:.0f} s"
        return JSONResponse(error_body(503, why), 503)

    @app.get("/metrics")
    def read_metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(figures(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models(_: Salt) -> dict[str, Any]:
        """The model that there is, and its adapters."""
        one: dict[str, Any] = {"id": served.name, "object": "model", "created": begun, "owned_by": "capibara"}
        one["max_model_len"] = served.max_length
        adapters = getattr(served, "adapters", list)()
        more = [one | {"id": name, "root": name, "parent": served.name} for name in adapters]
        return {"object": "list", "data": [one, *more]}

    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest, _: Salt) -> dict[str, Any]:
        """The token ids of a text."""
        check_model(served, body.model)
        tokens = served.tokenizer.encode(body.prompt, special=body.add_special_tokens).tolist()
        return {"tokens": tokens, "count": len(tokens), "max_model_len": served.max_length}

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest, _: Salt) -> dict[str, Any]:
        """The text of token ids."""
        check_model(served, body.model)
        if wrong := [token for token in body.tokens if token >= served.tokenizer.vocab_size]:
            raise ApiError(
                400, f"tokens has {wrong[0]}, ids are below {served.tokenizer.vocab_size}.", "tokens"
            )
        return {"prompt": "".join(decode_stream(served.tokenizer, body.tokens))}

    return app
