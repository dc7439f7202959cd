"""Functions that a model may call: how it is told to, and what of its text is a call.

Models write calls in one of two forms. *Tagged*, as Hermes, Qwen and others do: ``<tool_call>{"name": …, "arguments":
…}</tool_call>`` among other text. *Plain*, as Llama and Mistral do: a text that is nothing but such an object, or a
list of them. The model's own chat template says which.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.serve.requests import Grammar

__all__ = ["Call", "CallReader", "ToolForm", "calls_grammar", "tool_form"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls.

    Attributes:
      tagged: between tags. key: what it calls the arguments.
    """

    tagged: bool
    key: str = "arguments"


@dataclass(frozen=True)
class Call:
    """A call: the function's name, and its arguments as a JSON object."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def tool_form(template: str | None) -> ToolForm:
    """The form that a chat template teaches."""
    if template is not None and _OPEN in template:
        return ToolForm(True)
    # Llama's templates ask for {"name": function name, "parameters": dictionary …}.
    plain = template is not None and re.search(r'"parameters\\?": dictionary', template)
    return ToolForm(False, "parameters" if plain else "arguments")


def calls_grammar(tools: Sequence[Mapping[str, Any]], form: ToolForm, *, several: bool) -> Grammar:
    """What a text has to be that calls one of these functions, or, with ``several``, one or more of them.

    Args:
      tools: OpenAI's ``function`` objects, with ``name`` and ``parameters``, a JSON schema.
    """
    names = [f"tool_{i}" for i in range(len(tools))]
    one = f'"{_OPEN}\\n" tool "\\n{_CLOSE}"' if form.tagged else "tool"
    between = '"\\n"' if form.tagged else '";"'
    lines = [f"start: call ({between} call)*" if several else "start: call", f"call: {one}"]
    lines.append("tool: " + " | ".join(names))
    lines += [f"{name}: %json {_schema(tool, form)}" for name, tool in zip(names, tools, strict=True)]
    return Grammar("lark", "\n".join(lines))


def _schema(tool: Mapping[str, Any], form: ToolForm) -> str:
    # References begin at the root of the schema, which is now a larger one, without a name of its own.
    parameters = {key: value for key, value in (tool.get("parameters") or {}).items() if key != "$id"}
    shared = {"$defs": {"of": _moved(parameters or {"type": "object"})}}
    properties = {"name": {"const": tool["name"]}, form.key: {"$ref": "#/$defs/of"}}
    whole = {"type": "object", "properties": properties, "required": ["name", form.key]}
    # As models were shown calls: with one blank after commas and colons, and no other white space.
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**whole, "additionalProperties": False, **shared, "x-guidance": spaces})


_VALUES = frozenset({"const", "enum", "default", "examples"})
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _moved(schema: Any) -> Any:
    """A schema whose references to itself say where it is now."""
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = "#/$defs/of" + value[1:]
        elif key in _OF_NAMES and isinstance(value, dict):  # keys are names here, whatever they are
            found[key] = {name: _moved(one) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else _moved(value)
    return found


def _no_number(text: str) -> Any:
    """Python reads constants that JSON does not have."""
    raise ValueError(f"{text} is not JSON")


class CallReader:
    """Divides a text, as it is written, into what is said and what is called.

    Args:
      form: how the model writes calls. names: of the functions; what calls another is said.

    Attributes:
      called: how many calls were found.
    """

    def __init__(self, form: ToolForm, names: Sequence[str]) -> None:
        self._tagged, self._names = form.tagged, frozenset(names)
        self._held = ""
        self._said = False
        self.called = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More of the text: what is now certain to be said, and the calls that are whole."""
        self._held += text
        return self._tags() if self._tagged else self._plain()

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back."""
        held, self._held = self._held, ""
        if self._tagged and held.startswith(_OPEN):  # the text ended within a call
            found = self._calls(held.removeprefix(_OPEN))
        else:
            found = [] if self._tagged or self._said else self._calls(held)
        return ("", self._count(found)) if found else (held, [])

    def _tags(self) -> tuple[str, list[Call]]:
        said, calls = "", []
        while True:
            begin = self._held.find(_OPEN)
            if begin < 0:
                most = min(len(_OPEN) - 1, len(self._held))
                kept = next((n for n in range(most, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
                cut = len(self._held) - kept
                said, self._held = said + self._held[:cut], self._held[cut:]
                break
            said, self._held = said + self._held[:begin], self._held[begin:]
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            end += len(_CLOSE)
            found = self._calls(self._held[len(_OPEN) : end - len(_CLOSE)])
            if found:
                calls += found
                self._held = self._held[end:].lstrip("\n")
            else:
                said, self._held = said + self._held[:end], self._held[end:]
        # White space between calls is not said.
        if calls and not said.strip():
            said = ""
        return said, self._count(calls)

    def _plain(self) -> tuple[str, list[Call]]:
        start = self._held.lstrip()
        if not self._said and (not start or start[0] in "{["):
            return "", []
        self._said = True
        said, self._held = self._held, ""
        return said, []

    def _count(self, calls: list[Call]) -> list[Call]:
        self.called += len(calls)
        return calls

    def _calls(self, text: str) -> list[Call]:
        """The calls that a text consists of; none if it is anything else."""
        decoder, at, found = json.JSONDecoder(parse_constant=_no_number), 0, []
        while at < len(text):
            if text[at] in " \t\r\n;":
                at += 1
                continue
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            for one in value if isinstance(value, list) else [value]:
                call = self._call(one)
                if call is None:
                    return []
                found.append(call)
        return found

    def _call(self, value: Any) -> Call | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, parse_constant=_no_number)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        # Half of a pair of surrogates, which a model may write as an escape, cannot be sent but as one.
        return Call(name, json.dumps(arguments, allow_nan=False))
