"""Choosing the next token from logits.

Four settings, applied in this order: the temperature divides the logits; top-k keeps the *k* likeliest tokens; top-p
(nucleus sampling: Holtzman et al., arXiv:1904.09751) keeps the smallest set of likeliest tokens whose probability,
after the first two, reaches *p*; min-p keeps those with at least a part of the likeliest one's probability. Other
tokens get logit −∞. Among equal logits the smaller token id comes first, so the number of tokens kept is deterministic.
Penalties and biases are for the engine (:mod:`capibara.serve.row_sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from capibara.errors import ConfigError

__all__ = ["GREEDY", "GREEDY_BELOW", "Sampling", "keep_min_p", "keep_top_k", "keep_top_p", "sample"]


GREEDY_BELOW = 1e-5
"""A temperature below this takes the likeliest token: logits that are divided by less leave what float32 holds."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: 0 to 100; 0, and what is below 0.00001, always chooses the likeliest token.
      top_k: keep this many of the likeliest tokens; 0 keeps all.
      top_p: keep the likeliest tokens that together have this probability, above 0 and at most 1.
      min_p: keep the tokens whose probability is at least this part of the likeliest one's, 0 to 1; 0 keeps all
        (Nguyen et al., arXiv:2407.01082).
      presence_penalty: subtracted from the logits of tokens that were generated before, -2 to 2.
      frequency_penalty: subtracted once for each time, -2 to 2.
      repetition_penalty: 0.01 to 100; divides positive logits, and multiplies negative ones, of tokens that the
        prompt or the text has (Keskar et al., arXiv:1909.05858); 1 changes nothing.
      logit_bias: added to the logits of tokens, pairs ``(token id, -100 to 100)``.

    Raises:
      ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ConfigError(
                f"temperature={self.temperature!r} must be from 0 to 100; 0 always takes the likeliest token, 1 "
                "samples from the model's own distribution."
            )
        if isinstance(self.top_k, bool) or not 0 <= self.top_k < 1 << 31 or int(self.top_k) != self.top_k:
            raise ConfigError(
                f"top_k={self.top_k!r} must be an integer of at least 0 and 31 bits; 0 keeps every token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} must be above 0 and at most 1; 1 keeps every token.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p!r} must be from 0 to 1; 0 keeps every token.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be from -2 to 2; 0 changes nothing.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty!r} must be from 0.01 to 100; 1 changes nothing."
            )
        for token, bias in self.logit_bias:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0 or not -100 <= bias <= 100:
                raise ConfigError(
                    f"logit_bias has {token!r}: {bias!r}, expected token ids and numbers from -100 to 100."
                )

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias)


GREEDY = Sampling(temperature=0.0)
"""Always the likeliest token."""


def _ranks(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the token ids in descending order of logits, and each token's place in that order."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Set all but the ``k`` largest logits to −∞; ``k`` of 0, or of at least the vocabulary, keeps all.

    Args:
      logits: float ``[..., vocab]``.
      k: a Python integer.
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    return jnp.where(_ranks(logits)[1] < k, logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Set all logits to −∞ but those of the smallest set of likeliest tokens with a total probability ≥
    ``p``.

    Args:
      logits: float ``[..., vocab]``; the likeliest token is always kept.
      p: above 0; 1 keeps all.
    """
    if p >= 1:
        return logits
    order, places = _ranks(logits)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The first place is kept even if rounding makes "before" anything but 0.
    kept = (before < p).at[..., 0].set(True)
    return jnp.where(jnp.take_along_axis(kept, places, axis=-1), logits, -jnp.inf)


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Set all logits to −∞ but those of tokens with at least ``p`` of the likeliest one's probability.

    Args:
      logits: float ``[..., vocab]``.
      p: from 0, which keeps all, to 1.
    """
    if p == 0:
        return logits
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probabilities >= p * probabilities.max(axis=-1, keepdims=True), logits, -jnp.inf)


def sample(key: jax.Array, logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose one token per row.

    Args:
      key: a typed PRNG key; the same key and logits give the same tokens.
      logits: float ``[..., vocab]``.
      sampling: static, part of the compiled program.

    Returns:
      int32 ``[...]``.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature < GREEDY_BELOW:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = keep_top_p(keep_top_k(logits / sampling.temperature, sampling.top_k), sampling.top_p)
    return jax.random.categorical(key, keep_min_p(logits, sampling.min_p), axis=-1).astype(jnp.int32)
