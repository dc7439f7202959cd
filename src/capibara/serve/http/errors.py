"""Errors as clients of OpenAI's API expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from capibara.errors import CapibaraError
from capibara.serve.requests import EngineClosedError, QueueFullError, ServeError

__all__ = ["ApiError", "error_body", "handle_errors"]

_TYPE = re.compile(r"constrained-\w+|(list|dict)\[.*\]|str|int")  # as pydantic writes it
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(CapibaraError):
    """An answer that is an error.

    Args:
      status: of HTTP. message: what is wrong, and what to do. param: the field that is meant.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _answer(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    return JSONResponse(error_body(status, message, param), status, headers or None)


def _short(value: Any) -> Any:
    """The beginning of a value, which may be large."""
    if isinstance(value, str):
        return value[:80]
    if isinstance(value, list):
        return [_short(one) for one in value[:20]]
    return {key: _short(value[key]) for key in list(value)[:10]} if isinstance(value, dict) else value


def handle_errors(app: FastAPI) -> None:
    """Let an app answer with these."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Of a field with several types, the one that fits best.
        every = error.errors()
        first = max(
            (one for one in every if one["loc"][:2] == every[0]["loc"][:2]),
            key=lambda e: (len(e["loc"]), e["type"] != "string_type"),
        )
        # Of a field with several types, the place also names the type that did not fit.
        place = [str(p) for p in first["loc"] if p not in ("body", "query") and not _TYPE.fullmatch(str(p))]
        name = place[0] if place else None
        if first["type"] == "extra_forbidden":
            return _answer(400, f"{name}: this server does not know it. Leave it out.", name)
        if first["type"] == "json_invalid":
            return _answer(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        if isinstance(first.get("input"), bytes):
            return _answer(
                415, "the body is read as JSON only with the header Content-Type: application/json."
            )
        given = json.dumps(_short(first.get("input")), default=str)[:80]
        where = f"{'.'.join(place)}: " if place else ""
        return _answer(400, f"{where}{first['msg']}, got {given}", name)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return _answer(error.status, str(error), error.param)

    @app.exception_handler(QueueFullError)
    async def full(_: Request, error: QueueFullError) -> JSONResponse:
        return _answer(429, str(error), **{"retry-after": str(math.ceil(error.retry_after_s))})

    @app.exception_handler(EngineClosedError)
    async def closed(_: Request, error: EngineClosedError) -> JSONResponse:
        return _answer(503, str(error))

    @app.exception_handler(ServeError)
    async def failed(_: Request, error: ServeError) -> JSONResponse:
        return _answer(400 if isinstance(error, ValueError) else 500, str(error))

    @app.exception_handler(CapibaraError)
    async def wrong(_: Request, error: CapibaraError) -> JSONResponse:
        return _answer(400, str(error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return _answer(500, f"a fault of the server: {type(error).__name__}")

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _answer(error.status_code, str(error.detail), **dict(error.headers or {}))
