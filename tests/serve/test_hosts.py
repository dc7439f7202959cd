"""Names that a server answers to: a page of another site must not reach it by a name of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from capibara.errors import ConfigError
from capibara.serve.http.access import CheckHost
from capibara.serve.http.names import host_names, is_loopback


def client(*names: str) -> TestClient:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("here"))])
    app.add_middleware(CheckHost, names=names)
    return TestClient(app)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1", "[::1]", "[::1]:8000",
     "[0:0:0:0:0:0:0:1]:80"],
)  # fmt: skip
def test_this_machine_is_always_meant(host: str) -> None:
    assert client().get("/", headers={"host": host}).text == "here"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example",
     "192.0.2.1", "[2001:db8::1]:8000", "[::1", "::1", "0", "2130706433", "", " ", "[localhost]x:1",
     "localhost:1:2@e", "localhost:x"],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    answer = client().get("/", headers={"host": host})
    assert answer.status_code == 400
    assert "is not a name of this server" in answer.json()["error"]["message"]
    assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_names_can_be_added() -> None:
    one = client("example.com.", " *.Example.org", "[2001:DB8:0::1]")
    for host, code in [
        ("example.com:8000", 200),
        ("EXAMPLE.com", 200),
        ("a.example.com", 400),
        ("a.b.example.org", 200),
        ("example.org", 400),
        ("aexample.org", 400),
        ("[2001:db8::1]:8000", 200),
        ("localhost", 200),
    ]:
        assert one.get("/", headers={"host": host}).status_code == code, host
    assert client("*").get("/", headers={"host": "any.thing"}).status_code == 200


def test_any_name_also_means_none() -> None:
    # An old health check of a load balancer (HTTP/1.0) sends no Host.
    def code(*names: str) -> int:
        sent = []

        async def said(message: Any) -> None:
            sent.append(message)

        async def behind(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        scope = {"type": "http", "http_version": "1.0", "method": "GET", "path": "/health", "headers": []}
        nothing: Any = None
        asyncio.run(CheckHost(behind, names)(scope, nothing, said))
        return sent[0]["status"]

    assert code("*") == 200
    assert code("example.com") == 400


def test_two_names_are_refused() -> None:
    answer = client().get("/", headers=[("host", "localhost"), ("host", "evil.example")])
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "name", ["", "http://example.com", "example.com:80", "example.com/x", "a*b", "*.", "**", "exa mple"]
)
def test_what_is_not_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed hosts: got"):
        host_names([name])


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LocalHost")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "example.com", "localhost.example.com", ""))
    )
