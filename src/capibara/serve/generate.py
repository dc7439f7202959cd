"""Generate text, one token at a time.

The prompt is read in one step (prefill), which fills the cache: keys and values for attention, the recurrent state
for state-space blocks. After that, each token costs one step. The next step is queued on the device before the token
of the previous one is read, so that printing does not delay computation.

An attention cache has ``max_sequence_length`` positions. When it is full, the last half of the text in it is read
again into an empty cache and generation continues: the model then sees between half and all of its context. (Dropping
single positions would not be equivalent: a cached key also depends on the dropped tokens.) A prompt that does not fit
is cut to its last half window in the same way. A model without attention has no such limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.compress.coded import is_coded
from capibara.compress.jax_codes import quantized
from capibara.core.encoders import require_decoder
from capibara.data import ByteTokenizer, Tokenizer, decode_stream
from capibara.errors import ConfigError
from capibara.serve.engine.layers import as_computed, layers_apart, of_few_rows
from capibara.serve.sampling import Sampling, sample
from capibara.serve.token_ids import checked_ids

__all__ = ["Generator"]

_MAX_SEED = 2**32
# Compiling a step for so many tokens takes about as long as reading them singly.
_LEAST_CHUNK = 64


class Generator:
    """Generates from one model with one kind of sampling; compiles once and can be used many times.

    Args:
      model: anything with ``init_cache``, ``decode`` and ``config`` as
        :class:`capibara.core.ModularCapibaraModel`.
      params: its parameters; some may be quantized (:func:`capibara.serve.load_compressed` with ``decode=False``).
      state: its non-trained state, if it has any.
      sampling: how tokens are chosen.
      vocabulary: only token ids below this are chosen; by default all.
      tokenizer: for :meth:`text`; by default bytes.
      places: positions of the cache; by default ``max_sequence_length``, which is also the most.

    Attributes:
      decoded: quantized parameters that the compiled step has to decode, and for which operation; known once it is
        compiled, by the first token.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        state: Any | None = None,
        sampling: Sampling | None = None,
        vocabulary: int | None = None,
        tokenizer: Tokenizer | None = None,
        places: int | None = None,
    ) -> None:
        settings = model.config.model
        require_decoder(settings, "generating text")
        if places is not None and not 1 <= places <= settings.max_sequence_length:
            raise ConfigError(
                f"places={places!r} must be from 1 to model.max_sequence_length={settings.max_sequence_length}."
            )
        self.model = model = as_computed(model)
        self.params, self.state = layers_apart(model, params), state
        self.sampling = sampling or Sampling()
        if self.sampling.changes_logits:
            raise ConfigError(
                "sampling has penalties or biases, which Generator does not do. Use capibara.serve.Engine."
            )
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.places: int = places or settings.max_sequence_length
        # Without attention the cache is a state of fixed size, and a text of any length fits.
        self.bounded = settings.attends
        allowed = min(vocabulary or settings.vocab_size, settings.vocab_size)

        def advance(
            params: Any, state: Any, tokens: jax.Array, cache: Any, key: jax.Array, number: Any
        ) -> Any:
            logits, cache = model.decode(params, tokens, cache, state=state)
            last = logits[:, -1]
            last = jnp.where(jnp.arange(last.shape[-1]) < allowed, last, -jnp.inf)
            return sample(jax.random.fold_in(key, number), last, self.sampling), cache

        self.decoded: dict[str, str] = {}
        if any(map(is_coded, jax.tree_util.tree_leaves(params, is_leaf=is_coded))):
            advance = quantized(advance, decoded=self.decoded.__setitem__)
        self._advance = jax.jit(of_few_rows(model, params, advance, tokens=2), donate_argnums=3)

        def advance_rows(
            params: Any,
            state: Any,
            tokens: jax.Array,
            segments: jax.Array,
            cache: Any,
            keys: Any,
            number: Any,
        ) -> Any:
            inputs = {"tokens": tokens, "segments": segments}
            logits, cache = model.decode(params, inputs, cache, state=state)
            last = jnp.maximum(jnp.sum(segments, axis=1) - 1, 0)  # padding stands after the tokens
            last = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
            last = jnp.where(jnp.arange(last.shape[-1]) < allowed, last, -jnp.inf)
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
            return jax.vmap(lambda key, row: sample(key, row, self.sampling))(keys, last), cache

        if any(map(is_coded, jax.tree_util.tree_leaves(params, is_leaf=is_coded))):
            advance_rows = quantized(advance_rows, decoded=self.decoded.__setitem__)
        self._advance_rows = jax.jit(of_few_rows(model, params, advance_rows, tokens=2), donate_argnums=4)

    def tokens(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_tokens: int,
        seed: int = 0,
        stop: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield at most ``max_tokens`` token ids that continue ``prompt``.

        The same model, prompt, sampling and seed give the same tokens; the requested number does not change the first
        ones.

        Args:
          prompt: at least one token id.
          max_tokens: how many to generate, at least 1.
          seed: 0 to 2^32 − 1.
          stop: token ids that end the text; they are not yielded.

        Raises:
          ConfigError: an argument is out of range. Raised by this call, not by the first token.
        """
        return self._tokens(
            self._checked(prompt, max_tokens, seed), max_tokens, jax.random.key(seed), frozenset(stop)
        )

    def _checked(self, prompt: Sequence[int] | np.ndarray, max_tokens: int, seed: int) -> list[int]:
        """The prompt's tokens, if the arguments are in order."""
        history = checked_ids("prompt", prompt, self.model.config.model.vocab_size)
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens!r} must be at least 1.")
        if not 0 <= seed < _MAX_SEED:
            raise ConfigError(f"seed={seed!r} must be an integer from 0 to {_MAX_SEED - 1}.")
        return [int(token) for token in history]

    def batch(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        max_tokens: int,
        seed: int = 0,
        stop: Collection[int] = (),
    ) -> list[list[int]]:
        """The token ids that continue each of several prompts, whose lengths may differ, computed together.

        What a row gets does not depend on the others. Arguments as :meth:`tokens`.

        Raises:
          ConfigError: an argument is out of range; or a prompt and ``max_tokens`` do not fit into the cache, which does
            not slide here.
        """
        rows = [self._checked(prompt, max_tokens, seed) for prompt in prompts]
        if not rows:
            return []
        longest = max(map(len, rows))
        if self.bounded and longest + max_tokens - 1 > self.places:
            raise ConfigError(
                f"a prompt of {longest} tokens and max_tokens={max_tokens} need {longest + max_tokens - 1} places, the "
                f"cache has {self.places}. Shorten one of them, or use tokens(), whose cache slides."
            )
        ending = frozenset(stop)
        width = max(1, 1 << (longest - 1).bit_length())
        width = min(width, self.places) if self.bounded else width
        tokens = np.zeros((len(rows), width), np.int32)
        segments = np.zeros((len(rows), width), np.int32)
        for at, row in enumerate(rows):
            tokens[at, : len(row)], segments[at, : len(row)] = row, 1
        cache = self.model.init_cache(len(rows), self.places, ragged=True)
        keys = jax.random.split(jax.random.key(seed), len(rows))
        found: list[list[int]] = [[] for _ in rows]
        going = np.ones(len(rows), bool)
        for number in range(max_tokens):
            new, cache = self._advance_rows(
                self.params, self.state, jnp.asarray(tokens), jnp.asarray(segments), cache, keys, number
            )
            new = np.asarray(new)
            for at in np.flatnonzero(going):
                if int(new[at]) in ending:
                    going[at] = False
                else:
                    found[at].append(int(new[at]))
            if not going.any():
                break
            tokens, segments = new[:, None], going.astype(np.int32)[:, None]
        return found

    def text(self, prompt: str, *, max_tokens: int, seed: int = 0) -> Iterator[str]:
        """Yield the text that continues ``prompt``, in pieces of whole characters, until a token that ends it.

        An empty prompt of a byte-level model starts after a line break, like a document. Arguments and errors as
        :meth:`tokens`.
        """
        stop = self.tokenizer.stop_tokens
        tokens = self.tokens(self.tokenizer.encode(prompt), max_tokens=max_tokens, seed=seed, stop=stop)
        return decode_stream(self.tokenizer, tokens)

    def _tokens(
        self, prompt: list[int], max_tokens: int, key: jax.Array, stop: frozenset[int]
    ) -> Iterator[int]:
        half = max(1, self.places // 2)
        history = deque(prompt, maxlen=half if self.bounded else 1)
        fits = not self.bounded or len(prompt) <= self.places
        token, cache, used = self._prefill(prompt if fits else prompt[-half:], key, 0)
        for number in range(1, max_tokens + 1):
            following = None
            room = not self.bounded or used < self.places
            if number < max_tokens and room:
                following, cache, used = self._read(token[:, None], cache, used, key, number)
            value = int(token[0])
            if value in stop:
                return
            history.append(value)
            yield value
            if following is None and number < max_tokens:
                following, cache, used = self._prefill(list(history), key, number)
            if following is not None:
                token = following

    def _prefill(self, prompt: list[int], key: jax.Array, number: int) -> tuple[jax.Array, Any, int]:
        """Read ``prompt`` into an empty cache; return the next token, the cache and the places used."""
        cache, used = self.model.init_cache(1, self.places), 0
        at, token = 0, None
        while at < len(prompt):
            size = self._chunk(len(prompt) - at, first=at == 0)
            tokens = jnp.asarray([prompt[at : at + size]], jnp.int32)
            token, cache, used = self._read(tokens, cache, used, key, number)
            at += size
        assert token is not None
        return token, cache, used

    def _chunk(self, left: int, *, first: bool) -> int:
        """How many tokens are read at once: every number would otherwise compile anew."""
        if first and self.bounded and left == max(1, self.places // 2):
            return left
        power = 1 << (left.bit_length() - 1)
        return power if first or power >= _LEAST_CHUNK else 1

    def _read(
        self, tokens: jax.Array, cache: Any, used: int, key: jax.Array, number: int
    ) -> tuple[jax.Array, Any, int]:
        """Read tokens ``[1, new]`` into a cache of which ``used`` places are; the next token, and both again.

        The one place from which the compiled step is called: in it the number of places used is not known, and
        more tokens than places would overwrite the last ones without a word.
        """
        used += tokens.shape[1]
        if self.bounded and used > self.places:
            raise RuntimeError(
                f"{used} tokens for the {self.places} places of the cache: a fault in Capibara"
            )
        token, cache = self._advance(self.params, self.state, tokens, cache, key, number)
        return token, cache, used
