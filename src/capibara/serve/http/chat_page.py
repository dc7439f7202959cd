"""The page of a server in the browser: three files, with a policy that lets them load nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response

from capibara.serve.requests import EngineProtocol

__all__ = ["add_page"]

_FOLDER = Path(__file__).with_name("page")
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    # What a model says is text, and must stay so whatever it is.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, engine: EngineProtocol) -> None:
    """Serve the page at ``/``. Conversations stay in the browser."""

    def send(name: str, kind: str) -> Any:
        content = (_FOLDER / name).read_bytes()
        return lambda: Response(content, media_type=kind, headers=_HEADERS)

    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, send(name, kind), include_in_schema=False)

    @app.get("/page.json", include_in_schema=False)
    def info() -> dict[str, Any]:
        chat = getattr(engine.tokenizer, "template", None) is not None
        return {"model": engine.name, "chat": chat, "max_length": engine.max_length}
