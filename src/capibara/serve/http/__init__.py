"""The HTTP server: the API of OpenAI for an engine. Needs the extra ``serve``."""

from __future__ import annotations

from capibara.errors import MissingExtraError

try:
    import fastapi as _fastapi  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
except ImportError as error:
    raise MissingExtraError(str(error.name), "serve", "an HTTP server") from None

from capibara.serve.http.access import Keys
from capibara.serve.http.app import create_app
from capibara.serve.http.base import ServerSettings
from capibara.serve.http.embeddings import EmbeddingService, create_embedding_app

__all__ = ["EmbeddingService", "Keys", "ServerSettings", "create_app", "create_embedding_app"]
