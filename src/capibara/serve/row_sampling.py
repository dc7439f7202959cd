"""Choosing the next tokens of a batch whose rows have settings of their own.

The settings are arrays, so that one compiled program serves any mixture of them. In this order: penalties and biases,
the temperature, top-k, top-p, min-p. A row's random numbers depend on its seed and on which of its tokens is chosen
alone, and nothing of a row depends on another row: the same request gives the same text whatever shares its batch, and
whether or not it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.serve.sampling import GREEDY_BELOW, Sampling

__all__ = [
    "Changes",
    "Chosen",
    "SamplingRows",
    "choose",
    "choose_alone",
    "keep_likeliest",
    "likeliest",
    "rows_of",
]

# Likeliest tokens among which the last one that is kept mostly is.
_FIRST = 256


class SamplingRows(NamedTuple):
    """The settings of a batch, an entry for each row.

    Attributes:
      temperature, top_p, min_p: float32 ``[rows]``. top_k: int32.
      seed: uint32. number: int32, which of its text's tokens is chosen, from 0.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    number: Any


class Changes(NamedTuple):
    """What is done to the logits first.

    Attributes:
      bias: float32 ``[rows, vocab]``, added; −∞ for tokens that are not allowed, whatever their logit.
      generated: int32 ``[rows, vocab]``, how often each token was generated.
      seen: bool ``[rows, vocab]``, whether the prompt or the text has it.
      presence, frequency, repetition: float32 ``[rows]``, the penalties.
    """

    bias: Any
    generated: Any
    seen: Any
    presence: Any
    frequency: Any
    repetition: Any


class Chosen(NamedTuple):
    """The tokens, and how likely they were: natural logarithms under the model's own distribution, before any setting.

    Attributes:
      tokens: int32 ``[rows]``. logprobs: float32 ``[rows]``.
      top_tokens, top_logprobs: ``[rows, top]``, the likeliest tokens in descending order.
      All but the tokens may be ``None``, where nobody asks for scores.
    """

    tokens: Any
    logprobs: Any
    top_tokens: Any
    top_logprobs: Any


def rows_of(samplings: Sequence[Sampling], seeds: Sequence[int], numbers: Sequence[int]) -> SamplingRows:
    """The settings of rows as arrays of NumPy."""
    return SamplingRows(
        np.array([s.temperature for s in samplings], np.float32),
        np.array([s.top_k for s in samplings], np.int32),
        np.array([s.top_p for s in samplings], np.float32),
        np.array([s.min_p for s in samplings], np.float32),
        np.array(seeds, np.uint32),
        np.array(numbers, np.int32),
    )


def choose(logits: jax.Array, rows: SamplingRows, changes: Changes | None = None, *, top: int = 0) -> Chosen:
    """Choose one token for each row.

    Args:
      logits: float ``[rows, vocab]``.
      rows: the settings; a temperature of 0 takes the likeliest token, the lowest id of equal ones.
      changes: ``None`` for rows without penalties, biases and masks.
      top: how many of the likeliest tokens are returned; static.
    """
    logits = logits.astype(jnp.float32)
    own = jax.nn.log_softmax(logits, axis=-1)
    tokens = choose_alone(logits if changes is None else _changed(logits, changes), rows)
    logprobs = jnp.take_along_axis(own, tokens[:, None], axis=1)[:, 0]
    top_logprobs, top_tokens = (
        lax.top_k(own, top) if top else (own[:, :0], jnp.zeros((own.shape[0], 0), jnp.int32))
    )
    return Chosen(tokens, logprobs, top_tokens, top_logprobs)


def choose_alone(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """The tokens of :func:`choose` alone, int32 ``[rows]``, from float32 logits that are not changed any more."""
    greedy = rows.temperature < GREEDY_BELOW
    # Where every row is greedy nothing is drawn, and where no row leaves tokens out nothing is sorted.
    return lax.cond(
        jnp.all(greedy),
        lambda: likeliest(logits),
        lambda: jnp.where(greedy, likeliest(logits), _drawn(logits, rows, greedy)),
    )


def likeliest(logits: jax.Array) -> jax.Array:
    """``jnp.argmax(logits, axis=-1)``, int32; two reductions, since XLA vectorizes none of pairs on CPUs.

    Args:
      logits: operands or results of ``lax.cond``, which are arrays in memory: fused into both reductions, they would be
        computed twice, and may then differ in the last bit.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    found = (logits == largest) | jnp.isnan(logits)
    return jnp.min(jnp.where(found, places, logits.shape[-1] - 1), axis=-1)


def _changed(logits: jax.Array, changes: Changes) -> jax.Array:
    by = changes.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / by, logits * by)
    logits = jnp.where(changes.seen, repeated, logits)
    logits = logits - changes.frequency[:, None] * changes.generated
    logits = logits - changes.presence[:, None] * (changes.generated > 0)
    return jnp.where(jnp.isneginf(changes.bias), -jnp.inf, logits + changes.bias)


def _drawn(logits: jax.Array, rows: SamplingRows, greedy: jax.Array) -> jax.Array:
    scaled = logits / jnp.where(greedy, 1, rows.temperature)[:, None]
    leaves_out = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)

    def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), number), logits.shape[1:])

    noises = jax.vmap(noise)(rows.seed, rows.number)
    # The largest of logits and Gumbel noise is a draw from the softmax (Gumbel, 1954).
    noised = lax.cond(
        jnp.any(leaves_out & ~greedy),
        lambda: (
            jnp.where(leaves_out[:, None], keep_likeliest(scaled, rows, leaves_out & ~greedy), scaled)
            + noises
        ),
        lambda: scaled + noises,
    )
    return likeliest(noised)


def keep_likeliest(logits: jax.Array, rows: SamplingRows, leaves_out: jax.Array) -> jax.Array:
    """Logits with −∞ for the tokens that top-k, top-p and min-p leave out, in that order.

    Sorting a vocabulary takes several milliseconds a row on a CPU. Mostly few tokens are kept, and finding the
    likeliest ones takes a hundredth of it; only where the last token that is kept is not among them, all are sorted.
    What is kept of a row does not depend on the other rows.

    Args:
      leaves_out: rows whose result counts.
    """
    clean = jnp.where(jnp.isnan(logits), -jnp.inf, logits)  # what compares with nothing is not kept
    vocab = logits.shape[-1]
    first = min(_FIRST, vocab)
    largest = jnp.max(clean, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(clean - largest), axis=-1, keepdims=True)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]

    def last(ordered: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """How many of the likeliest tokens are kept, the last one's logit, and whether there may be no more of them."""
        places = jnp.arange(ordered.shape[-1])
        weights = jnp.where(places < k, jnp.exp(ordered - largest), 0)
        # With top-k their sum is that of the tokens that it keeps.
        probabilities = weights / jnp.where(k < vocab, jnp.sum(weights, axis=-1, keepdims=True), total)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        keep = (before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
        keep &= probabilities >= rows.min_p[:, None] * probabilities[:, :1]
        keep &= places < k
        every = jnp.all(keep, axis=-1)
        count = jnp.where(every, ordered.shape[-1], jnp.maximum(jnp.argmin(keep, axis=-1), 1))
        known = jnp.where(k[:, 0] < vocab, k[:, 0] <= ordered.shape[-1], ~every)
        return count, jnp.take_along_axis(ordered, count[:, None] - 1, axis=-1)[:, 0], known

    count, least, known = last(lax.top_k(clean, first)[0])
    if first < vocab:

        def sort() -> tuple[jax.Array, jax.Array]:
            every_count, every_least, _ = last(-jnp.sort(-clean, axis=-1))
            return jnp.where(known, count, every_count), jnp.where(known, least, every_least)

        count, least = lax.cond(jnp.any(leaves_out & ~known), sort, lambda: (count, least))
    above, equal = clean > least[:, None], clean == least[:, None]
    # Of equal ones those with the lowest ids.
    room = count - jnp.sum(above, axis=-1, dtype=jnp.int32)
    equal &= jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room[:, None]
    return jnp.where(above | equal, logits, -jnp.inf)
