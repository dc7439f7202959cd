"""Records: which forms are read, what of them is learnt, and what is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.data import (
    ByteTokenizer,
    ChatTemplateError,
    DocumentError,
    Example,
    FileTokenizer,
    examples_of,
    read_records,
)
from capibara.data.tokenizer_file import byte_tokenizer_files

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "Hällo"},
    {"role": "assistant", "content": "Hi 🏊"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


def tokenizer(template: str) -> FileTokenizer:
    settings = json.dumps({"chat_template": template}).encode()
    return FileTokenizer(byte_tokenizer_files() | {"tokenizer_config.json": settings})


def example(record: dict[str, Any], template: str = PLAIN) -> Example:
    (found,) = examples_of([("here", record)], tokenizer(template))
    return found


def learnt(found: Example) -> list[str]:
    """The runs of tokens that are learnt, as text."""
    runs, before = [], False
    assert found.answers is not None
    for token, answer in zip(found.tokens, found.answers, strict=True):
        if answer and not before:
            runs.append(b"")
        if answer:
            runs[-1] += bytes([token])
        before = answer
    return [run.decode() for run in runs]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_conversation_the_answers(template: str) -> None:
    found = example({"messages": TALK}, template)
    text = "<user>Hällo</s><assistant>Hi 🏊</s><user>Bye</s><assistant>So long</s>"
    assert bytes(found.tokens.astype(np.uint8)).decode() == text
    assert learnt(found) == ["Hi 🏊</s>", "So long</s>"]
    assert found.size == len(text.encode())


def test_other_forms_of_conversations() -> None:
    shared = [
        {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"], "other": None}
        for m in TALK
    ]
    want = example({"messages": TALK})
    for record in ({"conversations": shared}, {"messages": [*TALK], "text": None, "id": 3}):
        record = {key: value for key, value in record.items() if value is not None}
        np.testing.assert_array_equal(example(record).tokens, want.tokens)
        np.testing.assert_array_equal(example(record).answers, want.answers)
    # Only what stands under `completion` is learnt.
    parts = {"prompt": TALK[:3], "completion": TALK[3:]}
    for template in (PLAIN, MARKED):
        np.testing.assert_array_equal(example(parts, template).tokens, want.tokens)
        assert learnt(example(parts, template)) == ["So long</s>"]


def test_the_mask_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tokenizer(MARKED)
    for name, content in ours.files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    told = theirs.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    found = example({"messages": TALK}, MARKED)
    assert found.tokens.tolist() == list(told["input_ids"])
    assert found.answers is not None
    assert found.answers.astype(int).tolist() == list(told["assistant_masks"])


def test_many_conversations_are_rendered_together() -> None:
    records: list[tuple[str, dict[str, Any]]] = [
        (f"line {n}", {"messages": [*TALK[:1], {"role": "assistant", "content": f"{n}"}]}) for n in range(150)
    ]
    records.insert(70, ("line", {"text": "plain"}))
    found = list(examples_of(records, tokenizer(PLAIN)))
    assert found.pop(70).answers is None
    assert [learnt(one) for one in found] == [[f"{n}</s>"] for n in range(150)]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"labels": 3}, "here has the keys .* expected 'text', 'messages'"),
        ({"prompt": "x"}, "expected 'text', 'messages', or 'prompt' and 'completion'"),
        ({"prompt": "x", "completion": 3}, "expected a string under 'completion', got int"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": ["x"]}, "expected a message with role and content, got 'x'"),
        ({"messages": [{"role": "user"}]}, "expected a message with role and content"),
        ({"messages": TALK[:1]}, "no message with the role 'assistant'"),
        ({"messages": [{"role": "assistant", "content": "\ud83d"}]}, "half of a surrogate pair"),
        ({"prompt": TALK, "completion": "x"}, "expected 'completion' to be one too"),
    ],
)
def test_what_is_no_record_is_named(record: dict[str, Any], words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        example(record)


def test_templates_that_do_not_say_where_answers_stand() -> None:
    last = "{% for m in messages %}{{ m.content }}{% if loop.last %}.{% endif %}{% endfor %}"
    with pytest.raises(
        ChatTemplateError, match=r"here: message 2 is rendered differently .* Remedy: a chat template"
    ):
        example({"messages": TALK}, last)
    with pytest.raises(ChatTemplateError, match="marks 1 answers of 2"):
        example({"messages": TALK}, "{% generation %}x{% endgeneration %}")
    with pytest.raises(ChatTemplateError, match=r"here: .* no answers today"):
        example({"messages": TALK}, "{{ raise_exception('no answers today') }}")
    with pytest.raises(ChatTemplateError, match="bytes, without a chat template"):
        list(examples_of([("here", {"messages": TALK})], ByteTokenizer()))


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [{"messages": TALK, "text": None}, {"messages": None, "text": "plain"}] * 200
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    found = list(read_records(path))
    assert [record for _, record in found[:2]] == [{"messages": TALK}, {"text": "plain"}]
    assert (len(found), found[399][0]) == (400, f"{path}: row 400")
    parquet.write_table(arrow.table({"x": [1]}), path)
    with pytest.raises(DocumentError, match=r"has the columns \['x'\]"):
        list(read_records(path))
    with pytest.raises(OSError, match="No such file"):
        list(read_records(tmp_path / "none.parquet"))


def test_damaged_parquet_is_an_error(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"Text {n}" for n in range(500)]
    parquet.write_table(arrow.table({"text": texts}), path, write_page_checksum=True)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(100):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            damaged[at] = int(rng.integers(256))
        path.write_bytes(bytes(damaged[: len(whole) - number % 3 * 20]))
        try:
            found = [record.get("text") for _, record in read_records(path)]
        except DocumentError:
            continue
        assert found == texts
