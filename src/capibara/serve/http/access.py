"""What is answered before a request is read: other names of the server, full queues, large bodies."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from capibara.serve.http.errors import error_body
from capibara.serve.http.names import host_names, is_loopback, without_port

__all__ = ["CheckHost", "LimitBodies", "RefuseWhenFull"]

_FULL = json.dumps(
    error_body(429, "as many requests wait already as may, or as long. Send it again later.")
).encode()
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class CheckHost:
    """An application of ASGI that answers only requests for one of its names.

    A page of another site can make a browser send requests to this machine under the site's own name, by letting the
    name's address become 127.0.0.1 (DNS rebinding), and read the answers. What the browser cannot hide is that name.

    Args:
      app: the application behind it. names: as of :func:`host_names`; loopback addresses and ``localhost`` always are.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], names: Collection[str]) -> None:
        self._app, self._names = app, host_names(names)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] in ("http", "websocket") and "*" not in self._names:
            given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
            if len(given) != 1 or not self._knows(without_port(given[0])):
                said = f"host {', '.join(given)[:100]!r}" if given else "a request without Host"
                content = error_body(
                    400,
                    f"{said} is not a name of this server. Use its address (http://127.0.0.1:PORT), or start it with "
                    "--allowed-hosts NAME.",
                )
                await JSONResponse(content, 400, {"connection": "close"})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        return is_loopback(host) or any(
            name == host or (name.startswith("*.") and host.endswith(name[1:])) for name in self._names
        )


class RefuseWhenFull:
    """An application of ASGI that answers 429 before a request is read, where it could not even wait.

    Under overload most requests are refused; so they must cost little of the time that the others need.

    Args:
      app: the application behind it. paths: of what waits for the engine.
      full_for_s: seconds after which there is likely to be room; 0: there is.
    """

    def __init__(
        self, app: Callable[..., Awaitable[None]], paths: Collection[str], full_for_s: Callable[[], float]
    ) -> None:
        self._app, self._paths, self._full_for_s = app, frozenset(paths), full_for_s

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        wait = self._full_for_s() if asks else 0.0
        if wait <= 0:
            await self._app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_FULL)).encode()),
            (b"retry-after", str(math.ceil(wait)).encode()),
        ]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": _FULL})


class LimitBodies:
    """An application of ASGI that refuses larger bodies before they are read whole.

    Args:
      app: the application behind it. most: bytes.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if not said.isdigit() or int(said) > self._most:
            await self._refuse(scope, receive, send)
            return
        size = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._most:
                    raise HTTPException(
                        413, self._words()
                    )  # of the errors in reading, FastAPI passes these on
            return message

        await self._app(scope, counted, send)

    def _words(self) -> str:
        return f"the body is larger than {self._most} bytes. Send less."

    async def _refuse(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        await JSONResponse(error_body(413, self._words()), 413, {"connection": "close"})(scope, receive, send)
