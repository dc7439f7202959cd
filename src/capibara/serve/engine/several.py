"""Several tokens of each text by one call of a step's program.

Between two steps Python takes what a step gave, hands it on and calls the next program with all weights of the model.
On the processor that computes the steps, too, that takes time from them: of a small model a tenth. So the program of a
step of rows is a loop, which chooses the next token of each row itself, as often as it is asked to, and ends where
every text has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core.paged import StepShape
from capibara.serve.row_sampling import SamplingRows, rows_of
from capibara.serve.sampling import GREEDY

__all__ = ["MOST_ENDS", "MOST_TOKENS", "StepTimes", "TokenLoop", "Written", "one_token", "several_tokens"]

MOST_TOKENS = 8
"""The most tokens of each text by one call."""
MOST_ENDS = 8
"""The most token ids that end a text of which a loop knows; the others are found when its tokens are handed on."""
_AT_ONCE_S = 0.02  # that one call may take: a request that comes meanwhile waits for two such calls


class StepTimes:
    """How long steps of rows take, and so how many of them one call may compute.

    Args:
      clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[StepShape, float] = {}
        self._last = -math.inf

    def at_once(self, shape: StepShape) -> int:
        """How many steps fit into the time that one call may take; 1 where nothing is known."""
        return min(MOST_TOKENS, max(1, int(_AT_ONCE_S / self._seconds.get(shape, _AT_ONCE_S))))

    def finished(self, shape: StepShape, started: float, steps: int) -> None:
        """Note that steps have finished now, which began when those before them had.

        Args:
          started: when they were asked for, by the clock. steps: how many were computed.
        """
        now = self._clock()
        since, self._last = max(started, self._last), now
        if steps:
            each = max(1e-6, (now - since) / steps)
            self._seconds[shape] = (self._seconds.get(shape, each) + each) / 2


class TokenLoop(NamedTuple):
    """How far a loop goes.

    Attributes:
      tokens: int32 scalar, how many of each text, at most :data:`MOST_TOKENS`.
      alive: bool ``[rows]``: the rows whose texts have not ended, as far as is known; the loop goes on while one of
        them takes part in the step (``counts`` above 0).
      ends: int32 ``[rows, MOST_ENDS]``: the token ids after which none is wanted, below 0 where there are fewer.
      sampling: how the first token of each row is chosen; those after it have the numbers after its.
    """

    tokens: Any
    alive: Any
    ends: Any
    sampling: SamplingRows

    @classmethod
    def once(cls, rows: int) -> TokenLoop:
        """One token of every row, the likeliest."""
        none = [0] * rows
        greedy = rows_of([GREEDY] * rows, none, none)
        return cls(np.int32(1), np.ones(rows, bool), np.full((rows, MOST_ENDS), -1, np.int32), greedy)


class Written(NamedTuple):
    """What a loop wrote.

    Attributes:
      tokens: int32 ``[MOST_TOKENS, rows]``, below 0 after a text's end and in rows that take no part; of a step that is
        no loop ``[1, rows]``.
      last: int32 ``[rows]``, the last of each.
      alive: bool ``[rows]``, which of them have not ended; ``None`` of a step that is no loop.
    """

    tokens: Any
    last: Any
    alive: Any | None

    @property
    def steps(self) -> int:
        """How many were computed; waits for them."""
        return int((np.asarray(self.tokens) >= 0).any(axis=1).sum())


def one_token(step: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Written]]:
    """A step with rows and prompts, called as what :func:`several_tokens` makes of one: one token of each."""

    def run(weights: Any, cache: Any, inputs: dict[str, Any], loop: TokenLoop) -> tuple[Any, Any, Written]:
        logits, cache, tokens = step(weights, cache, inputs, loop.sampling)
        return logits, cache, Written(tokens[None], tokens, None)

    return run


def several_tokens(
    step: Callable[..., tuple[Any, Any, Any]], logits: jax.ShapeDtypeStruct
) -> Callable[..., tuple[Any, Any, Written]]:
    """A step of rows as a loop of them: ``(weights, cache, inputs, loop)`` to ``(logits, cache, written)``.

    Args:
      step: from weights, cache, inputs and sampling to logits, cache and the next token of each row.
      logits: what it gives.
    """

    def run(weights: Any, cache: Any, inputs: dict[str, Any], loop: TokenLoop) -> tuple[Any, Any, Written]:
        def goes_on(carry: Any) -> Any:
            count, _, _, written = carry
            return (count < loop.tokens) & written.alive.any()

        def one(carry: Any) -> Any:
            count, cache, _, (tokens, last, alive) = carry
            # Otherwise XLA converts whole tables of weights to another dtype before the loop, and keeps them there.
            here, last = jax.lax.optimization_barrier((weights, last))
            now = inputs | {"tokens": last, "starts": inputs["starts"] + count}
            sampling = loop.sampling._replace(number=loop.sampling.number + count)
            found_logits, cache, found = step(here, cache, now, sampling)
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, jnp.where(alive, found, -1), count, 0)
            last = jnp.where(alive, found, last)
            alive &= (found[:, None] != loop.ends).all(axis=1)
            return count + 1, cache, found_logits, Written(tokens, last, alive)

        none = jnp.full((MOST_TOKENS, *loop.alive.shape), -1, jnp.int32)
        # Of the call before there may be rows whose texts have ended by what it did not know.
        start = Written(none, inputs["tokens"], loop.alive & (inputs["counts"] > 0))
        empty = jnp.zeros(logits.shape, logits.dtype)
        _, cache, last, written = jax.lax.while_loop(goes_on, one, (jnp.int32(0), cache, empty, start))
        return last, cache, written

    return run
