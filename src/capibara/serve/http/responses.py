"""``/v1/responses``: conversations as items, answered whole or as typed events. Nothing is stored."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from capibara.serve.http.answers import Timed, event_json, event_stream, submitted, usage_of, while_connected
from capibara.serve.http.errors import ApiError
from capibara.serve.http.fields import ChatRequest, Function, called_tools
from capibara.serve.http.metrics import Metrics
from capibara.serve.http.tools import Call, CallReader, calls_grammar, tool_form
from capibara.serve.requests import EngineProtocol, RequestError, ServeError

__all__ = ["ResponsesRequest", "rendered", "respond"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Format(_Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    of: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class _Text(_Strict):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None


class _FunctionTool(Function):
    type: Literal["function"]


class _NamedTool(_Strict):
    type: Literal["function"]
    name: str = Field(max_length=128)


class ResponsesRequest(_Strict):
    """``/v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=4096)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = False
    text: _Text | None = None
    tools: list[_FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None

    @property
    def named(self) -> str | None:
        """The function that ``tool_choice`` names, if it does."""
        return self.tool_choice.name if isinstance(self.tool_choice, _NamedTool) else None

    @property
    def functions(self) -> list[Function]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or [])

    def as_chat(self) -> ChatRequest:
        """The same as a request for a chat, without tools.

        Raises:
          ApiError: an item is of a kind that the model does not read.
        """
        given: dict[str, Any] = {}
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            wanted: dict[str, Any] = {"type": self.text.format.type}
            given["response_format"] = wanted
            if self.text.format.type == "json_schema":
                schema = {"name": self.text.format.name or "", "schema": self.text.format.of}
                wanted["json_schema"] = schema
        given |= {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        try:
            return ChatRequest(messages=self._messages(), **given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ApiError(
                400, f"input: {'.'.join(map(str, first['loc']))}: {first['msg']}", "input"
            ) from None

    def _messages(self) -> list[Any]:
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(400, "input is empty: send a text, or items.", "input")
        for number, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "message" and isinstance(item.get("role"), str):
                role = "system" if item["role"] == "developer" else item["role"]
                found.append({"role": role, "content": _content(number, item.get("content"))})
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if found and found[-1].get("tool_calls"):
                    found[-1]["tool_calls"].append(call)
                else:
                    found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif kind == "function_call_output":
                said = {"tool_call_id": item.get("call_id"), "content": _content(number, item.get("output"))}
                found.append({"role": "tool", **said})
            else:
                raise ApiError(
                    400,
                    f"input[{number}]: type {str(kind)[:60]!r} is not known; expected message, function_call or "
                    "function_call_output.",
                    "input",
                )
        return found


def _content(number: int, content: Any) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    if not kinds <= {"input_text", "output_text", "text"} or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"input[{number}]: the model reads text only, no other parts.", "input")
    return "\n".join(map(str, texts))


async def rendered(
    engine: EngineProtocol, messages: Sequence[dict[str, Any]], functions: Sequence[Function]
) -> tuple[int, ...]:
    """The token ids of a conversation, through the model's chat template."""

    def now() -> tuple[int, ...]:
        told = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in functions]
        more = {"tools": told} if told else {}
        text = engine.tokenizer.chat(messages, **more)
        return tuple(engine.tokenizer.encode(text, special=False).tolist())

    return await asyncio.to_thread(now)


async def respond(
    engine: EngineProtocol,
    metrics: Metrics,
    body: ResponsesRequest,
    http: Request,
    salt: str,
    *,
    adapter: str,
    deadline_s: float | None,
    temperature: float,
) -> Response:
    """Answer one request."""
    chat = body.as_chat()
    form = tool_form(getattr(engine.tokenizer, "template", None))
    forced = called_tools(body.functions, body.named, required=body.tool_choice == "required")
    grammar = chat.grammar()
    if forced is not None:
        if grammar is not None:
            raise ApiError(400, "tool_choice and text.format: only one of them can be given.", "tools")
        grammar = calls_grammar(forced, form, several=body.parallel_tool_calls is not False)
    prompt = await rendered(engine, chat.conversation(), body.functions)
    asked = chat.request(
        prompt,
        0,
        max_tokens=body.max_output_tokens,
        logprobs=None,
        temperature=temperature,
        salt=salt,
        deadline_s=deadline_s,
        grammar=grammar,
        adapter=adapter,
    )
    texts = await submitted(engine, metrics, [asked])
    answer = _Answer(body, adapter or engine.name, [prompt], texts)
    reader = CallReader(form, [f.name for f in body.functions])
    if body.stream:
        return event_stream(answer.events(reader if body.functions else None))
    text, _, reason = (await while_connected(http, texts))[0]
    calls: list[Call] = []
    if body.functions:
        (text, calls), (more, last) = reader.push(text), reader.finish()
        text, calls = text + more, calls + last
    status = "completed" if reason == "stop" else "incomplete"
    if text or not calls:
        answer.output.append(_message(text, status))
    answer.output += [_call_item(call) for call in calls]
    return JSONResponse(answer.to_json(status))


def _message(text: str | None, status: str, name: str | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    content = [] if text is None else [part]
    name = name or f"msg_{uuid.uuid4().hex}"
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}


def _code(error: ServeError) -> str:
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _call_item(call: Call) -> dict[str, Any]:
    made = call.to_json()
    said = {"call_id": made["id"], "name": call.name, "arguments": call.arguments, "status": "completed"}
    return {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", **said}


class _Answer:
    """A response that is being written.

    Attributes:
      output: its items.
    """

    def __init__(
        self, body: ResponsesRequest, model: str, prompts: list[tuple[int, ...]], texts: list[Timed]
    ) -> None:
        self._body, self._model, self._prompts, self._texts = body, model, prompts, texts
        self._id, self._created, self._number = f"resp_{uuid.uuid4().hex}", int(time.time()), 0
        self.output: list[dict[str, Any]] = []

    def to_json(self, status: str, error: ServeError | None = None) -> dict[str, Any]:
        """The response as OpenAI's API has it."""
        body = self._body
        read, cached, written = usage_of(self._prompts, self._texts)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None if error is None else {"code": _code(error), "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._texts[0].stream.request.sampling.temperature,
            "text": {"format": {"type": "text"}}
            | ({} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)),
            "tool_choice": "auto"
            if body.tool_choice is None
            else body.tool_choice
            if body.named is None
            else {"type": "function", "name": body.named},
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": self._texts[0].stream.request.sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else usage,
            "user": body.user,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {event_json(content)}\n\n"

    async def events(self, reader: CallReader | None) -> AsyncIterator[str]:
        """The events of the answer, as its text is written."""
        text, status = self._texts[0], "completed"
        try:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self.to_json("in_progress"))
            said: list[str] = []
            name = f"msg_{uuid.uuid4().hex}"
            place = {"item_id": name, "output_index": 0, "content_index": 0}
            calls: list[Call] = []
            async for piece in text.pieces():
                new, found = (piece.text, []) if reader is None else reader.push(piece.text)
                if piece.finish is not None and reader is not None:
                    more, last = reader.finish()
                    new, found = new + more, found + last
                calls += found
                if piece.finish == "length" or piece.finish == "cancelled":
                    status = "incomplete"
                if new or (piece.finish is not None and not said and not calls):
                    if not said:
                        yield self._event(
                            "response.output_item.added",
                            output_index=0,
                            item=_message(None, "in_progress", name),
                        )
                        part = _message("", "in_progress")["content"][0]
                        yield self._event("response.content_part.added", **place, part=part)
                    said.append(new)
                    yield self._event("response.output_text.delta", **place, delta=new, logprobs=[])
            if said:
                item = _message("".join(said), status, name)
                part = item["content"][0]
                yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield self._event("response.content_part.done", **place, part=part)
                yield self._event("response.output_item.done", output_index=0, item=item)
                self.output.append(item)
            for call in calls:
                for event in self._call_events(_call_item(call)):
                    yield event
            yield self._event(f"response.{status}", response=self.to_json(status))
        except ServeError as error:
            yield self._event("response.failed", response=self.to_json("failed", error))
        finally:
            text.stream.cancel()

    def _call_events(self, item: dict[str, Any]) -> list[str]:
        index = len(self.output)
        self.output.append(item)
        place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event(
                "response.function_call_arguments.done", **place, arguments=arguments, name=item["name"]
            ),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
