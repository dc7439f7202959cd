"""``/v1/embeddings`` for a model that makes vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from capibara.errors import ConfigError
from capibara.serve.embed import BatchShape, Embedder
from capibara.serve.http.access import RefuseWhenFull
from capibara.serve.http.answers import LOOK_S
from capibara.serve.http.base import Salt, ServerSettings, base_app, check_model
from capibara.serve.http.errors import ApiError
from capibara.serve.http.fields import EmbeddingRequest
from capibara.serve.http.keys import Keys
from capibara.serve.requests import EngineClosedError, QueueFullError

__all__ = ["EmbeddingService", "create_embedding_app"]

_MOST_TEXTS = 2048  # of one request, as OpenAI has it
_BATCH_TOKENS = 4096
# Of a batch at most, so that health, which counts batches, can tell a slow model from one that hangs.
_BATCH_S = 1.0


class EmbeddingService:
    """Makes vectors for many clients, one request after another.

    No request waits for a program to be compiled: a batch of a new shape is computed in parts, by programs that are
    there, while its own is compiled beside for the next one.

    Args:
      embedder: the model. name: what clients call it.
      max_waiting, max_waiting_tokens: requests, and tokens of their texts, that may wait.
      warm: compile the programs of single texts of all lengths, and of a full batch, now. Without them each is compiled
        by the first request that needs it.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        name: str = "capibara",
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1 << 20,
        warm: bool = True,
    ) -> None:
        self._embedder, self._name = embedder, name
        self._most, self._most_tokens = max_waiting, max_waiting_tokens
        for key, value in (("max_waiting", max_waiting), ("max_waiting_tokens", max_waiting_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key}={value!r}: expected an integer of at least 1.")
        self._lock = threading.Lock()
        self._waiting = self._tokens = 0
        self._closed = False
        self._progress_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="capibara-embeddings")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="capibara-embeddings-compiling")
        self._asked_for: set[BatchShape] = set()
        self._warm, self._batch_tokens = warm, _BATCH_TOKENS
        if warm:
            size = 1
            while size < embedder.max_length:
                embedder.embed_tokens([[0] * size])
                size *= 2
            whole = [[0] * embedder.max_length]
            embedder.embed_tokens(whole)
            begun = time.monotonic()
            embedder.embed_tokens(whole)
            most = int(_BATCH_S / max(time.monotonic() - begun, 1e-6))
            rows = max(1, min(most, _BATCH_TOKENS // embedder.max_length))
            self._batch_tokens = rows * embedder.max_length
            embedder.embed_tokens(whole * rows, batch_tokens=self._batch_tokens)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self._name

    @property
    def tokenizer(self) -> Any:
        return self._embedder.tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        return self._embedder.max_length

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self._embedder.dimension

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet."""
        return self._waiting

    def tokens_of(self, text: str) -> list[int]:
        """The token ids of a text as the model reads it, with what its folder puts before texts."""
        embedder = self._embedder
        before = "" if embedder.prompt is None else embedder.prompts[embedder.prompt]
        given = before + text
        return list(self.tokenizer.encode_batch([given.lower() if embedder.lower else given])[0])

    def stalled_s(self) -> float:
        """Seconds since a batch was computed, while there is something to do."""
        return time.monotonic() - self._progress_at if self._waiting else 0.0

    def full_for_s(self) -> float:
        """Seconds until a request may be taken; 0: now."""
        return 1.0 if self._waiting >= self._most else 0.0

    async def embed(self, rows: list[list[int]], gone: threading.Event | None = None) -> np.ndarray:
        """The vectors of texts as token ids: float32 ``[texts, dimension]``.

        Args:
          gone: set when nobody waits for them any more; the rest is not computed then.

        Raises:
          QueueFullError: too much waits. EngineClosedError: the server ends. ConfigError: a text is too long.
        """
        count = sum(map(len, rows))
        with self._lock:
            if self._closed:
                raise EngineClosedError("the server is shutting down")
            if self._waiting >= self._most or self._tokens + count > max(self._most_tokens, count):
                raise QueueFullError(f"{self._waiting} requests with {self._tokens} tokens wait already", 1.0)
            if not self._waiting:
                self._progress_at = time.monotonic()
            self._waiting, self._tokens = self._waiting + 1, self._tokens + count
        try:
            return await asyncio.wrap_future(self._pool.submit(self._compute, rows, gone))
        except RuntimeError:
            if not self._closed:
                raise
            raise EngineClosedError("the server is shutting down") from None
        finally:
            with self._lock:
                self._waiting, self._tokens = self._waiting - 1, self._tokens - count

    def _compute(self, rows: list[list[int]], gone: threading.Event | None) -> np.ndarray:
        def progress(_: int) -> None:
            self._progress_at = time.monotonic()
            if gone is not None and gone.is_set():
                raise ApiError(499, "the client has gone")

        progress(0)
        missing = self._compile_beside if self._warm else None
        return self._embedder.embed_tokens(
            rows, batch_tokens=self._batch_tokens, progress=progress, missing=missing
        )

    def _compile_beside(self, shape: BatchShape) -> None:
        if shape in self._asked_for or self._closed:
            return
        self._asked_for.add(shape)

        def compile_one() -> None:
            try:
                self._embedder.compile(shape)
            except Exception as error:
                # Such batches go on being computed in parts.
                logging.getLogger(__name__).warning("a program for vectors was not compiled: %s", error)

        with contextlib.suppress(RuntimeError):  # the service was closed just now
            self._compiling.submit(compile_one)

    def close(self) -> None:
        """Take no more requests, and finish those that wait."""
        self._closed = True
        self._pool.shutdown()
        self._compiling.shutdown(cancel_futures=True)  # a process that ends while XLA compiles is aborted


async def _while_connected(http: Request, service: EmbeddingService, rows: list[list[int]]) -> np.ndarray:
    """The vectors; what the client does not wait for is not computed."""
    gone = threading.Event()
    work = asyncio.ensure_future(service.embed(rows, gone))
    try:
        while not (await asyncio.wait([work], timeout=LOOK_S))[0]:
            if await http.is_disconnected():
                gone.set()
        return work.result()
    finally:
        gone.set()
        work.cancel()


class _Figures:
    """Counts and times, under the names that vLLM uses."""

    def __init__(self, service: EmbeddingService) -> None:
        self._registry = CollectorRegistry()
        labels: Any = ["model_name"]
        given: dict[str, Any] = {"registry": self._registry}
        Gauge("vllm:num_requests_running", "Requests that are being answered.", labels, **given).labels(
            service.name
        ).set_function(lambda: service.waiting)
        self.tokens = Counter("vllm:prompt_tokens", "Tokens of texts.", labels, **given).labels(service.name)
        self.done = Counter("vllm:request_success", "Requests that were answered.", labels, **given).labels(
            service.name
        )
        self.seconds = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end.", labels, **given
        ).labels(service.name)

    def text(self) -> bytes:
        return generate_latest(self._registry)


def create_embedding_app(service: EmbeddingService, settings: ServerSettings | None = None) -> FastAPI:
    """The application for a model that makes vectors; it closes the service when it ends."""
    settings = ServerSettings(Keys()) if settings is None else settings
    figures = _Figures(service)
    app = base_app(service, settings, figures.text)
    app.add_middleware(RefuseWhenFull, paths=["/v1/embeddings"], full_for_s=service.full_for_s)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, http: Request, _: Salt) -> dict[str, Any]:
        """The vectors of texts."""
        check_model(service, body.model)
        if body.dimensions not in (None, service.dimension):
            raise ApiError(
                400,
                f"dimensions={body.dimensions}: the model's vectors have {service.dimension}, and no fewer mean "
                "anything. Leave it out.",
                "dimensions",
            )
        given = body.input
        several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not 1 <= len(several) <= _MOST_TEXTS:
            raise ApiError(400, f"input has {len(several)} texts, expected 1 to {_MOST_TEXTS}.", "input")

        def read() -> list[list[int]]:
            return [service.tokens_of(one) if isinstance(one, str) else list(one) for one in several]  # type: ignore[arg-type]

        rows = await asyncio.to_thread(read)
        for number, row in enumerate(rows):
            if not 1 <= len(row) <= service.max_length:
                raise ApiError(
                    400,
                    f"input[{number}] has {len(row)} tokens, expected 1 to {service.max_length}.",
                    "input",
                )
        with figures.seconds.time():
            vectors = await _while_connected(http, service, rows)
        count = sum(map(len, rows))
        figures.tokens.inc(count)
        figures.done.inc()

        def written(vector: np.ndarray) -> Any:
            if body.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return vector.tolist()

        data = [
            {"object": "embedding", "index": index, "embedding": written(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": service.name, "usage": usage}

    return app
