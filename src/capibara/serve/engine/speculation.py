"""Tokens that are guessed ahead, and looked at together in one step (Leviathan et al., arXiv:2211.17192).

A step takes about as long for a few tokens of a text as for one, since what takes the time is reading the weights. So
the step is given guesses of the next tokens, too, and every one that the model would have written itself is kept. What
a text is does not depend on guesses: each token is chosen from the model's own logits, with the random numbers that it
has without them, and with the penalties, and what a grammar allows, after the tokens before it.

Guesses come from a smaller model of the same vocabulary, whose keys and values lie in pages of the same numbers, or
from the text itself: what followed the same tokens earlier (Saxena, 2023, *prompt lookup decoding*).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from capibara.core.encoders import require_decoder
from capibara.core.paged import StepShape
from capibara.errors import ConfigError
from capibara.serve.engine.choosing import Asked, choose_tokens
from capibara.serve.engine.layers import as_computed, cache_dtype_of, layers_apart, room_for_panels
from capibara.serve.engine.programs import Programs, kept_programs
from capibara.serve.engine.sequences import Sequence

__all__ = ["DraftModel", "Earlier", "Speculation", "check_speculation"]

_SHORTEST = 2  # tokens that have to be the same
_MOST_BEHIND = 4  # tokens that a draft model reads at most to come back to a text


@dataclass(frozen=True)
class Speculation:
    """How tokens are guessed.

    Attributes:
      tokens: how many at most a text and step, 1 to 16.
      draft: a smaller decoder of the same vocabulary, without recurrent states, that takes texts of the engine's
        ``max_length``; ``None``: the text itself.
      params, state: of the draft; by default its own.
      longest: so many last tokens, at most, are looked for earlier in the text.
    """

    tokens: int = 4
    draft: Any | None = None
    params: Any | None = None
    state: Any | None = None
    longest: int = 4


def shares_arrays(settings: Speculation, params: Any) -> bool:
    """Whether the draft model has arrays of these parameters."""
    if settings.draft is None:
        return False
    own = settings.draft.params if settings.params is None else settings.params
    known = set(map(id, jax.tree.leaves(params)))
    return not known.isdisjoint(map(id, jax.tree.leaves(own)))


def check_speculation(settings: Speculation, model: Any, max_length: int) -> None:
    """Refuse what cannot be done.

    Raises:
      ConfigError: a number is out of range, a model has recurrent states, or the draft has another vocabulary or takes
        shorter texts.
    """
    for name, value, least, most in (
        ("tokens", settings.tokens, 1, 16),
        ("longest", settings.longest, _SHORTEST, 32),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"speculation.{name}={value!r}: expected an integer from {least} to {most}.")
    if "ssm" in model.config.model.block_kinds:
        raise ConfigError(
            "speculation: the model has recurrent states, which cannot be taken back. Leave it out."
        )
    if settings.draft is None:
        return
    own = settings.draft.config.model
    require_decoder(own, "guessing tokens")
    if own.vocab_size != model.config.model.vocab_size:
        raise ConfigError(
            f"speculation.draft has {own.vocab_size} token ids, the model {model.config.model.vocab_size}. Use one "
            "with the same tokenizer."
        )
    if "ssm" in own.block_kinds or settings.draft.mesh != model.mesh:
        raise ConfigError("speculation.draft: expected a model of attention alone, on the mesh of the other.")
    if own.max_sequence_length < max_length:
        raise ConfigError(
            f"speculation.draft takes {own.max_sequence_length} tokens, the engine {max_length}: expected at least as "
            "many. Choose a smaller max_length, or another draft model."
        )


class Earlier:
    """What followed the last tokens of a text when they were last written."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, tokens: Row[int], count: int, after: Row[int] = ()) -> list[int]:
        """The tokens after the longest such place, at most so many.

        Args:
          after: tokens that are taken to follow the text before them.
        """
        # The last token is not yet followed by anything.
        for end in range(max(1, self._known), len(tokens)):
            for size in range(_SHORTEST, min(self._longest, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        last = [*tokens[-self._longest :], *after]
        for size in range(min(self._longest, len(last)), _SHORTEST - 1, -1):
            place = self._after.get(tuple(last[-size:]))
            if place is not None:
                return list(tokens[place : place + count])
        return []


class DraftModel:
    """A smaller model that guesses. Its pages have the numbers of the other's.

    Args:
      settings: with ``draft``. pages, page_size, slots: as of the other model's pools.
      dtype: of its pools; ``None``: that of its arithmetic.
      writable: only token ids below this are guessed. donate: see
        :func:`~capibara.serve.engine.layers.layers_apart`.
    """

    def __init__(
        self,
        settings: Speculation,
        pages: int,
        page_size: int,
        slots: int,
        *,
        dtype: Any,
        writable: int,
        donate: bool,
        untraced: bool = False,
    ) -> None:
        model = settings.draft
        assert model is not None
        weights = model.params if settings.params is None else settings.params
        state = model.state if settings.state is None else settings.state
        dtype = cache_dtype_of(model) if dtype is None else dtype
        model = as_computed(model)
        panels = room_for_panels(model, weights, donate=donate)
        self.params = layers_apart(model, weights, panels=panels, donate=donate)
        kept = kept_programs(model, self.params, state, writable=writable) if untraced else None
        self.programs = Programs(model, self.params, state, writable=writable, untraced=kept)
        self._vocabulary = model.config.model.vocab_size
        with model.backend.scope():
            self.cache = model.init_pages(pages, page_size, slots, dtype=dtype)

    def follow(self, shape: StepShape, inputs: Any) -> None:
        """Read what the other model reads in a step."""
        _, self.cache, _ = self.programs.step(shape, self.cache, inputs)

    def catch_up(self, shape: StepShape, table: int, sequences: Row[Sequence | None]) -> None:
        """Read the last tokens of texts that the model has read and this one has not, if they are few."""
        behind = [s.computed - s.drafted if s else 0 for s in sequences]
        behind = [late if late <= _MOST_BEHIND else 0 for late in behind]
        for back in range(max(behind, default=0), 0, -1):
            rows = [s if late >= back else None for s, late in zip(sequences, behind, strict=True)]
            at = [s.computed - back if s else 0 for s in rows]
            self._step(
                shape, table, rows, at, [s.tokens[p] if s else 0 for s, p in zip(rows, at, strict=True)]
            )
        for s, late in zip(sequences, behind, strict=True):
            if s is not None and late:
                s.drafted = s.computed

    def guess(
        self, shape: StepShape, table: int, sequences: Row[Sequence], counts: Row[int]
    ) -> list[list[int]]:
        """The next tokens of texts, so many of each; of one that it has not followed, none.

        Args:
          shape: of steps with a row for each. table: pages of a text.
        """
        counts = [
            n if s.computed - s.drafted <= _MOST_BEHIND else 0 for s, n in zip(sequences, counts, strict=True)
        ]
        self.catch_up(shape, table, [s if n else None for s, n in zip(sequences, counts, strict=True)])
        found: list[list[int]] = [[] for _ in sequences]
        last = [s.tokens[-1] for s in sequences]
        for ahead in range(max(counts, default=0)):
            rows = [s if n > ahead else None for s, n in zip(sequences, counts, strict=True)]
            if not any(rows):
                break
            logits = self._step(shape, table, rows, [s.computed + ahead for s in sequences], last)
            asked = [Asked(place, s, tuple(found[place])) for place, s in enumerate(rows) if s is not None]
            # With the noise of the text's own tokens: so at a high temperature, too, guesses are often right.
            tokens = choose_tokens(self.programs, logits, asked, self._vocabulary)
            for one, (token, _) in zip(asked, tokens, strict=True):
                if token < 0:
                    counts[one.place] = ahead  # its grammar has ended
                    continue
                found[one.place].append(token)
                last[one.place] = token
        for s, n in zip(sequences, counts, strict=True):
            if n:
                s.drafted = s.computed + n
        return found

    def _step(
        self, shape: StepShape, table: int, rows: Row[Sequence | None], starts: Row[int], tokens: Row[int]
    ) -> jax.Array:
        none = np.zeros(shape.sequences, np.int32)
        inputs: dict[str, Any] = {key: none.copy() for key in ("tokens", "starts", "counts")}
        inputs["slots"] = none - 1
        inputs["page_table"] = np.full((shape.sequences, table), -1, np.int32)
        inputs["outputs"] = np.arange(shape.sequences, dtype=np.int32)
        for place, s in enumerate(rows):
            if s is None:
                continue
            inputs["tokens"][place], inputs["starts"][place] = tokens[place], starts[place]
            inputs["counts"][place] = 1
            inputs["page_table"][place, : len(s.pages)] = s.pages
        logits, self.cache, _ = self.programs.step(shape, self.cache, inputs)
        return logits
