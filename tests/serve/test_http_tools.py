"""Functions that a model calls: what of a text is a call, and what a text must be that calls one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.data import ByteTokenizer
from capibara.serve.http.tools import Call, CallReader, ToolForm, calls_grammar, tool_form

TAGGED, PLAIN = ToolForm(True), ToolForm(False)
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"$ref": "#/$defs/Town"}},
        "required": ["town"],
        "additionalProperties": False,
        "$defs": {"Town": {"enum": ["Lima", "Quito"]}},
    },
}
LIMA = Call("weather", '{"town": "Lima"}')


def read(form: ToolForm, text: str, cuts: list[int] | None = None) -> tuple[str, list[Call]]:
    reader, said, calls, last = CallReader(form, ["weather", "time"]), "", [], 0
    for cut in [*sorted(cuts or []), len(text)]:
        new, found = reader.push(text[last:cut])
        said, calls, last = said + new, calls + found, cut
    new, found = reader.finish()
    assert reader.called == len(calls + found)
    return said + new, calls + found


CASES: list[Any] = [
    (TAGGED, "No call.", "No call.", []),
    (TAGGED, 'One <tool_call>\n{"name": "weather", "arguments": {"town": "Lima"}}\n</tool_call>', "One ", [LIMA]),
    (
        TAGGED,
        '<tool_call>{"name": "weather", "arguments": {"town": "Lima"}}</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
        "",
        [LIMA, Call("time", "{}")],
    ),
    (TAGGED, '<tool_call>{"name": "weather", "arguments": {"town": "Lima"}}', "", [LIMA]),  # no room for the tag
    (TAGGED, "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
    (TAGGED, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    (TAGGED, "1 < 2 <tool_c", "1 < 2 <tool_c", []),
    (PLAIN, "No call.", "No call.", []),
    (PLAIN, '{"name": "weather", "parameters": {"town": "Lima"}}', "", [LIMA]),
    (PLAIN, '[{"name": "weather", "arguments": {"town": "Lima"}}, {"name": "time"}]', "", [LIMA, Call("time", "{}")]),
    (PLAIN, '{"name": "time"}; {"name": "time"}', "", [Call("time", "{}")] * 2),
    (PLAIN, '{"name": "weather", "arguments": "{\\"town\\": \\"Lima\\"}"}', "", [LIMA]),
    (PLAIN, '{"name": "time"} or not', '{"name": "time"} or not', []),
    (PLAIN, '{"name": [], "arguments": {}}', None, []),
    (PLAIN, '{"name": "time", "arguments": {"a": NaN}}', None, []),
    (PLAIN, '{"name": "time", "arguments": "{\\"a\\": Infinity}"}', None, []),
    (PLAIN, '{"name": "time", "arguments": {"a": "\\ud800"}}', "", [Call("time", '{"a": "\\ud800"}')]),
    (PLAIN, '{"answer": 3}', '{"answer": 3}', []),
    (PLAIN, '{"name": "time", "arguments": [1]}', None, []),
    (PLAIN, 'It is {"name": "time"}', None, []),
    (PLAIN, "[" * 5000, None, []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
def test_what_is_a_call(form: ToolForm, text: str, said: str | None, calls: list[Call]) -> None:
    assert read(form, text) == (text if said is None else said, calls)


@given(st.sampled_from(CASES[:-1]), st.lists(st.integers(0, 200), max_size=12))
def test_where_a_text_is_cut_does_not_matter(case: Any, cuts: list[int]) -> None:
    form, text, said, calls = case
    found = read(form, text, [min(cut, len(text)) for cut in cuts])
    assert found[1] == calls
    assert found[0].strip() == (text if said is None else said).strip()


@pytest.mark.parametrize("form", [TAGGED, PLAIN, ToolForm(False, "parameters")])
@pytest.mark.parametrize("several", [False, True])
def test_a_text_that_has_to_call(form: ToolForm, several: bool) -> None:
    pytest.importorskip("llguidance")
    from capibara.serve.grammar import compile_grammar

    grammar = calls_grammar([WEATHER, {"name": "time"}], form, several=several)

    def ends(text: str) -> bool:
        """Whether the grammar takes the whole text, and nothing has to follow."""
        state = compile_grammar(grammar, ByteTokenizer(), 257)
        for number, byte in enumerate(text.encode(), start=1):
            if not state.allowed()[byte]:
                return False
            if not state.accept(byte):
                return number == len(text.encode())
        return bool(state.allowed()[256])

    def written(name: str, arguments: Any) -> str:
        body = json.dumps({"name": name, form.key: arguments})
        return f"<tool_call>\n{body}\n</tool_call>" if form.tagged else body

    good = written("weather", {"town": "Lima"})
    assert ends(good)
    assert read(form, good) == ("", [LIMA])
    between = "\n" if form.tagged else ";"
    assert ends(good + between + written("time", {"zone": 3})) == several
    assert not ends(written("weather", {"town": "Rome"}))
    assert not ends(written("rm", {}))
    assert not ends("I would rather not.")


def test_references_to_any_place_of_a_schema() -> None:
    pytest.importorskip("llguidance")
    from capibara.serve.grammar import compile_grammar

    closed = {"type": "object", "additionalProperties": False}
    parameters = closed | {
        "$id": "https://example.org/tool.json",
        "properties": {
            "size": {"enum": ["small", "large"]},
            "box": {"$ref": "#/properties/size"},
            "inner": {"$ref": "#"},
            "$ref": {"const": "#/properties/size"},
            "default": {"$ref": "#/properties/size"},
        },
        "required": ["size"],
    }
    grammar = calls_grammar([{"name": "f", "parameters": parameters}], PLAIN, several=False)

    def taken(arguments: Any) -> bool:
        state = compile_grammar(grammar, ByteTokenizer(), 257)
        text = json.dumps({"name": "f", "arguments": arguments}).encode()
        return all(state.allowed()[byte] and (state.accept(byte) or True) for byte in text)

    assert taken({"size": "small", "box": "large", "inner": {"size": "large"}})
    assert taken({"size": "small", "$ref": "#/properties/size"})
    assert taken({"size": "small", "default": "large"})
    assert not taken({"size": "small", "default": "vast"})
    assert not taken({"size": "small", "box": "vast"})
    assert not taken({"size": "small", "inner": {"box": "large"}})


def test_the_template_says_the_form() -> None:
    assert tool_form("… return <tool_call> … </tool_call>") == TAGGED
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert tool_form(llama) == ToolForm(False, "parameters")
    assert tool_form("[TOOL_CALLS]") == tool_form(None) == PLAIN
