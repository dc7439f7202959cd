"""The HTTP server: the official client against it on loopback, and what it refuses."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pydantic
import pytest
import uvicorn
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import FileTokenizer
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.errors import ConfigError
from capibara.serve import Engine, Request, Sampling
from capibara.serve.http import Keys, ServerSettings, create_app
from capibara.serve.http.fields import CompletionRequest

KEY, OTHER = "a-key-for-tests", "another-key-for-tests"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 128, "train.sequence_length": 32}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))
    tokenizer = FileTokenizer(byte_tokenizer_files() | {"chat_template.jinja": TEMPLATE.encode()})
    with Engine(
        model, tokenizer=tokenizer, name="tiny", max_batch=4, page_size=8, max_waiting=6, warm=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    app = create_app(engine, ServerSettings(Keys([KEY, OTHER]), most_bytes=5000))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(url: str, path: str, body: Any, key: str | None = KEY) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(
        url + path, content=content, headers={"content-type": "application/json", **headers}, timeout=60
    )


def expected(engine: Engine, prompt: str, count: int) -> str:
    tokens = tuple(engine.tokenizer.encode(prompt).tolist())
    stream = engine.submit(Request(tokens, max_tokens=count, sampling=Sampling(temperature=0.0)))
    return "".join(piece.text for piece in stream)


def test_the_official_client_completes(client: openai.OpenAI, engine: Engine) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    found = client.completions.create(
        model="tiny", prompt=["once", "twice"], max_tokens=9, temperature=0, logprobs=2
    )
    assert [choice.text for choice in found.choices] == [expected(engine, p, 9) for p in ("once", "twice")]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (9, 18)
    scores = found.choices[0].logprobs
    assert scores is not None
    assert len(scores.token_logprobs or []) == 9
    assert all(len(top) <= 2 for top in scores.top_logprobs or [])
    streamed = client.completions.create(
        model="tiny",
        prompt="once",
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(streamed)
    assert "".join(event.choices[0].text for event in events if event.choices) == found.choices[0].text
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 9
    echoed = client.completions.create(model="tiny", prompt="once", max_tokens=2, temperature=0, echo=True)
    assert echoed.choices[0].text == "once" + expected(engine, "once", 2)


def test_the_official_client_talks(client: openai.OpenAI, engine: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    want = expected(engine, "<user>hello\n<assistant>", 7)
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_completion_tokens": 7,
        "temperature": 0,
    }
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert found.choices[0].message.content == want
    content = found.choices[0].logprobs and found.choices[0].logprobs.content
    assert content is not None
    assert [len(one.top_logprobs) for one in content] == [3] * 7
    events = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == want
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    hot: dict[str, Any] = asked | {"temperature": 2, "n": 3, "seed": 5}
    several, again = (client.chat.completions.create(**hot) for _ in range(2))
    texts = [choice.message.content for choice in several.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3


def test_a_schema_and_a_stop_string(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
        },
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    text = None
    for seed in range(20):  # white space between the parts is free, and may be long
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            response_format=form,
            seed=seed,
            max_tokens=100,
        )
        if found.choices[0].finish_reason == "stop":
            text = found.choices[0].message.content
            break
    assert text is not None
    assert set(json.loads(text)) == {"kind", "age"}
    choice = client.completions.create(
        model="tiny", prompt="x", max_tokens=9, extra_body={"guided_regex": "[xyz]{4}"}
    )
    assert re.fullmatch("[xyz]{4}", choice.choices[0].text)


WEATHER = {
    "type": "object",
    "properties": {"town": {"enum": ["Lima", "Quito"]}},
    "required": ["town"],
    "additionalProperties": False,
}


def test_the_official_client_has_functions_called(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    found = client.chat.completions.create(**asked, **forced, seed=3)
    assert found.choices[0].finish_reason == "tool_calls"
    message = found.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["town"] in ("Lima", "Quito")
    events = list(client.chat.completions.create(**asked, **forced, seed=3, stream=True))
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert [(d.index, d.function and d.function.arguments) for d in deltas] == [(0, call.function.arguments)]
    assert events[-1].choices[0].finish_reason == "tool_calls"
    # What was called before, and its result, go through the template.
    later = [*asked["messages"], message.model_dump(exclude_none=True), {"role": "tool", "content": "warm"}]
    again: dict[str, Any] = asked | {"messages": later}
    answered = client.chat.completions.create(**again, max_tokens=2)
    assert answered.usage is not None
    assert answered.usage.prompt_tokens == len("<user>a\n<assistant>\n<tool>warm\n<assistant>")
    free = client.chat.completions.create(**asked, tool_choice="none", max_tokens=3)
    assert free.choices[0].message.tool_calls is None


def test_the_official_client_gets_responses(client: openai.OpenAI, engine: Engine) -> None:
    want = expected(engine, "<system>be short\n<user>hello\n<assistant>", 7)
    asked: dict[str, Any] = {
        "model": "tiny",
        "instructions": "be short",
        "temperature": 0,
        "max_output_tokens": 7,
    }
    found = client.responses.create(**asked, input="hello")
    assert found.output_text == want
    assert (found.status, found.object) == ("incomplete", "response")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (40, 7)
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    events = list(client.responses.create(**asked, input=parts, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_have_schemas_and_functions(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    form = {"format": {"type": "json_schema", "name": "town", "schema": WEATHER}}
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    for more in ({"text": form}, {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}}):
        asked: Any = {"model": "tiny", "input": "a", "max_output_tokens": 100, "parallel_tool_calls": False}
        asked |= more
        # Without a seed: what is free is drawn anew.
        found = next(
            one for one in (client.responses.create(**asked) for _ in range(30)) if one.status == "completed"
        )
        (item,) = found.output
        text = found.output_text if item.type == "message" else getattr(item, "arguments", "")
        assert item.type == ("message" if "text" in more else "function_call")
        assert json.loads(text)["town"] in ("Lima", "Quito")
    kinds = [event.type for event in client.responses.create(**asked, stream=True)]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert ("response.function_call_arguments.done" in kinds) == (kinds[-1] == "response.completed")


def test_prompts_are_scored(client: openai.OpenAI) -> None:
    """As harnesses of benchmarks ask for them."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "once upon", "echo": True, "logprobs": 2}
    found = client.completions.create(**asked, max_tokens=0).choices[0]
    assert (found.text, found.finish_reason) == ("once upon", "length")
    scores = found.logprobs
    assert scores is not None
    assert "".join(scores.tokens or []) == "once upon"
    assert (scores.token_logprobs or [0])[0] is None
    assert all(p is not None and p < 0 for p in (scores.token_logprobs or [])[1:])
    assert scores.text_offset == list(range(9))
    longer = client.completions.create(**asked, max_tokens=3, temperature=0)
    whole = longer.choices[0].logprobs
    assert whole is not None
    assert len(whole.token_logprobs or []) == 12
    events = list(client.completions.create(**asked, max_tokens=3, temperature=0, stream=True))
    assert "".join(event.choices[0].text for event in events) == longer.choices[0].text
    streamed = [
        p for e in events if e.choices[0].logprobs for p in e.choices[0].logprobs.token_logprobs or []
    ]
    assert streamed == whole.token_logprobs


def test_tokens_of_part_of_a_character_are_bytes(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    text = "é😀ab"
    asked: dict[str, Any] = {"max_tokens": 8, "extra_body": {"guided_regex": text, "ignore_eos": True}}
    said = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, **asked
    )
    scores = said.choices[0].logprobs
    assert scores is not None
    content = scores.content or []
    assert bytes(byte for one in content for byte in one.bytes or []) == text.encode()
    assert [one.token for one in content[:2]] == ["bytes:\\xc3", "bytes:\\xa9"]
    whole = client.completions.create(model="tiny", prompt="x", logprobs=3, **asked).choices[0].logprobs
    assert whole is not None
    assert whole.text_offset == [0, 0, 1, 1, 1, 1, 2, 3]
    assert all(len(top) == 3 for top in whole.top_logprobs or [])
    events = client.completions.create(model="tiny", prompt="x", logprobs=3, stream=True, **asked)
    found = [e.choices[0].logprobs for e in events]
    assert [at for one in found if one for at in one.text_offset or []] == whole.text_offset


def test_line_separators_end_no_event(url: str) -> None:
    """Clients that use httpx's lines, as many do, would cut events there."""
    pytest.importorskip("llguidance")
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "guided_regex": "\u2028", "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "\u2028"


def test_tokens_and_texts(url: str) -> None:
    found = post(url, "/tokenize", {"prompt": "né"}).json()
    assert found["count"] == len(found["tokens"]) == 3
    assert post(url, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "né"}
    refused = post(url, "/detokenize", {"tokens": [256]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


PROMPT = {"model": "tiny", "prompt": "x"}
ASKED = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", b"{", 400, None, "the body is not JSON"),
        ("completions", PROMPT | {"suffix": "y"}, 400, "suffix", "suffix: this server does not know it"),
        ("completions", PROMPT | {"max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0, got -1"),
        ("completions", PROMPT | {"max_tokens": 0}, 400, None, "max_tokens=0: expected an integer from 1"),
        ("completions", PROMPT | {"max_tokens": 999}, 400, None, "max_tokens=999"),
        ("completions", PROMPT | {"prompt": []}, 400, "prompt", "prompt is empty"),
        ("completions", PROMPT | {"prompt": [999]}, 400, None, "token id 999"),
        ("completions", PROMPT | {"temperature": "hot"}, 400, "temperature", 'got "hot"'),
        ("completions", PROMPT | {"model": "large"}, 404, "model", "'large' does not exist"),
        ("completions", PROMPT | {"logit_bias": {"one": 1}}, 400, "logit_bias", "expected token ids"),
        ("completions", PROMPT | {"guided_regex": "("}, 400, None, "regex"),
        ("completions", PROMPT | {"guided_grammar": 'start: start "a"'}, 400, None, "nothing can be written"),
        ("completions", b'{"prompt": "x", "temperature": NaN}', 400, None, "NaN is no number"),
        ("completions", PROMPT | {"prompt": [1, -1, *["b"] * 300]}, 400, "prompt", "got -1"),
        (
            "responses",
            b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": Infinity}}]}',
            400,
            None,
            "Infinity is no number",
        ),
        ("completions", PROMPT | {"prompt": [1] * 200, "echo": True, "n": 6}, 400, "prompt", "200 tokens"),
        (
            "completions",
            PROMPT | {"stop": ["a"] * 17},
            400,
            "stop",
            "stop: List should have at most 16 items",
        ),
        ("completions", PROMPT | {"stop_token_ids": [1] * 257}, 400, "stop_token_ids", "at most 256"),
        ("completions", PROMPT | {"repetition_penalty": 1e-46}, 400, "repetition_penalty", "0.01"),
        ("completions", PROMPT | {"prompt": "x" * 6000}, 413, None, "larger than 5000 bytes"),
        ("chat/completions", {"model": "tiny", "messages": []}, 400, "messages", "at least 1 item"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "text",
        ),
        ("chat/completions", ASKED | {"functions": []}, 400, "functions", "does not know it"),
        ("chat/completions", ASKED | {"tools": [{"type": "web"}]}, 400, "tools", "'function'"),
        ("chat/completions", ASKED | {"tool_choice": "required"}, 400, "tool_choice", "not among the tools"),
        (
            "chat/completions",
            ASKED | {"tool_choice": {"type": "function", "function": {"name": "none"}}},
            400,
            "tool_choice",
            "not among the tools",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            400,
            "messages",
            "tool_calls must have",
        ),
        ("responses", {"input": []}, 400, "input", "input is empty"),
        ("responses", {"input": [{"type": "reasoning"}]}, 400, "input", "input[0]: type 'reasoning'"),
        ("responses", {"input": [{"role": "r" * 99, "content": "a"}]}, 400, "input", "at most 64"),
        (
            "responses",
            {"input": "a", "previous_response_id": "b"},
            400,
            "previous_response_id",
            "not know it",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input",
            "text only",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    url: str, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    found = post(url, f"/v1/{path}", body)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (status, param, status)
    assert message in error["message"]


def test_a_body_that_is_not_said_to_be_json(url: str) -> None:
    found = httpx.post(
        f"{url}/v1/completions",
        content=b'{"prompt": "x"}',
        headers={"content-type": "text/plain", "authorization": f"Bearer {KEY}"},
    )
    assert found.status_code == 415
    assert "Content-Type: application/json" in found.json()["error"]["message"]


def test_models_are_looked_up(client: openai.OpenAI) -> None:
    (one,) = client.models.list().data
    assert client.models.retrieve(one.id) == one
    with pytest.raises(openai.NotFoundError, match="there is no model 'a/b'"):
        client.models.retrieve("a/b")


def test_fields_that_are_null_are_as_if_they_were_not_there(url: str) -> None:
    nulls = ("n", "stream", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "logprobs", "seed")
    more: dict[str, Any] = dict.fromkeys((*nulls, "stop", "user", "stream_options"))
    same = [
        post(url, "/v1/completions", PROMPT | {"temperature": 0, "max_tokens": 4} | fields)
        for fields in ({}, more | {"echo": None})
    ]
    assert [found.status_code for found in same] == [200, 200]
    assert len({found.json()["choices"][0]["text"] for found in same}) == 1
    past = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": None},
        {"role": "user", "content": "z"},
    ]
    found = post(url, "/v1/chat/completions", {"messages": past, "max_tokens": 4, "seed": -1} | more)
    assert found.status_code == 200, found.text


def test_a_function_may_be_called_like_a_word_of_the_api(url: str) -> None:
    pytest.importorskip("llguidance")
    tool = {
        "type": "function",
        "function": {"name": "none", "parameters": {"type": "object", "additionalProperties": False}},
    }
    named = {"type": "function", "function": {"name": "none"}}
    body = ASKED | {"tools": [tool], "tool_choice": named, "parallel_tool_calls": False}
    found = post(url, "/v1/chat/completions", body).json()["choices"][0]
    assert found["message"]["tool_calls"][0]["function"]["name"] == "none"
    short = post(url, "/v1/responses", {"input": "x", "tools": [], "max_output_tokens": 2}).json()
    assert short["tool_choice"] == "auto"


def test_what_is_wrong_everywhere_is_said_once() -> None:
    for wrong in ([-1] * 1000, ["a", *[{}] * 1000], [[1], *[[-1] * 1000] * 1000]):
        with pytest.raises(pydantic.ValidationError) as caught:
            CompletionRequest(prompt=wrong)  # type: ignore[arg-type]
        assert caught.value.error_count() < 10


def test_halves_of_characters_are_replaced(url: str) -> None:
    body = {"input": "cut \ud83d", "metadata": {"a": "\udc00"}, "max_output_tokens": 2, "temperature": 0}
    found = post(url, "/v1/responses", body)
    assert (found.status_code, found.json()["metadata"]) == (200, {"a": "\ufffd"})
    again = post(url, "/v1/responses", body | {"input": "cut \ufffd"})
    assert again.json()["output"][0]["content"] == found.json()["output"][0]["content"]


def test_a_key_is_checked_before_a_body_is_read(url: str) -> None:
    assert post(url, "/v1/completions", b"{", key="not-a-key").status_code == 401
    assert post(url, "/v1/responses", b"x" * 4000, key=None).status_code == 401


def test_a_body_that_does_not_arrive_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.serve.http.base._BODY_S", 0.2)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1 << 16).split(b"\r\n")[0]


def test_several_texts_of_a_prompt_do_not_count_each_other_as_cached(url: str) -> None:
    body = {"prompt": "a prompt that no other test has", "max_tokens": 1, "n": 3}
    first, second = (post(url, "/v1/completions", body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 24


def test_what_responses_say_of_a_request_is_what_was_done(url: str) -> None:
    body = {"input": "x", "max_output_tokens": 3, "text": {"verbosity": "medium"}, "tools": []}
    found = post(url, "/v1/responses", body).json()
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")
    assert (found["temperature"], found["top_p"]) == (1.0, 1.0)
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    events = [
        json.loads(line[6:])
        for line in post(url, "/v1/responses", body | {"stream": True}).text.split("\n")
        if line.startswith("data: ")
    ]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


AMBIGUOUS = 'start: s\ns: "a" | s s | s s s | ""\n'


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_costs_too_much_is_the_client_s_fault(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("capibara.serve.grammar._MOST_S", 0.02)
    monkeypatch.setattr("capibara.serve.grammar._MOST_S_EACH", 0.0001)
    body = PROMPT | {"max_tokens": 100, "guided_grammar": AMBIGUOUS, "stream": stream, "ignore_eos": True}
    bias = {"logit_bias": {"97": 100}}
    found = post(url, "/v1/completions", body | bias)
    if stream:
        error = json.loads(found.text.strip().split("\n\n")[-1][6:])["error"]
    else:
        assert found.status_code == 400, found.text
        error = found.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert "Give one that is less ambiguous" in error["message"]
    assert engine.stalled_s() == 0


def test_more_texts_than_may_ever_wait_are_no_matter_of_time(url: str, engine: Engine) -> None:
    found = post(url, "/v1/completions", PROMPT | {"n": 7, "max_tokens": 1})
    assert (found.status_code, found.json()["error"]["code"]) == (400, 400)
    assert "at most max_waiting=6" in found.json()["error"]["message"]
    assert len(post(url, "/v1/completions", PROMPT | {"n": 6, "max_tokens": 1}).json()["choices"]) == 6


def test_a_wrong_method_is_told_the_right_one(url: str) -> None:
    found = httpx.get(f"{url}/v1/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")


def test_a_body_without_a_length_is_counted(url: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 100

    answer = httpx.post(f"{url}/v1/completions", content=pieces(), headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 413
    assert "larger than 5000 bytes" in answer.json()["error"]["message"]


def test_keys_are_checked(url: str, client: openai.OpenAI) -> None:
    for key in (None, "a-key-for-test", KEY + "s"):
        found = post(url, "/v1/completions", PROMPT, key)
        assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        wrong.models.list()
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(ConfigError, match="API key 2 has 3 characters"):
        Keys([KEY, "abc"])


def test_prefixes_are_shared_by_requests_of_one_key_only(url: str) -> None:
    body = PROMPT | {"prompt": "a prefix that is long enough for several pages", "max_tokens": 1}
    cached = [
        post(url, "/v1/completions", body, key).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in (KEY, OTHER, OTHER, KEY)
    ]
    assert cached == [0, 0, 40, 40]


def test_health_and_metrics(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{url}/metrics").text
    assert re.search(r'^vllm:num_requests_running\{model_name="tiny"\} 0.0$', text, re.MULTILINE)
    written = re.search(r'^vllm:generation_tokens_total\{model_name="tiny"\} ([\d.]+)$', text, re.MULTILINE)
    assert written is not None
    assert float(written[1]) == engine.statistics().generated_tokens > 0
    assert "vllm:time_to_first_token_seconds_bucket" in text
    monkeypatch.setattr(engine, "stalled_s", lambda: 6.5)
    refused = httpx.get(f"{url}/health")
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "no step finished for 6 s")


def test_a_client_that_goes_away_ends_its_texts(url: str, engine: Engine) -> None:
    body = PROMPT | {"max_tokens": 120, "n": 4, "stream": True, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
    ) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/completions",
            json=body | {"stream": False, "n": 4},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=httpx.Timeout(30, read=0.01),
        )
    end = time.monotonic() + 30
    while engine.statistics().running or engine.statistics().waiting:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.statistics().pages_used == 0
    assert engine.statistics().finished["cancelled"] > 0


def test_a_full_queue_says_when_to_come_again(url: str, engine: Engine) -> None:
    streams = [engine.submit(Request((9,), max_tokens=120, ignore_eos=True)) for _ in range(4)]
    while engine.statistics().waiting:
        time.sleep(0.001)
    streams += [engine.submit(Request((9,), max_tokens=120, ignore_eos=True)) for _ in range(4)]
    refused = post(url, "/v1/completions", PROMPT | {"n": 3, "max_tokens": 100, "ignore_eos": True})
    for stream in streams:
        stream.cancel()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    while engine.statistics().running or engine.statistics().waiting:
        time.sleep(0.01)


def test_where_nothing_more_may_wait_a_request_is_not_read(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.full_for_s() == 0
    monkeypatch.setattr(engine, "full_for_s", lambda: 2.5)
    refused = post(url, "/v1/completions", b"{ this is not even JSON")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert post(url, "/tokenize", {"prompt": "a"}).status_code == 200


def test_the_description_names_every_path(url: str) -> None:
    found = httpx.get(f"{url}/openapi.json").json()
    assert set(found["paths"]) == {
        "/health", "/metrics", "/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}", "/v1/completions",
        "/v1/chat/completions", "/v1/responses",
    }  # fmt: skip


@pytest.mark.slow
def test_random_requests_give_no_server_error(engine: Engine) -> None:
    """Schemathesis draws requests from the description."""
    import hypothesis
    import schemathesis

    app = create_app(engine, ServerSettings(Keys(), timeout_s=2.0))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    seen = set()
    checks: Any = list(hypothesis.HealthCheck)
    operations: Any = schema.get_all_operations()
    for result in operations:
        operation = result.ok()

        @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=checks)
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            response = case.call()
            seen.add(response.status_code)
            assert response.status_code < 500, (case.body, response.text)

        ask()
    assert {200, 400} <= seen
    assert np.isfinite(engine.stalled_s())
