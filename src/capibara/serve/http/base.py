"""What every server has: keys, limits, the state of health, figures, the model's name and its tokens."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from capibara.data import decode_stream
from capibara.serve.http.access import CheckHost, LimitBodies
from capibara.serve.http.errors import ApiError, error_body, handle_errors
from capibara.serve.http.fields import DetokenizeRequest, TokenizeRequest
from capibara.serve.http.keys import Keys

__all__ = ["Salt", "Served", "ServerSettings", "base_app", "check_model"]

_STALLED_S = 5.0
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character, as an escape
_BODY_S = 60.0  # in which a body has to arrive


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
      hosts: the names that requests may have in ``Host``, as of :func:`~capibara.serve.http.names.host_names`, besides
        ``localhost`` and loopback addresses; ``None``: any. A server that needs no key, and that only this machine can
        reach, should have ``()``.
    """

    keys: Keys
    most_bytes: int = 4 << 20
    timeout_s: float | None = None
    temperature: float = 1.0
    page: bool = True
    load_adapters: bool = False
    hosts: tuple[str, ...] | None = None


class _Body(Request):
    """A request whose body is JSON and nothing else, without NaN and such; halves of characters become U+FFFD."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = json.loads(body, parse_constant=_no_number)
            # As an escape alone can half of a character be in UTF-8: of a text that a client has cut.
            if _HALF.search(body):
                whole = json.dumps(self._json, ensure_ascii=False).encode("utf-16", "surrogatepass")
                self._json = json.loads(whole.decode("utf-16", "replace"))
        return self._json


def _no_number(text: str) -> Any:
    raise HTTPException(400, f"the body is not JSON: {text} is no number of it")


class _Route(APIRoute):
    """Looks at the key before a body is read, and does not wait for a body for ever."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(http: Request) -> Response:
            if http.method == "POST":
                _salt(http, http.headers.get("authorization"))
                http = _Body(http.scope, http.receive)
                try:
                    async with asyncio.timeout(_BODY_S):
                        await http.body()
                except TimeoutError:
                    raise ApiError(
                        408, f"the body did not arrive within {_BODY_S:g} s. Send it again."
                    ) from None
                except ClientDisconnect:
                    raise ApiError(499, "the client has gone") from None
            return await handle(http)

        return checked


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
    app.router.route_class = _Route
    app.add_middleware(LimitBodies, most=settings.most_bytes)
    if settings.hosts is not None:
        app.add_middleware(CheckHost, names=settings.hosts)
    handle_errors(app)

    @app.get("/health")
    def health() -> Response:
        """Whether steps finish: 503 if none has for five seconds although there is work, or the engine failed.

        Waiting for a program to be compiled does not count, up to ten minutes.
        """
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
        return {"object": "list", "data": every()}

    @app.get("/v1/models/{name:path}")
    def model(name: str, _: Salt) -> dict[str, Any]:
        """One of them."""
        for one in every():
            if one["id"] == name:
                return one
        raise ApiError(
            404, f"there is no model {name!r:.100}; /v1/models lists those that there are", "model"
        )

    def every() -> list[dict[str, Any]]:
        one: dict[str, Any] = {"id": served.name, "object": "model", "created": begun, "owned_by": "capibara"}
        one["max_model_len"] = served.max_length
        adapters = getattr(served, "adapters", list)()
        more = [one | {"id": name, "root": name, "parent": served.name} for name in adapters]
        return [one, *more]

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
