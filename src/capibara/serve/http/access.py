"""Who may ask, and how much: keys, and the size of bodies."""

from __future__ import annotations

import hmac
import math
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from capibara.errors import ConfigError
from capibara.serve.http.errors import ApiError, error_body

__all__ = ["Keys", "LimitBodies", "RefuseWhenFull"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Keys:
    """The keys that may ask; without any, everybody may.

    Args:
      keys: each of at least 8 characters.

    Raises:
      ConfigError: one is shorter, or has spaces or other characters than those of ASCII.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = []
        self._secret = os.urandom(32)
        for number, key in enumerate(keys, start=1):
            if len(key) < 8 or not all("!" <= c <= "~" for c in key):
                raise ConfigError(
                    f"API key {number} has {len(key)} characters, expected at least 8 of ASCII and no spaces: a header "
                    "carries no others."
                )
            self._digests.append(self._digest(key))

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")

    def check(self, authorization: str | None) -> str:
        """The salt of the requests of a key: of others it says nothing.

        Args:
          authorization: ``Bearer KEY``.

        Raises:
          ApiError: the key may not ask.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = self._digest(key.strip())
        if not self._digests:
            return digest.hex() if key else ""
        # All are compared, each in constant time.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401, "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'"
            )
        return digest.hex()


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
        content = error_body(429, "as many requests wait already as may. Send it again later.")
        headers = {"retry-after": str(math.ceil(wait))}
        await JSONResponse(content, 429, headers)(scope, receive, send)


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
