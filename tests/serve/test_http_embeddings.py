"""The HTTP server of a model that makes vectors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from small_models import SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import ByteTokenizer
from capibara.serve import Embedder
from capibara.serve.http import EmbeddingService, Keys, ServerSettings, create_embedding_app
from capibara.serve.requests import EngineClosedError, QueueFullError

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 32, "train.sequence_length": 32}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | settings | {"model.causal": False}))
    return Embedder(model, tokenizer=ByteTokenizer(), normalise=True)


@pytest.fixture
def service(embedder: Embedder) -> Iterator[EmbeddingService]:
    service = EmbeddingService(embedder, name="vectors", max_waiting=2, warm=False)
    yield service
    service.close()


@pytest.fixture
def client(service: EmbeddingService) -> Iterator[openai.OpenAI]:
    from starlette.testclient import TestClient

    app = create_embedding_app(service, ServerSettings(Keys([KEY])))
    with TestClient(app, base_url="http://test/v1") as http:
        yield openai.OpenAI(base_url="http://test/v1", api_key=KEY, max_retries=0, http_client=http)


def test_the_official_client_gets_vectors(client: openai.OpenAI, embedder: Embedder) -> None:
    texts = ["Capybaras swim.", "So do otters.", "x"]
    want = embedder.embed(texts)
    for form in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        given: Any = {"model": "vectors", "input": texts, **form}
        found = client.embeddings.create(**given)
        np.testing.assert_allclose([one.embedding for one in found.data], want, rtol=1e-5, atol=1e-6)
    assert found.usage.prompt_tokens == sum(map(len, texts))
    one = client.embeddings.create(model="vectors", input=list(b"x"), dimensions=embedder.dimension)
    np.testing.assert_allclose(one.data[0].embedding, want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"input": [[]]}, 400, "input", "input[0] has 0 tokens"),
        ({"input": []}, 400, "input", "has 0 texts"),
        ({"input": "x" * 33}, 400, "input", "has 33 tokens, expected 1 to 32"),
        ({"input": [300]}, 400, None, "300"),
        ({"input": "x", "dimensions": 3}, 400, "dimensions", "dimensions=3"),
        ({"input": "x", "model": "other"}, 404, "model", "does not exist"),
        ({"input": "x", "encoding_format": "int"}, 400, "encoding_format", "'float' or 'base64'"),
    ],
)
def test_what_has_no_vector(
    client: openai.OpenAI, body: Any, status: int, param: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.post("/embeddings", body=body, cast_to=httpx.Response)
    assert raised.value.status_code == status
    assert raised.value.param == param
    assert message in raised.value.message


def test_health_figures_and_keys(client: openai.OpenAI, service: EmbeddingService) -> None:
    http: Any = client._client
    assert http.get("http://test/health").json() == {"status": "ok"}
    client.embeddings.create(model="vectors", input="abc")
    text = http.get("http://test/metrics").text
    assert 'vllm:prompt_tokens_total{model_name="vectors"} 3.0' in text
    assert 'vllm:request_success_total{model_name="vectors"} 1.0' in text
    assert [model.id for model in client.models.list()] == ["vectors"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="vectors", prompt="x")
    service._waiting, service._progress_at = 1, service._progress_at - 60
    assert http.get("http://test/health").status_code == 503
    service._waiting = 0


def test_a_queue_with_an_end(embedder: Embedder) -> None:
    service = EmbeddingService(embedder, max_waiting=2, max_waiting_tokens=40, warm=False)

    async def several(rows: list[list[list[int]]]) -> list[Any]:
        return await asyncio.gather(*(service.embed(one) for one in rows), return_exceptions=True)

    one = [[1, 2, 3]]
    found = asyncio.run(several([one, one, one]))
    assert [isinstance(each, QueueFullError) for each in found] == [False, False, True]
    long = [[1] * 30]
    found = asyncio.run(several([long, long]))
    assert [isinstance(each, QueueFullError) for each in found] == [False, True]
    assert service.waiting == 0
    service.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(service.embed(one))


def test_no_request_waits_for_a_program(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Embedder(embedder.model, tokenizer=ByteTokenizer(), normalise=True)
    service = EmbeddingService(own, name="vectors")
    compile_one, held, asked = own.compile, threading.Event(), []

    def slow(shape: Any) -> Any:
        if shape not in own._programs:
            asked.append((shape, threading.current_thread().name.rpartition("_")[0]))
            assert held.wait(60)
        return compile_one(shape)

    monkeypatch.setattr(own, "compile", slow)
    rows = [
        [1 + number] * (1 + number % 32) for number in range(40)
    ]  # several to a row, and rows of several lengths
    try:
        found = asyncio.run(asyncio.wait_for(service.embed(rows), 60))
        np.testing.assert_allclose(
            found, [embedder.embed_tokens([row])[0] for row in rows], rtol=1e-4, atol=1e-5
        )
        assert service.stalled_s() == 0
        deadline = time.monotonic() + 60
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert {thread for _, thread in asked} == {"capibara-embeddings-compiling"}
        held.set()
        while asked[0][0] not in own._programs and time.monotonic() < deadline:
            time.sleep(0.01)
        known = len(asked)
        np.testing.assert_allclose(asyncio.run(service.embed(rows)), found, rtol=1e-4, atol=1e-5)
        assert len(asked) == known  # and now as they are
    finally:
        held.set()
        service.close()


def test_a_program_that_cannot_be_compiled_is_done_without(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = Embedder(embedder.model, tokenizer=ByteTokenizer(), normalise=True)
    service = EmbeddingService(own, name="vectors")
    compile_one = own.compile

    def refused(shape: Any) -> Any:
        if threading.current_thread().name.startswith("capibara-embeddings-compiling"):
            raise RuntimeError("no room")
        return compile_one(shape)

    monkeypatch.setattr(own, "compile", refused)
    rows = [[1 + number] * (1 + number % 32) for number in range(40)]
    found = asyncio.run(service.embed(rows))
    np.testing.assert_allclose(found, asyncio.run(service.embed(rows)), rtol=1e-6)
    service.close()
    assert "was not compiled: no room" in caplog.text
