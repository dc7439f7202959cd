"""From a record to tokens, and which of them a model is to learn to write.

Of a conversation these are the assistant's answers, of a prompt and its completion the completion, each with the token
that ends it; of a text all tokens. A conversation becomes text through the tokenizer's chat template. Where an answer
stands in that text the template says itself, by ``{% generation %}``; otherwise it stands between the text of the
messages before it, with the beginning of an answer, and the text that ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from capibara.data.chat import Rendered
from capibara.data.errors import ChatTemplateError, DocumentError
from capibara.data.records import text_of
from capibara.data.tokens import Tokenizer

__all__ = ["Example", "examples_of", "is_text"]

_BATCH = 64  # conversations that one process renders
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


@dataclass(frozen=True, eq=False)
class Example:
    """A document in tokens.

    Attributes:
      tokens: ids ``[n]``.
      answers: bool ``[n]``: the tokens to be learnt; None: all.
      size: bytes of its text.
    """

    tokens: np.ndarray
    answers: np.ndarray | None
    size: int


def is_text(record: Mapping[str, Any]) -> bool:
    """Whether a record is a plain text."""
    return "text" in record


def examples_of(records: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: Tokenizer) -> Iterator[Example]:
    """Yield the example of each record, in order.

    Args:
      records: each with its place for messages, as :func:`capibara.data.read_records` gives them.
      tokenizer: for conversations one with a chat template.

    Raises:
      DocumentError: a record is none of those that are known.
      ChatTemplateError: there is no template, or it refuses a conversation, or does not say where answers stand.
    """
    following = iter(records)
    while batch := list(islice(following, _BATCH)):
        conversations = {
            at: _conversation(record, where)
            for at, (where, record) in enumerate(batch)
            if not is_text(record) and _is_conversation(record)
        }
        rendered = iter(_rendered(tokenizer, [(batch[at][0], *found) for at, found in conversations.items()]))
        for at, (where, record) in enumerate(batch):
            if at in conversations:
                yield _of_spans(tokenizer, *next(rendered))
            elif is_text(record):
                text = text_of(record, "text", where)
                tokens = _ended(tokenizer, tokenizer.encode(text))
                yield Example(tokens, None, len(text.encode()))
            else:
                yield _completion(tokenizer, record, where)


def _is_conversation(record: Mapping[str, Any]) -> bool:
    return any(key in record for key in ("messages", "conversations")) or isinstance(
        record.get("prompt"), list
    )


def _completion(tokenizer: Tokenizer, record: Mapping[str, Any], where: str) -> Example:
    if "chosen" in record and "rejected" in record:
        raise DocumentError(
            f"{where} is a preference, with 'chosen' and 'rejected'. Remedy: finetune.objective=dpo"
        )
    if "completion" not in record:
        raise DocumentError(
            f"{where} has the keys {sorted(record)!s:.200}, expected 'text', 'messages', or 'prompt' and 'completion'"
        )
    prompt, completion = text_of(record, "prompt", where), text_of(record, "completion", where)
    before = tokenizer.encode(prompt) if prompt else np.zeros(0, np.int32)
    after = tokenizer.encode(completion, special=False) if completion else np.zeros(0, np.int32)
    after = _ended(tokenizer, after)
    if not after.size:
        raise DocumentError(f"{where}: the completion is empty, and the tokenizer has no end token")
    answers = np.arange(before.size + after.size) >= before.size
    return Example(np.concatenate([before, after]), answers, len((prompt + completion).encode()))


def _ended(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    end = tokenizer.end_token
    if end is None or (tokens.size and tokens[-1] == end):
        return tokens
    return np.concatenate([tokens, np.asarray([end], tokens.dtype)])


def _conversation(record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], int]:
    """Messages, and the first of them whose answers count."""
    if isinstance(record.get("prompt"), list):
        prompt, completion = record["prompt"], record.get("completion")
        if not isinstance(completion, list):
            raise DocumentError(f"{where}: prompt is a list of messages; expected 'completion' to be one too")
        return _messages([*prompt, *completion], where), len(prompt)
    key = "messages" if "messages" in record else "conversations"
    return _messages(record[key], where), 0


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise DocumentError(f"{where}: expected a list of messages, got {given!r:.80}")
    messages = []
    for one in given:
        if not isinstance(one, dict):
            raise DocumentError(f"{where}: expected a message with role and content, got {one!r:.80}")
        one = {key: value for key, value in one.items() if value is not None}
        if "from" in one and "value" in one:
            role = one.pop("from")
            one |= {"role": _ROLES.get(role, role), "content": one.pop("value")}
        if not isinstance(one.get("role"), str) or not ("content" in one or "tool_calls" in one):
            raise DocumentError(f"{where}: expected a message with role and content, got {one!r:.80}")
        if isinstance(one.get("content"), str):
            text_of(one, "content", where)
        messages.append(one)
    if not any(message["role"] == "assistant" for message in messages):
        raise DocumentError(
            f"{where}: has no message with the role 'assistant', so there is nothing to train on"
        )
    return messages


_Spans = list[tuple[int, int]]


def _rendered(
    tokenizer: Tokenizer, conversations: Sequence[tuple[str, list[dict[str, Any]], int]]
) -> Iterator[tuple[str, _Spans]]:
    """Each conversation's text, and where its answers stand."""
    if not conversations:
        return
    places = [where for where, _, _ in conversations]
    whole = _chats(tokenizer, [(messages, False) for _, messages, _ in conversations], places)
    wanted: list[tuple[list[dict[str, Any]], bool]] = []
    of: list[str] = []
    for (where, messages, first), (_, spans) in zip(conversations, whole, strict=True):
        if spans is None:
            for at in _answers(messages, first):
                wanted += [(messages[:at], True), (messages[: at + 1], False)]
                of += [where, where]
    parts = iter(_chats(tokenizer, wanted, of) if wanted else [])
    for (where, messages, first), (text, spans) in zip(conversations, whole, strict=True):
        at_answers = _answers(messages, first)
        if spans is not None:
            if len(spans) < len(at_answers):
                raise ChatTemplateError(
                    f"{where}: the chat template marks {len(spans)} answers of {len(at_answers)} by generation"
                )
            yield text, spans[len(spans) - len(at_answers) :]
            continue
        found = []
        for at in at_answers:
            (before, _), (after, _) = next(parts), next(parts)
            if not (after.startswith(before) and text.startswith(after)):
                raise ChatTemplateError(
                    f"{where}: message {at + 1} is rendered differently inside this conversation than at its end, so "
                    "the answer cannot be located. Remedy: a chat template that marks answers with "
                    "{% generation %}, or one conversation for each answer, as prompt and completion"
                )
            found.append((len(before), len(after)))
        yield text, found


def _chats(
    tokenizer: Tokenizer, several: list[tuple[list[dict[str, Any]], bool]], places: list[str]
) -> list[Rendered]:
    try:
        return tokenizer.chats(several)
    except ChatTemplateError as error:
        if error.number is None:
            raise
        raise ChatTemplateError(f"{places[error.number]}: {error}") from None


def _answers(messages: Sequence[Mapping[str, Any]], first: int) -> list[int]:
    return [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]


def _of_spans(tokenizer: Tokenizer, text: str, spans: _Spans) -> Example:
    tokens, starts = tokenizer.encode_places(text)
    answers = np.zeros(tokens.size, bool)
    for first, last in spans:
        answers |= (starts >= first) & (starts < last)
    return Example(tokens, answers, len(text.encode()))
