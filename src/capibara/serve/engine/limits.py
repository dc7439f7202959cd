"""What an engine refuses of a request before it waits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capibara.errors import ConfigError
from capibara.serve.engine.programs import MOST_SCORES
from capibara.serve.requests import Request, RequestError
from capibara.serve.token_ids import checked_ids

__all__ = ["check_request", "is_integer"]


def is_integer(value: Any, least: int, most: int) -> bool:
    """Whether it is an integer in a range; ``True`` is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) <= most


def check_request(
    request: Request, *, max_length: int, capacity: int, vocabulary: int
) -> tuple[list[int], int]:
    """A request's prompt, and how many tokens may follow it.

    Args:
      request: from anywhere; its fields may have any type.
      max_length: most tokens of a prompt and its answer. capacity: positions of all pages. vocabulary: token ids.

    Raises:
      RequestError: a field has another type or is out of range; the message names it.
    """
    try:
        prompt = checked_ids("prompt", request.prompt, vocabulary)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    least = 1 if request.prompt_logprobs is None else 0
    room = max_length - len(prompt)
    if room < least:
        raise RequestError(
            f"prompt has {len(prompt)} tokens, and max_length={max_length} leaves no room for an answer. Shorten the "
            "prompt."
        )
    wanted = request.max_tokens
    if wanted is not None and not is_integer(wanted, least, room):
        raise RequestError(
            f"max_tokens={wanted!r:.50}: expected an integer from {least} to {room}, what max_length={max_length} "
            f"leaves after a prompt of {len(prompt)} tokens."
        )
    if len(prompt) + (least if wanted is None else wanted) > capacity:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens and max_tokens={wanted} do not fit the cache, which has {capacity} "
            "positions. Ask for less."
        )
    for name, value, most in (
        ("logprobs", request.logprobs, MOST_SCORES),
        ("prompt_logprobs", request.prompt_logprobs, MOST_SCORES),
        ("seed", request.seed, (1 << 32) - 1),
        ("min_tokens", request.min_tokens, (1 << 31) - 1),
    ):
        if value is not None and not is_integer(value, 0, most):
            raise RequestError(f"{name}={value!r:.50}: expected an integer from 0 to {most}.")
    if not is_integer(request.priority, -(1 << 31), (1 << 31) - 1):
        raise RequestError(
            f"priority={request.priority!r:.50}: expected an integer of 32 bits; the lowest runs first."
        )
    limit = request.deadline_s
    if limit is not None and not (isinstance(limit, int | float) and 0 <= limit < math.inf):
        raise RequestError(f"deadline_s={limit!r:.50}: expected a number of seconds of at least 0.")
    if not isinstance(request.stop, tuple | list) or not all(isinstance(one, str) for one in request.stop):
        raise RequestError(f"stop={request.stop!r:.50}: expected a tuple of strings.")
    ends = request.stop_tokens
    if not isinstance(ends, frozenset | set | tuple | list) or not all(
        is_integer(token, 0, (1 << 31) - 1) for token in ends
    ):
        raise RequestError(f"stop_tokens={ends!r:.50}: expected a set of token ids.")
    if wrong := [token for token, _ in request.sampling.logit_bias if token >= vocabulary]:
        raise RequestError(f"logit_bias has token {wrong[0]}: ids are below {vocabulary}.")
    room = min(room, capacity - len(prompt))
    return [int(token) for token in prompt], room if wanted is None else int(wanted)
