"""Chat templates: the text that transformers makes of them, and what bad ones can not do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from capibara.data import ByteTokenizer, ChatTemplateError, FileTokenizer, render_chat
from capibara.data.tokenizer_file import byte_tokenizer_files

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

TEMPLATE = """{%- if tools %}
    {{- '<tools>' + tools | tojson + '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {%- if loop.first and message.role == 'system' %}
        {{- bos_token + '<<' + message.content | trim + '>>\\n' }}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- '[' + message.role + '] ' + message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}[assistant] {% endif %}"""
MESSAGES = [
    {"role": "system", "content": "  Be <brief> & kind. "},
    {"role": "user", "content": "Hällo {{ 7 * 7 }}"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer(template: object) -> FileTokenizer:
    settings = json.dumps({**SETTINGS, "chat_template": template}).encode()
    return FileTokenizer(byte_tokenizer_files() | {"tokenizer_config.json": settings})


def test_a_conversation_becomes_text() -> None:
    told = tokenizer(TEMPLATE).chat(MESSAGES)
    assert told == "<s><<Be <brief> & kind.>>\n[user] Hällo {{ 7 * 7 }}\nHi</s>[user] Bye\n[assistant] "
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert tokenizer(named).chat(MESSAGES) == told
    file = tokenizer("no").files | {"chat_template.jinja": TEMPLATE.encode()}
    assert FileTokenizer(file).chat(MESSAGES, generate=False) + "[assistant] " == told


def test_it_is_the_text_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tokenizer(TEMPLATE)
    for name, content in ours.files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "description": "Ünïcode <b>", "parameters": {}}}]
    for generate in (True, False):
        for given in (None, tools):
            expected = theirs.apply_chat_template(
                MESSAGES, tools=given, tokenize=False, add_generation_prompt=generate
            )
            assert ours.chat(MESSAGES, generate=generate, tools=given) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ missing.attribute }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 16777216 characters"),
        ("{{ 'x'.ljust(99999999999) }}", "memory"),
        ("{% include '/etc/passwd' %}", "TypeError"),
    ],
)
def test_bad_templates_end_with_an_error(template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render_chat(template, {"messages": []})


def test_an_endless_template_is_ended() -> None:
    begun = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"not rendered within 0\.5 s"):
        render_chat(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}, seconds=0.5
        )
    assert time.monotonic() - begun < 60


def test_what_has_no_template_says_so() -> None:
    for one in (ByteTokenizer(), FileTokenizer(byte_tokenizer_files())):
        with pytest.raises(ChatTemplateError, match=r"without a chat template|no chat template"):
            one.chat(MESSAGES)
    with pytest.raises(ChatTemplateError, match="JSON values"):
        tokenizer(TEMPLATE).chat([{"role": "user", "content": b"bytes"}])
