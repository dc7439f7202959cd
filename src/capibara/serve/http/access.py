"""Who may ask, and how much: keys, names of the server, and the size of bodies."""

from __future__ import annotations

import hmac
import ipaddress
import math
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from capibara.errors import ConfigError
from capibara.serve.http.errors import ApiError, error_body

__all__ = ["CheckHost", "Keys", "LimitBodies", "RefuseWhenFull", "host_names", "is_loopback"]

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:/@\[\]\s]+))(?::\d*)?")
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


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, whoever asks: ``localhost``, ``127.0.0.1``, ``::1`` …"""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names that requests may have in ``Host``, as they are compared.

    Args:
      names: without a port: ``example.com``, ``*.example.com`` (what ends so), ``192.0.2.1``, ``[2001:db8::1]``, ``*``
        (any).

    Raises:
      ConfigError: one has a scheme, a port, a path, or a star elsewhere.
    """
    found = []
    for name in names:
        plain = name.strip().lower()
        address = plain.removeprefix("[").removesuffix("]")
        try:
            found.append(str(ipaddress.ip_address(address)))
            continue
        except ValueError:
            pass
        rest = plain.removeprefix("*").removeprefix(".")
        if plain != "*" and (not rest or not all(c.isalnum() or c in "-._" for c in rest)):
            raise ConfigError(
                f"allowed hosts: got {name!r:.100}, expected a name or an address without scheme and port: "
                "example.com, *.example.com, 192.0.2.1, or * for any"
            )
        found.append(plain.removesuffix("."))
    return tuple(found)


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
            if len(given) != 1 or not self._knows(_without_port(given[0])):
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


def _without_port(host: str) -> str:
    """A name as :func:`host_names` has it, of ``name:port`` or ``[address]:port``; empty if it is neither."""
    found = _HOST.fullmatch(host.strip().lower())
    if found is None:
        return ""
    address, name = found.groups()
    if name is not None:
        return name.removesuffix(".")
    try:
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        return ""


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
