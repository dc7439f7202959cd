"""The HTTP server: the API of OpenAI for an engine. Needs the extra ``serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.errors import MissingExtraError
from capibara.jax_versions import find_package
from capibara.lazy import on_demand

for _name in ("fastapi", "prometheus_client"):
    if find_package(_name) is None:
        raise MissingExtraError(_name, "serve", "an HTTP server")

if TYPE_CHECKING:
    from capibara.serve.http.app import create_app
    from capibara.serve.http.base import ServerSettings
    from capibara.serve.http.embeddings import EmbeddingService, create_embedding_app
    from capibara.serve.http.keys import Keys

__all__ = ["EmbeddingService", "Keys", "ServerSettings", "create_app", "create_embedding_app"]

_HOMES = {
    "app": ("create_app",),
    "base": ("ServerSettings",),
    "embeddings": ("EmbeddingService", "create_embedding_app"),
    "keys": ("Keys",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
