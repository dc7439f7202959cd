"""Chat templates: programs of strangers that turn a conversation into text.

A template is Jinja and comes with a model's files. It is rendered in Jinja's sandbox, which keeps it from Python's
attributes, in a process of its own, which bounds its time, memory and output: ``{% for %}`` over ``range(10**9)``
or ``"%999999999d"`` is ended, not waited for.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.data.errors import ChatTemplateError
from capibara.errors import MissingExtraError, printable

__all__ = ["MOST_OUTPUT", "Rendered", "render_chat", "render_chats"]

MOST_OUTPUT = 16 << 20
"""Most characters of a rendered conversation."""

Rendered = tuple[str, list[tuple[int, int]] | None]
"""A conversation's text, and what of it the template marks by ``{% generation %}``: from character, to character; None
if it marks nothing."""

_MEMORY = 1 << 30
_SECONDS = 10.0
_CHILD = Path(__file__).with_name("_chat_process.py")


def render_chat(template: str, variables: Mapping[str, Any], *, seconds: float = _SECONDS) -> str:
    """Render a chat template, as ``apply_chat_template`` of transformers does.

    Args:
      template: Jinja. It may call ``raise_exception(message)`` and ``strftime_now(format)``.
      variables: JSON values: ``messages``, ``add_generation_prompt``, ``bos_token`` …
      seconds: the most it may take.

    Raises:
      ChatTemplateError: the template is invalid, refuses the messages, or exceeds a limit.
      MissingExtraError: the package ``jinja2`` is not installed.
    """
    return render_chats(template, [variables], seconds=seconds)[0][0]


def render_chats(
    template: str, several: Sequence[Mapping[str, Any]], *, seconds: float = _SECONDS
) -> list[Rendered]:
    """Render a chat template for several conversations, in one process and within one set of limits.

    Args:
      several: the variables of each. Other arguments and errors as for :func:`render_chat`.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError("jinja2", "text", "a chat template")
    request = {
        "path": sys.path,
        "template": template,
        "several": [dict(variables) for variables in several],
        "memory": _MEMORY,
        "seconds": int(seconds) + 1,
        "output": MOST_OUTPUT,
    }
    try:
        content = json.dumps(request)
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"messages: expected JSON values ({error!s:.200})") from None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_CHILD)],
            input=content.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(
            f"chat template: not rendered within {seconds:g} s. Remedy: another template"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ChatTemplateError(
            f"chat template: exceeded {_MEMORY >> 20} MiB of memory or {seconds:g} s of processor time. Remedy: "
            "another template"
        ) from None
    if "error" in answer:
        raise ChatTemplateError(
            f"chat template: {printable(answer['error'], 600)}. Remedy: messages that the template takes, or another "
            "template",
            answer.get("number"),
        )
    return [(text, spans and [(first, last) for first, last in spans]) for text, spans in answer["rendered"]]
