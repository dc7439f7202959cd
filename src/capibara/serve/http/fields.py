"""The fields of requests, as OpenAI's API and vLLM name them. A field that is not here is refused by its name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from capibara.errors import ConfigError
from capibara.serve.http.errors import ApiError
from capibara.serve.requests import Grammar, Request
from capibara.serve.sampling import Sampling

__all__ = [
    "AdapterRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "Function",
    "TokenizeRequest",
    "called_tools",
]

# The first element that is wrong is enough: a message for each would be larger than what was sent.
_Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20, fail_fast=True)]
_Texts = (
    str
    | _Tokens
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[_Tokens], Field(fail_fast=True)]
)
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class _StreamOptions(_Strict):
    include_usage: bool = False


class _SchemaOf(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = ""
    of: dict[str, Any] | None = Field(default=None, alias="schema")


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _SchemaOf | None = None


class _Common(_Strict):
    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    n: Annotated[int, BeforeValidator(lambda given: 1 if given is None else given)] = Field(
        default=1, ge=1, le=128
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=256)] | None = (
        None
    )
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(default=0, ge=0, lt=1 << 31)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    guided_regex: str | None = Field(default=None, max_length=1 << 16)
    guided_choice: list[str] | None = Field(default=None, max_length=1024)
    guided_grammar: str | None = Field(default=None, max_length=1 << 18)
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    user: str | None = None

    def sampling(self, temperature: float) -> Sampling:
        """How tokens are chosen.

        Raises:
          ApiError: a bias is not of a token id.
        """
        biases = []
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or not token.isascii() or len(token) > 9:
                raise ApiError(400, f"logit_bias has {token[:20]!r}, expected token ids.", "logit_bias")
            biases.append((int(token), bias))
        try:
            return Sampling(
                temperature if self.temperature is None else self.temperature,
                max(0, self.top_k or 0),
                1.0 if self.top_p is None else self.top_p,
                self.min_p or 0.0,
                self.presence_penalty or 0.0,
                self.frequency_penalty or 0.0,
                1.0 if self.repetition_penalty is None else self.repetition_penalty,
                tuple(biases),
            )
        except ConfigError as error:
            raise ApiError(400, str(error)) from None

    def grammar(self) -> Grammar | None:
        """What the text must be.

        Raises:
          ApiError: several are given, or a schema is missing.
        """
        found = []
        if self.guided_regex is not None:
            found.append(Grammar("regex", self.guided_regex))
        if self.guided_choice is not None:
            if any("\n" in choice for choice in self.guided_choice):
                raise ApiError(
                    400, "guided_choice has a line break, which choices cannot have.", "guided_choice"
                )
            found.append(Grammar("choice", "\n".join(self.guided_choice)))
        if self.guided_grammar is not None:
            found.append(Grammar("lark", self.guided_grammar))
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            found.append(Grammar("json"))
        if wanted is not None and wanted.type == "json_schema":
            schema = None if wanted.json_schema is None else wanted.json_schema.of
            if schema is None:
                raise ApiError(400, "response_format has no json_schema.schema.", "response_format")
            found.append(Grammar("json_schema", json.dumps(schema)))
        if len(found) > 1:
            raise ApiError(
                400, "response_format and guided_…: only one of them can be given.", "response_format"
            )
        return found[0] if found else None

    def request(
        self,
        prompt: tuple[int, ...],
        number: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        temperature: float,
        salt: str,
        deadline_s: float | None,
        grammar: Grammar | None = None,
        adapter: str = "",
        prompt_logprobs: int | None = None,
    ) -> Request:
        """What the engine is asked for one of ``n`` texts, the ``number``-th."""
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Request(
            prompt,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            sampling=self.sampling(temperature),
            seed=None if self.seed is None else (self.seed + number) % (1 << 32),
            stop=stop,
            stop_tokens=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            grammar=self.grammar() if grammar is None else grammar,
            adapter=adapter,
            prompt_logprobs=prompt_logprobs,
            salt=salt,
            priority=self.priority,
            deadline_s=deadline_s,
        )


class CompletionRequest(_Common):
    """``/v1/completions``."""

    prompt: _Texts
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    best_of: Literal[1] | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: Function


class _Named(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str = Field(max_length=128)


class _Choice(_Strict):
    type: Literal["function"]
    function: _Named


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str = Field(max_length=64)
    content: str | list[dict[str, Any]] | None = None


def called_tools(
    functions: list[Function], named: str | None, *, required: bool
) -> list[dict[str, Any]] | None:
    """The functions of which one has to be called; ``None`` if none has to be.

    Args:
      named: the one that ``tool_choice`` names. required: any of them has to be.

    Raises:
      ApiError: there is no such function.
    """
    if named is None and not required:
        return None
    found = [f.model_dump() for f in functions if required or f.name == named]
    if not found:
        raise ApiError(
            400, f"tool_choice wants {named or 'a call'!r:.100}, which is not among the tools.", "tool_choice"
        )
    return found


class ChatRequest(_Common):
    """``/v1/chat/completions``."""

    messages: list[_Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[_Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def functions(self) -> list[Function]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def named(self) -> str | None:
        """The function that ``tool_choice`` names, if it does."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, _Choice) else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages for a chat template; parts of text are joined.

        Raises:
          ApiError: a part is no text.
        """
        found = []
        for message in self.messages:
            one = message.model_dump(exclude_unset=True)
            if isinstance(message.content, list):
                texts = [part.get("text") for part in message.content if part.get("type") == "text"]
                if len(texts) != len(message.content) or not all(isinstance(text, str) for text in texts):
                    raise ApiError(400, "messages: the model reads text only, no other parts.", "messages")
                one["content"] = "\n".join(map(str, texts))
            if message.content is None:
                one["content"] = ""
            if one.get("tool_calls") is None:
                one.pop("tool_calls", None)  # as clients send back what they were answered
            else:
                one["tool_calls"] = _past_calls(one["tool_calls"])
            found.append(one)
        return found


def _past_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier message for a chat template, which reads arguments as objects.

    Raises:
      ApiError: one is no call of a function.
    """
    found = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(call, dict)
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError(
                400, "messages: tool_calls must have {'function': {'name', 'arguments'}}.", "messages"
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise ApiError(
                    400, f"messages: arguments of {function['name']!r:.80} are not JSON.", "messages"
                ) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


class EmbeddingRequest(_Strict):
    """``/v1/embeddings``."""

    model: str | None = None
    input: _Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class AdapterRequest(_Strict):
    """``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str | None = Field(default=None, min_length=1, max_length=4096)


class TokenizeRequest(_Strict):
    """``/tokenize``, as vLLM has it."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(_Strict):
    """``/detokenize``."""

    model: str | None = None
    tokens: _Tokens
